"""The Python of docs/model.md runs as printed."""

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "model.md"


def test_the_examples_of_the_model_page_run_one_after_the_other(capsys):
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) >= 3
    names: dict = {}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
    assert "torch.Size([1, 120, 64])" in capsys.readouterr().out
