"""The Python of docs/model.md and docs/mixers.md runs as printed."""

import re
from pathlib import Path

import pytest

from mdn.layers import MIXERS, init

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "printed"),
    [("model.md", "torch.Size([1, 120, 64])"), ("mixers.md", "ShortConvolution(32, width=6, bias=False, silu=True)")],
)
def test_the_examples_of_the_page_run_one_after_the_other(page, printed, capsys, monkeypatch):
    monkeypatch.setattr(init, "TABLE", [*init.TABLE])
    monkeypatch.delitem(MIXERS, "local", raising=False)
    examples = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert len(examples) >= 3
    names: dict = {"__name__": page}
    for example in examples:
        exec(compile(example, page, "exec"), names)
    assert printed in capsys.readouterr().out
    MIXERS.pop("local", None)
