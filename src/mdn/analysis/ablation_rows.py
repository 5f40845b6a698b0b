"""The rows of the paper's ablation table at a small scale: what each changes, and what the paper reports for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    group: str
    paper: str
    """what the paper reports at 400M parameters"""
    model: dict[str, Any] = field(default_factory=dict)
    """fields of the model's config that differ from the full model"""


SMALL = {
    "mixer": "momentum_deltanet",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "expand_v": 1,
    "intermediate_size": 192,
}
# A ratio of 7:1 needs eight layers; these rows have their own reference of the same depth.
DEEP = {"num_hidden_layers": 8}
ATTENTION = {"num_heads": 4, "rope_theta": 10000.0}

ROWS: dict[str, Row] = {
    "full": Row("components", "trains; Wiki. 31.51, Lamb. 41.62"),
    "no output correction": Row("components", "trains; Wiki. 31.72, Lamb. 42.31", {"use_output_correction": False}),
    "mu = 0": Row("components", "NaN at step 1 (its kernels divide by mu)", {"use_momentum": False}),
    "no clamp of log mu": Row("components", "NaN at step 70", {"min_log_mu": None}),
    "alpha_max = 1": Row("components", "NaN at step 1", {"bound_alpha": False}),
    "beta_max = 1": Row("components", "trains; Wiki. 31.52, Lamb. 42.72", {"bound_beta": False}),
    "eta = 2 sigmoid": Row("components", "trains; Wiki. 31.89, Lamb. 49.10", {"eta_activation": "sigmoid"}),
    "log mu >= -1.5": Row("clamp of log mu", "trains; Wiki. 31.50, Lamb. 42.65", {"min_log_mu": -1.5}),
    "log mu >= -1.357": Row("clamp of log mu", "trains; Wiki. 31.44, Lamb. 44.90", {"min_log_mu": -1.357}),
    "log mu >= -1": Row("clamp of log mu", "trains; Wiki. 31.39, Lamb. 43.53", {"min_log_mu": -1.0}),
    "8 layers": Row("hybrids", "(no such row; the reference of the next two)", DEEP),
    "hybrid 3:1": Row("hybrids", "trains; Wiki. 30.09, Lamb. 46.71", DEEP | {"attn": {"layers": [3, 7], **ATTENTION}}),
    "hybrid 7:1": Row("hybrids", "trains; Wiki. 30.32, Lamb. 42.95", DEEP | {"attn": {"layers": [7], **ATTENTION}}),
}
"""the full model clamps log mu at -2, the paper's reported value"""


def choose_rows(words: str) -> list[str]:
    """Row names from 'all', a group, or names separated by commas."""
    names = []
    for word in (word.strip() for word in words.split(",")):
        group = [name for name, row in ROWS.items() if row.group == word]
        found = list(ROWS) if word == "all" else group or ([word] if word in ROWS else [])
        if not found:
            groups = sorted({row.group for row in ROWS.values()})
            raise ValueError(
                f"--rows has no row or group {word!r}; groups: all, {', '.join(groups)}; rows: {list(ROWS)}"
            )
        names += [name for name in found if name not in names]
    return names
