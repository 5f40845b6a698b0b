"""What a report of `mdn bench kernels` is held to."""

from __future__ import annotations

import math
from typing import Any

from mdn.bench.kernel_report import total_counts, total_ms

BARS = {"launches": {"forward": 5, "backward": 6}, "bytes_K128": {"forward": 3000, "backward": 8000}}
SPILL_BAR_K128 = 64
ESTIMATE_BARS = {"H=6 K=128 V=256": {"gdn": 1.5, "kda": 1.1}, "H=6 K=256 V=512": {"gdn": 1.4, "kda": 1.3}}
"""how many times as long ours may take by the estimate on sm_90"""
LOADS_FIRST = ("default", "batch 1", "batch 1, K=256, V=512")
"""inputs for which a decoding step issues all loads before it uses one"""
COUNT_BARS = {"forward": 700, "backward": 2000}
"""warp instructions per token and head at K = V = 128, emulated"""
WAVEFRONT_BAR = 1.2
"""passes through shared memory over those without bank conflicts, in every kernel"""
SHARED_LIMITS = {"sm_80": 166_912, "sm_86": 101_376, "sm_90": 232_448, "sm_120": 101_376}
"""bytes of shared memory that a block can have"""


def broken_bars(report: dict[str, Any]) -> list[str]:
    """Every bar of this project that the report does not meet, in words."""
    broken = []
    for name, bar in BARS["launches"].items():
        if report["launches"][name] > bar:
            broken.append(f"{name}: {report['launches'][name]} launches, bar {bar}")
    for name, bar in BARS["bytes_K128"].items():
        found = report["bytes_written_per_token_head"].get("K128", {}).get(name, 0)
        if found > bar:
            broken.append(f"{name}: {found:.0f} bytes per token and head at K=128, bar {bar}")
    for row in (*report["kernels"], *report.get("variants", ())):
        inputs = row.get("variant", "default")
        held = row["K"] == 128 and row["target"] in ("sm_80", "sm_90", "gfx942") and row["dtype"] == "bfloat16"
        if held and row["spill_bytes"] > SPILL_BAR_K128:
            broken.append(f"{row['name']} ({inputs}) spills {row['spill_bytes']} bytes on {row['target']} at K=128")
        # Others wait for a slot's number, or for a few small loads: docs/kernels.md says which.
        if row["name"] == "decode" and inputs in LOADS_FIRST and row.get("loads_after_a_wait"):
            broken.append(f"decode ({inputs}) issues {row['loads_after_a_wait']} loads after a wait on {row['target']}")
    for (target, size), times in total_ms(report.get("estimates", [])).items():
        for other, factor in ESTIMATE_BARS[size].items():
            if target == "sm_90" and times["mdn"] > factor * times[other]:
                broken.append(f"{size}: estimated {times['mdn'] / times[other]:.2f} times {other}, bar {factor}")
    ours = [row for row in report.get("executed", ()) if row["op"] == "mdn"]
    for (target, _, which), sums in total_counts(ours).items():
        if sums["warp_instructions"] > COUNT_BARS.get(which, math.inf):
            found = sums["warp_instructions"]
            broken.append(f"{which}: {found:.0f} warp instructions on {target}, bar {COUNT_BARS[which]}")
    for size, rows in (("K=V=128", ours), ("K=256, V=512", report.get("executed_large", ()))):
        for row in rows:
            if row["wavefronts"] > WAVEFRONT_BAR * row["wavefronts_ideal"]:
                factor = row["wavefronts"] / row["wavefronts_ideal"]
                broken.append(
                    f"{row['name']} ({row['pass']}, {row['target']}, {size}): {factor:.2f} times the wavefronts "
                    f"without bank conflicts, bar {WAVEFRONT_BAR}"
                )
    for row in (*report["kernels"], *report.get("variants", ())):
        if row.get("register_products"):
            broken.append(f"{row['name']} has wgmma with an operand in registers on {row['target']} at K={row['K']}")
        if row["shared_bytes"] > SHARED_LIMITS.get(row["target"], row["shared_bytes"]):
            broken.append(
                f"{row['name']} needs {row['shared_bytes']} bytes of shared memory on {row['target']} at K={row['K']}"
            )
    return broken
