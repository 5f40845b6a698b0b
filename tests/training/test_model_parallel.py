"""Ranks that share tokens or heads: 20 steps equal those of one process, also after a kill or a change of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate import ParallelismConfig
from safetensors.torch import load_file

from mdn.cli import main
from mdn.training import run
from mdn.training.dataset import PackCollator, PackedSequences, prepare_data
from mdn.training.recipe import load_recipe, validate
from mdn.training.trainer import RecipeTrainer, StopSignal, training_arguments
from ranks_support import numbers, report, run_jobs
from small_models import small_model
from training_support import tiny_recipe

JOBS = ("context:context:2", "zigzag:zigzag:4", "tensor:tensor:2", "both:context-tensor:4")
INTERRUPTED = ("killed:context:2:killed", "killed:context:2")
MOVED = ("one-to-both:copy:run", "one-to-both:context-tensor:4", "both-to-one:copy:both", "context-to-one:copy:context")
SHARDED = ("context-fsdp:context-fsdp:2", "context-hsdp:context-hsdp:4")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model_parallel")
    steps = {"steps": 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "plot_loss", lambda *_: None)
        patch.setattr(run, "plot_gates", lambda *_: None)
        run.train(tiny_recipe(place, training=steps))
        run_jobs(place, *JOBS, *INTERRUPTED, *MOVED)
        for name in ("context-to-one", "both-to-one"):
            run.train(tiny_recipe(place, name, training=steps))
    return place


@pytest.mark.parametrize("name", ["context", "zigzag", "tensor", "both"])
def test_training_with_shared_tokens_or_heads_equals_one_process(root: Path, name: str) -> None:
    assert numbers(root, name) == pytest.approx(numbers(root, "run"), abs=1e-5)
    assert len(numbers(root, name)) == 20


@pytest.mark.parametrize("name", ["context", "zigzag", "tensor", "both"])
def test_held_out_text_is_measured_together(root: Path, name: str) -> None:
    losses = [json.loads((root / run / "summary.json").read_text())["held_out"]["loss"] for run in (name, "run")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_killed_rank_costs_only_the_steps_since_the_last_checkpoint(root: Path) -> None:
    assert report(root, "killed", 2)["step"] == 20
    assert numbers(root, "killed") == pytest.approx(numbers(root, "run"), abs=1e-5)


@pytest.mark.parametrize("name", ["one-to-both", "both-to-one", "context-to-one"])
def test_a_checkpoint_moves_between_one_process_and_shared_tokens_and_heads(root: Path, name: str) -> None:
    assert numbers(root, name) == pytest.approx(numbers(root, "run"), abs=1e-5)


def test_checkpoints_are_the_same_files_for_every_arrangement(root: Path) -> None:
    def files(name: str) -> dict[str, list[int]]:
        weights = load_file(root / name / "checkpoint-20" / "model.safetensors")
        state = torch.load(root / name / "checkpoint-20" / "optimizer.pt")
        moments = {f"moment {i}": list(entry["exp_avg"].shape) for i, entry in state["state"].items()}
        return {key: list(x.shape) for key, x in weights.items()} | moments

    assert files("both") == files("run")
    configs = [(root / name / "checkpoint-20" / "config.json").read_text() for name in ("both", "run")]
    assert configs[0] == configs[1]


@pytest.mark.slow
@pytest.mark.parametrize("job", SHARDED)
def test_parameters_are_sharded_over_ranks_that_share_tokens(root: Path, job: str) -> None:
    run_jobs(root, job)
    name, _, ranks = job.split(":")
    assert report(root, name, int(ranks))["kinds"] == ["DTensor"]
    assert numbers(root, name) == pytest.approx(numbers(root, "run"), abs=1e-5)


# ----------------------------------------------------------------------------------------------------- without training


@pytest.mark.parametrize("field", ["sp_size", "cp_size"])
def test_the_trainer_refuses_accelerates_own_sequence_parallelism(field: str, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    arguments = training_arguments(recipe, tmp_path / "run", 1)
    arguments.parallelism_config = ParallelismConfig(**{field: 2})
    data = prepare_data(recipe)
    rows = PackedSequences(data.training, 32, 4, 0)
    with pytest.raises(ValueError, match=rf"ParallelismConfig\({field}=2\) is not supported.*context_parallel"):
        RecipeTrainer(recipe, small_model(), rows, PackCollator(True), arguments, {}, StopSignal())


def test_the_plan_of_a_run_shows_mesh_and_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"sequence_length": 2**17, "batch_tokens": 2**20, "micro_batch_tokens": 2**17}
    long = [*(f"training.{name}={size}" for name, size in sizes.items()), "distributed.context_parallel=8"]
    assert main(["train", "paper/mdn_400M", *long, "--dry-run", "--devices", "16"]) == 0
    printed = capsys.readouterr().out
    assert "data 2 x context 8 x tensor 1; 16,384 tokens of a pass on each rank" in printed
    assert "up to 31.75 MiB per layer and pass" in printed
    assert "warning" not in printed


def test_the_plan_of_a_run_warns_of_too_few_tokens_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "paper/mdn_400M", "distributed.context_parallel=8", "--dry-run", "--devices", "8"]) == 0
    assert "2,048 tokens on a rank are too few for context parallelism to pay" in capsys.readouterr().out


def test_heads_that_cannot_be_shared_are_refused_with_the_sizes_that_can(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "paper/mdn_400M", "distributed.tensor_parallel=4", "--dry-run", "--devices", "4"]) == 2
    message = "num_heads=6 cannot be shared by 4 ranks of tensor parallelism: it allows 1, 2, 3, 6"
    assert message in capsys.readouterr().err
    assert main(["train", "paper/mamba2_400M", "distributed.tensor_parallel=2", "--dry-run", "--devices", "2"]) == 2
    assert "tensor parallelism cannot split mixer='mamba2'" in capsys.readouterr().err


def test_arrangements_that_cannot_work_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="must divide the number of ranks, got 4"):
        training_arguments(load_recipe("demo", ["distributed.context_parallel=3"]), Path("unused"), 4)
    content = load_recipe("demo").model_dump(mode="json")
    content["distributed"]["context_parallel"] = 2
    content["training"]["compile"] = True
    with pytest.raises(ValueError, match=r"training.compile cannot be combined with distributed.context_parallel=2"):
        validate(content, "demo")
