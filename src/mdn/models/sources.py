"""The configs that come with the package."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def shipped_configs() -> dict[str, Path]:
    """The JSON configs inside the package, by name."""
    return {path.stem: path for path in sorted(CONFIGS.glob("*.json"))}
