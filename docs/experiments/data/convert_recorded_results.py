"""Bring recorded results to the one dialect: every file has a kind and a command, NaN and infinity are words.

python convert_recorded_results.py docs/experiments/data benchmarks/results      (run once)
"""
import json
import sys
from pathlib import Path

from mdn.common.results import plain
from mdn.experiments.ablation_results import verdict


def converted(content):
    if "chosen" in content:  # mdn mqar
        kind, command = "mqar", content["provenance"]["command"]
        for row in content["chosen"]:
            row.pop("mean", None), row.pop("spread", None)
    elif "setting" in content:  # mdn bench train
        kind, command = "train", content.pop("command", "mdn bench train")
        content["size"] = content.pop("setting")
    elif "saved_bytes_per_token_and_head" in content:
        kind, command = "op", content.get("command", "mdn bench op")
    else:
        kind, command = content["kind"], content["command"]
    if kind == "ablations":
        for row in content["rows"]:
            row.setdefault("steps", content["scale"]["steps"])
            growth = row["largest log10 growth"]
            row["verdict"] = verdict(row | {"largest log10 growth": None if growth is None else float(growth)})
    return plain({"kind": kind, "command": command, **{k: v for k, v in content.items() if k not in ("kind", "command")}})


for folder in map(Path, sys.argv[1:]):
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if path.stem == "kernels":
            continue
        lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in converted(content).items())
        path.write_text("{" + ",\n".join(lines) + "}\n")
