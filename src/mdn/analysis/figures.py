"""Every figure of the docs, drawn again from the recorded results beside them: `python -m mdn.analysis.figures`.

docs/experiments/data/NAME.json becomes docs/figures/NAME.png and NAME.svg, signed with the command that measured the
results. Results are measured by that command (with `--json`), not here: experiments take hours, figures seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mdn.common.plots import save_figure

DATA, FIGURES = Path("docs/experiments/data"), Path("docs/figures")


def _drawer(kind: str) -> Callable[[dict[str, Any]], Any]:
    """The function that draws results of a kind; imported when needed."""
    from mdn.analysis import ablation_table, causality, spectra, stability, state_norm
    from mdn.bench import decode

    drawers: dict[str, Callable[[dict[str, Any]], Any]] = {
        "spectra": spectra.draw,
        "stability": stability.draw,
        "state-norm": state_norm.draw,
        "decode": decode.draw,
        "ablations": ablation_table.draw,
        "causality": causality.draw,
    }
    if kind not in drawers:
        raise ValueError(f"kind must be one of {sorted(drawers)}, mqar or train, got {kind!r}")
    return drawers[kind]


def _draw_mqar(content: dict[str, Any], target: Path, command: str) -> list[Path]:
    from mdn.evaluation.mqar.recipe import MqarRecipe
    from mdn.evaluation.mqar.report import Chosen, draw

    names = ("mixer", "hidden_size", "learning_rate", "parameters", "state_numbers", "accuracy")
    chosen = [Chosen(**{name: row[name] for name in names}) for row in content["chosen"]]
    return draw(MqarRecipe.model_validate(content["recipe"]), chosen, target, command)


def _draw_train(content: dict[str, Any], target: Path, command: str) -> list[Path]:
    from mdn.bench import train

    return train.plot([train.Row(**row) for row in content["rows"]], target, command)


def draw_file(path: Path, figures: Path) -> list[Path]:
    """The figure of one result file, as PNG and SVG."""
    content = json.loads(path.read_text(encoding="utf-8"))
    target = figures / f"{path.stem}.png"
    if "chosen" in content:  # `mdn mqar`
        return _draw_mqar(content, target, content["provenance"]["command"])
    if "setting" in content:  # `mdn bench train`
        return _draw_train(content, target, content.get("command", "mdn bench train"))
    return save_figure(_drawer(content.get("kind", ""))(content), target, content["command"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mdn.analysis.figures", description="draw the figures of the docs")
    parser.add_argument("--data", type=Path, default=DATA, help=f"result files ({DATA})")
    parser.add_argument("--figures", type=Path, default=FIGURES, help=f"where figures go ({FIGURES})")
    args = parser.parse_args(arguments)
    files = sorted(args.data.glob("*.json"))
    if not files:
        print(f"no result files in {args.data}", file=sys.stderr)
        return 2
    for path in files:
        print(*draw_file(path, args.figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
