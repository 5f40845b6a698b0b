"""`model.init_from`: training starts from a trained or converted model, with its tokenizer and its config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from eval_support import make_tokenizer
from mdn.cli import main
from mdn.common.loading import load_model
from mdn.training.build import build_model, model_config
from mdn.training.recipe import load_recipe, to_yaml
from mdn.training.run import train
from training_support import tiny_recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    train(tiny_recipe(root, training={"steps": 3}))
    return root


def write_recipe(trained: Path, folder: Path, **model: object) -> Path:
    """A recipe for fine-tuning that names no tokenizer and no size."""
    content = yaml.safe_load(to_yaml(tiny_recipe(trained, "tuned", training={"steps": 2, "learning_rate": 1e-4})))
    content |= {"output": str(folder / "tuned"), "model": {"init_from": str(trained / "run"), **model}}
    del content["tokenizer"]
    path = folder / "tune.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_the_first_weights_are_those_of_the_model(trained: Path, tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(trained, tmp_path))
    assert recipe.tokenizer.kind == "pretrained"
    built = build_model(recipe, model_config(recipe, 257, 256)).state_dict()
    for name, expected in load_model(trained / "run").state_dict().items():
        torch.testing.assert_close(built[name], expected, rtol=0, atol=0)


def test_a_model_is_tuned_from_the_command_line_and_resumes_as_the_same_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(trained, tmp_path)
    assert main(["train", str(path)]) == 0
    assert main(["train", str(tmp_path / "tuned")]) == 0  # finished: from the resolved recipe it is the same run
    assert "resuming" not in capsys.readouterr().err
    before, after = load_model(trained / "run").state_dict(), load_model(tmp_path / "tuned").state_dict()
    changes = [float((after[name] - value).abs().max()) for name, value in before.items()]
    assert 0 < max(changes) < 1e-2


@pytest.mark.parametrize("saved_earlier", [False, True])
def test_the_start_token_is_trained_on_although_the_tokenizer_pads_with_it(tmp_path: Path, saved_earlier: bool) -> None:
    """transformers writes the padding token into the config, and the row of a padding token gets no gradient."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "own")
    settings = {"kind": "pretrained", "path": str(tmp_path / "own")}
    train(tiny_recipe(tmp_path, tokenizer=settings, training={"steps": 1}, logging={"gates_every": 0}))
    place, end = tmp_path / "run" / "model" / "config.json", tokenizer.eos_token_id
    config = json.loads(place.read_text())
    assert config.get("pad_token_id") is None
    if saved_earlier:  # by a version that left the padding token in the config
        place.write_text(json.dumps({**config, "pad_token_id": end}))
    overrides = ["training.weight_decay=0", "training.steps=20", f"output={tmp_path / 'tuned'}"]
    assert main(["train", str(write_recipe(tmp_path, tmp_path)), *overrides]) == 0
    before, after = (load_model(tmp_path / run).model.embeddings.weight for run in ("run", "tuned"))
    assert (after[end] - before[end]).abs().max() > 0


def test_a_converted_model_can_be_tuned(trained: Path, tmp_path: Path) -> None:
    assert main(["convert", str(trained / "run"), str(tmp_path / "converted")]) == 0
    path = write_recipe(trained, tmp_path, init_from=str(tmp_path / "converted"))
    assert main(["train", str(path), "training.steps=1", f"output={tmp_path / 'out'}"]) == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.hidden_size=48"], "does not fit the recipe's model"),
        (["model.config=mdn_tiny"], "model.config and model.init_from are both given"),
        (["model.init_from=nobody/model"], "model.init_from 'nobody/model' is not a directory here: download it first"),
        (["model.init_from=PACKED"], "has int8 weights: packed weights cannot be trained; give the model"),
        (["model.init_from=nowhere"], "'nowhere' is neither a model directory, a run folder nor a Hub id"),
        (["tokenizer={kind: bpe, vocab_size: 257}"], "was trained with another tokenizer"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    path, packed = write_recipe(trained, tmp_path), str(tmp_path / "packed")
    if "model.init_from=PACKED" in overrides:
        assert main(["quantize", str(trained / "run"), packed, "--weights", "int8"]) == 0
    overrides = [override.replace("PACKED", packed) for override in overrides]
    assert main(["train", str(path), *overrides, f"output={tmp_path / 'out'}"]) == 2
    assert message in capsys.readouterr().err
