"""`plugins:` in a recipe: a user's own mixer and a user's own corpus, from a file beside the recipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mdn.cli import main
from mdn.common.loading import import_plugins
from mdn.layers import MIXERS
from mdn.training.corpus import CORPORA
from mdn.training.recipe import to_yaml
from training_support import tiny_recipe

PLUGIN = '''
from mdn.layers import MIXERS
from mdn.training.corpus import CORPORA


class Renamed(MIXERS["linear_attention"]):
    """A mixer of the user's own."""


class Counting:
    """A corpus of the user's own: numbers as words."""

    def __init__(self, settings, cache_dir):
        self.name = "numbers"
        self.total_bytes = None
        self.count = settings.options["count"]

    def fingerprint(self):
        return f"numbers up to {self.count}"

    def documents(self, start=0):
        return (" ".join(str(n + i) for i in range(40)) for n in range(start, self.count))


MIXERS["renamed"] = Renamed
CORPORA["numbers"] = Counting
'''


def forget_plugins() -> None:
    """As in a new process."""
    for name in [name for name in sys.modules if name.startswith("mdn_plugin_")]:
        del sys.modules[name]


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[Path]:
    content = yaml.safe_load(to_yaml(tiny_recipe(tmp_path, training={"steps": 2})))
    content["plugins"] = ["mine.py"]
    content["model"]["mixer"] = "renamed"
    content["data"] = {**content["data"], "source": "numbers", "paths": [], "options": {"count": 30}}
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(content))
    yield tmp_path / "own.yaml"
    MIXERS.pop("renamed", None)
    CORPORA.pop("numbers", None)
    forget_plugins()


def test_a_recipe_trains_with_a_users_own_mixer_and_corpus(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe), "--dry-run"]) == 0
    assert main(["train", str(recipe)]) == 0
    printed = capsys.readouterr().out
    assert "renamed" in printed
    MIXERS.pop("renamed")
    forget_plugins()
    run, tuned = recipe.parent / "run", recipe.parent / "tuned.yaml"
    content = yaml.safe_load(to_yaml(tiny_recipe(recipe.parent, "tuned", training={"steps": 1})))
    tuned.write_text(yaml.safe_dump(content | {"model": {"init_from": str(run)}}))
    commands = [
        ["generate", str(run), "--prompt", "1 2", "--max-new-tokens", "2"],
        ["info", str(run)],
        ["convert", str(run), str(recipe.parent / "converted")],
        ["train", str(tuned)],
    ]
    for command in commands:
        monkeypatch.delenv("MDN_PLUGINS", raising=False)
        assert main(command) == 2  # nothing is imported unasked
        assert "renamed" in capsys.readouterr().err
        monkeypatch.setenv("MDN_PLUGINS", str(recipe.parent / "mine.py"))
        assert main(command) == 0
        MIXERS.pop("renamed")
        forget_plugins()


def test_plugin_files_of_the_same_name_are_all_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"import sys\nsys.mdn_imports_of_test.append({folder!r})")
    monkeypatch.setattr(sys, "mdn_imports_of_test", [], raising=False)
    monkeypatch.chdir(tmp_path)
    import_plugins(["x/mine.py", "y/mine.py", str(tmp_path / "x" / "mine.py"), "./y/mine.py"])
    assert sys.mdn_imports_of_test == ["x", "y"]  # type: ignore[attr-defined]
    forget_plugins()


def test_a_plugin_that_fails_is_named_with_its_error(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recipe.parent / "mine.py").write_text("import nothing_like_it")
    assert main(["train", str(recipe)]) == 2
    message = capsys.readouterr().err
    assert f"plugin '{recipe.parent / 'mine.py'}' cannot be imported: ModuleNotFoundError" in message


def test_an_unknown_corpus_names_the_known_ones(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "data.source=numberz"]) == 2
    assert "data.source 'numberz' is unknown (did you mean numbers?)" in capsys.readouterr().err
