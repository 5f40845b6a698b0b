"""Load a model and its tokenizer from what a user names: a model directory, a run folder or a Hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def check_model_source(source: str) -> None:
    """Refuses what can be neither a model directory nor a Hub id, without asking the network."""
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{source} is not a model directory: it has no config.json")
        return
    owner = path.parts[0] if path.parts else ""
    # "runs" is where `mdn train` writes; nobody means a Hub account by it.
    looks_local = len(path.parts) != 2 or source.startswith((".", "/", "~")) or owner == "runs" or Path(owner).exists()
    if path.exists() or looks_local:
        raise ValueError(f"{source!r} is neither a model directory nor a Hub id (owner/name)")


def load_model(source: str, dtype: str = "auto", device: str = "auto") -> Any:
    """The model in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    import mdn.models  # noqa: F401  (registers the architecture with the Auto classes)

    check_model_source(source)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load {source!r}: {error}") from None
    return model.to(device).eval()


def load(source: str, dtype: str = "auto", device: str = "auto") -> tuple[Any, Any]:
    """The model in evaluation mode and its tokenizer."""
    from transformers import AutoTokenizer

    model = load_model(source, dtype, device)
    try:
        return model, AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the tokenizer of {source!r}: {error}") from None
