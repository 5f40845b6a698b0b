"""Several processes: the same losses as one, sharding that happened, checkpoints that move between rank counts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mdn.training import checkpoints, run
from mdn.training.dataset import prepare_data
from mdn.training.evaluate import evaluate
from ranks_support import numbers, report, run_jobs
from training_support import tiny_recipe

JOBS = ("ddp:ddp:2", "fsdp:fsdp:2", "refused:fsdp:2:plain", "hsdp:hsdp:4")
COPIES = ("one-to-two:copy:run", "two-to-one:copy:ddp", "fsdp-two-to-four:copy:fsdp")
RESUMES = ("one-to-two:ddp:2", "fsdp-two-to-four:fsdp:4")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process here, then every job, then resumes with other numbers of ranks."""
    place = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "plot_loss", lambda *_: None)
        patch.setattr(run, "plot_gates", lambda *_: None)
        run.train(tiny_recipe(place))
        run_jobs(place, *JOBS, *COPIES, *RESUMES)
        run.train(tiny_recipe(place, "two-to-one"))
    return place


def test_two_ddp_processes_equal_one_process_with_the_same_global_batch(root: Path) -> None:
    assert numbers(root, "ddp") == pytest.approx(numbers(root, "run"), abs=1e-5)


@pytest.mark.parametrize(("name", "ranks"), [("fsdp", 2), ("hsdp", 4)])
def test_sharded_training_shards_every_parameter_and_equals_one_process(root: Path, name: str, ranks: int) -> None:
    assert report(root, name, ranks)["kinds"] == ["DTensor"]
    assert numbers(root, name) == pytest.approx(numbers(root, "run"), abs=1e-5)


def test_the_model_of_a_sharded_run_loads_in_one_process(root: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(root / "fsdp" / "model")
    summary = json.loads((root / "fsdp" / "summary.json").read_text())
    measured = evaluate(model, prepare_data(tiny_recipe(root)).held_out, 32, True, show=False)
    assert measured["loss"] == pytest.approx(summary["held_out"]["loss"], abs=1e-5)
    whole = AutoModelForCausalLM.from_pretrained(root / "run" / "model")
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3, msg=name)


def test_sharding_that_did_not_happen_is_an_error_on_every_rank(root: Path) -> None:
    for rank in range(2):
        assert "the model would not be sharded here" in report(root, "refused", 2, rank)["error"]


def test_the_decay_groups_are_the_same_with_and_without_sharding(root: Path) -> None:
    groups = report(root, "ddp", 2)["decay"]
    assert [decay for decay, _ in groups] == [0.1, 0.0]
    assert groups[1][1] > 0
    assert report(root, "fsdp", 2)["decay"] == groups


@pytest.mark.parametrize(("name", "ranks"), [("one-to-two", 2), ("two-to-one", 1), ("fsdp-two-to-four", 4)])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(root: Path, name: str, ranks: int) -> None:
    assert json.loads((root / name / "checkpoint-12" / checkpoints.MARKER).read_text())["world_size"] == ranks
    assert numbers(root, name) == pytest.approx(numbers(root, "run"), abs=1e-5)


def test_a_sharded_checkpoint_is_refused_by_name_without_sharding(root: Path) -> None:
    shutil.copytree(root / "fsdp", root / "unsharded", ignore=shutil.ignore_patterns("summary.json"))
    with pytest.raises(ValueError, match=r"unsharded/checkpoint-12 is sharded, but distributed\.strategy=ddp"):
        run.train(tiny_recipe(root, "unsharded"))
