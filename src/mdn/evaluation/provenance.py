"""What a result must say about itself: versions, the command, the seed, the machine, and a hash of the model."""

from __future__ import annotations

import hashlib
import json
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from mdn.plots import command_line

PACKAGES = ("momentum-deltanet", "torch", "transformers", "tokenizers", "datasets", "lm_eval", "numpy")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def provenance(seed: int | None) -> dict[str, Any]:
    return {
        "command": command_line(),
        "seed": seed,
        "versions": versions(),
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def model_hash(model: torch.nn.Module, tokenizer: Any = None) -> str:
    """SHA-256 over the names, shapes, dtypes and bytes of all weights, the config, and the tokenizer's vocabulary."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    config = getattr(model, "config", None)
    if config is not None:
        # Where the model lies and which library saved it do not change what it computes.
        left_out = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
        fields = {name: value for name, value in config.to_dict().items() if name not in left_out}
        digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
    if tokenizer is not None:
        digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    return digest.hexdigest()
