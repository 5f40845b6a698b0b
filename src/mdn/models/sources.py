"""What a user may write where a model or a config is expected: a shipped name, a file, a directory or a Hub id."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def shipped_configs() -> dict[str, Path]:
    """The JSON configs inside the package, by name."""
    return {path.stem: path for path in sorted(CONFIGS.glob("*.json"))}


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
