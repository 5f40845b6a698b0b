"""The examples of docs/ops.md run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


def test_every_example_of_the_page_runs() -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 3
    names = {"mask": torch.tensor([[0, 1, 1], [1, 1, 1]]), "x": torch.ones(2, 3, 5)}  # what the second one assumes
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
    assert names["state"].shape == (2, 2, 4, 64, 64)
    assert names["packed"].shape == (1, 5, 5)
    assert names["o"].shape == (2, 4, 64)
    assert names["pool"].abs().amax((0, 2, 3, 4)).nonzero().flatten().tolist() == [7, 12]
