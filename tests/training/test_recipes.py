"""Recipes: what is accepted, how errors read, and that every packaged recipe says what the paper says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mdn.cli import main
from mdn.training.build import model_config
from mdn.training.recipe import field_table, find_recipe, load_recipe, packaged_recipes, to_yaml, validate
from mdn.training.run_plan import plan_batch

MODELS = ("mdn", "gdn", "comba", "kda", "mamba2", "transformer")
ABLATIONS: dict[str, tuple[str, object]] = {
    "without_output_correction": ("use_output_correction", False),
    "without_momentum": ("use_momentum", False),
    "without_clamp": ("min_log_mu", None),
    "without_alpha_max": ("bound_alpha", False),
    "without_beta_max": ("bound_beta", False),
    "eta_sigmoid": ("eta_activation", "sigmoid"),
    "min_log_mu_-2": ("min_log_mu", -2.0),
    "min_log_mu_-1.5": ("min_log_mu", -1.5),
    "min_log_mu_-1.357": ("min_log_mu", -1.357),
    "min_log_mu_-1": ("min_log_mu", -1.0),
}
# Recipes of the 400M model that differ from it in more than one field, or in one that the paper does not have.
OTHERS = {
    "paper/ablations/gdn_with_bounds": {"use_momentum": False, "eta_activation": "one"},
    "momentum/quasi_hyperbolic": {"momentum": "quasi_hyperbolic"},
    "momentum/nesterov": {"momentum": "nesterov"},
    "momentum/fast_mu": {"mu_init": 10},
    "momentum/wide_mu": {"mu_init": [0.001, 1.5]},
    "momentum/quasi_hyperbolic_fast_mu": {"momentum": "quasi_hyperbolic", "mu_init": 10},
    "momentum/log_factor": {"log_factor_init": [0.04, 4]},
}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainig.steps=3", r"unknown key 'trainig' \(did you mean training\?\)"),
        ("training.learning_rat=1", r"unknown key 'training.learning_rat' \(did you mean training.learning_rate\?\)"),
        ("training.steps=many", r"training.steps: input should be a valid integer.* got 'many'"),
        ("training.steps=0", r"training.steps: input should be greater than 0, got 0"),
        ("training.steps", r"'training.steps' is not of the form key=value"),
        ("training.steps.more=1", r"training.steps is a value, not a block"),
        ("training.sequence_length=100", r"batch_tokens must be a multiple of training.sequence_length"),
        ("training={steps: 3, tokens: 9}", r"give training.steps or training.tokens, not both"),
        ("training.tokens=1", r"training.tokens must be at least training.batch_tokens"),
        ("data.source=hub", r"data.dataset is missing, but data.source is hub"),
        ("data.source=flies", r"data.source must be one of stdlib, files, hub .* got 'flies'"),
        ("tokenizer.kind=pretrained", r"tokenizer.path is needed when tokenizer.kind is pretrained"),
        ("distributed.strategy=hsdp", r"distributed.shard_size is needed when distributed.strategy is hsdp"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("demo", [override])


def test_an_unknown_model_field_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'model.hiden_size' \(did you mean hidden_size\?\)"):
        model_config(load_recipe("demo", ["model.hiden_size=64"]), 257, 256)


def test_an_unknown_recipe_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no recipe 'paper/mdn_40M'.*did you mean paper/mdn_400M\?"):
        load_recipe("paper/mdn_40M")


def test_the_command_answers_bad_input_with_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo", "training.stepz=3"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "unknown key 'training.stepz'" in error


def test_broken_yaml_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("name: [unclosed")
    with pytest.raises(ValueError, match=r"broken\.yaml is not valid YAML"):
        load_recipe(path)


def test_a_recipe_that_extends_itself_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ValueError, match="extends itself"):
        load_recipe(tmp_path / "a.yaml")


def test_recipes_are_found_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # away from the repository, where recipes/ is a folder
    assert find_recipe("demo") == find_recipe("recipes/demo.yaml") == find_recipe("demo.yaml")
    (tmp_path / "demo.yaml").write_text("name: mine")
    assert find_recipe("demo.yaml") == Path("demo.yaml")


def test_the_resolved_recipe_reads_back_as_itself() -> None:
    for name in packaged_recipes():
        recipe = load_recipe(name)
        assert validate(yaml.safe_load(to_yaml(recipe)), name) == recipe


def test_numbers_in_scientific_notation_are_numbers() -> None:
    assert load_recipe("demo", ["training.learning_rate=2e-4"]).training.learning_rate == 2e-4


def test_a_run_with_another_mixer_gets_its_own_directory() -> None:
    assert load_recipe("demo").output_dir == Path("runs/demo")
    assert load_recipe("demo", ["model.mixer=gated_deltanet"]).output_dir == Path("runs/demo-mixer=gated_deltanet")
    assert load_recipe("demo", ["logging.log_every=1"]).output_dir == Path("runs/demo")


def test_a_folder_named_like_a_packaged_recipe_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert load_recipe("demo").output_dir == Path("runs/demo")
    (tmp_path / "demo" / "recipe.yaml").write_text(to_yaml(load_recipe("demo")))
    assert load_recipe("demo").output_dir == Path("demo")  # now it is a run folder


def test_an_override_of_the_length_replaces_the_other_way_to_say_it() -> None:
    tokens = load_recipe("demo", ["training.tokens=1048576"]).training
    assert tokens.steps is None
    assert tokens.total_steps == 1048576 // tokens.batch_tokens
    assert load_recipe("demo", ["training.tokens=null"]).training.steps is not None
    with pytest.raises(ValueError, match=r"give training.steps or training.tokens, not both; got steps=3, tokens=9000"):
        load_recipe("demo", ["training.steps=3", "training.tokens=9000"])


def test_an_override_of_a_block_that_undoes_an_earlier_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    block = "training={tokens: 9000}"
    assert main(["train", "demo", "training.steps=3", block, "--dry-run"]) == 2
    expected = f"override '{block}' replaces the whole block and with it 'training.steps=3': give the block first"
    assert capsys.readouterr().err == f"mdn: error: {expected}\n"
    assert load_recipe("demo", ["training={tokens: 9000}", "training.steps=3"]).training.steps == 3


def test_the_packaged_recipes_are_those_of_the_paper() -> None:
    expected = {"demo", *(f"paper/{model}_{size}" for model in MODELS for size in ("400M", "1.3B"))}
    expected |= {f"paper/{model}_h_400M" for model in ("gdn", "comba", "kda", "mamba2")}
    expected |= {"paper/mdn_h_3to1_400M", "paper/mdn_h_7to1_400M"}
    expected |= {f"paper/ablations/{name}" for name in ABLATIONS}
    assert expected <= set(packaged_recipes())


@pytest.mark.parametrize(("size", "batch", "steps"), [("400M", 2**19, 30720), ("1.3B", 2**20, 102400)])
def test_paper_recipes_have_the_papers_optimiser_schedule_and_batch(size: str, batch: int, steps: int) -> None:
    for model in MODELS:
        recipe = load_recipe(f"paper/{model}_{size}")
        training = recipe.training
        assert (training.batch_tokens, training.sequence_length, training.total_steps) == (batch, 4096, steps)
        assert (training.learning_rate, training.warmup_steps, training.min_learning_rate_ratio) == (3e-4, 1024, 0.1)
        assert (training.betas, training.epsilon, training.weight_decay) == ((0.9, 0.95), 1e-15, 0.1)
        assert (training.schedule, training.clip_norm, recipe.seed) == ("cosine", 1.0, 42)
        assert (recipe.tokenizer.kind, recipe.data.dataset) == ("gpt2", "cerebras/SlimPajama-627B")


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_differs_from_the_full_model_in_its_one_field(name: str) -> None:
    field, value = ABLATIONS[name]
    full = model_config(load_recipe("paper/mdn_400M"), 50257, 50256).to_dict()
    ablated = model_config(load_recipe(f"paper/ablations/{name}"), 50257, 50256).to_dict()
    assert ablated[field] == value
    assert {key for key in full if full[key] != ablated[key]} <= {field}


@pytest.mark.parametrize("name", OTHERS)
def test_recipes_of_other_rules_differ_from_the_full_model_in_their_fields(name: str) -> None:
    full, other = (model_config(load_recipe(x), 50257, 50256).to_dict() for x in ("paper/mdn_400M", name))
    assert {key: other[key] for key in full if full[key] != other[key]} == OTHERS[name]


@pytest.mark.parametrize(
    ("ranks", "micro", "accumulation"), [(1, 4, 32), (2, 4, 16), (32, 4, 1), (64, 2, 1), (128, 1, 1)]
)
def test_accumulation_follows_from_the_batch_in_tokens_and_the_number_of_ranks(
    ranks: int, micro: int, accumulation: int
) -> None:
    plan = plan_batch(load_recipe("paper/mdn_400M").training, ranks)
    assert (plan.micro, plan.accumulation) == (micro, accumulation)
    assert plan.micro * plan.accumulation * plan.ranks * 4096 == 524288


def test_ranks_that_cannot_share_the_batch_are_an_error() -> None:
    with pytest.raises(ValueError, match="128 sequences of 4096 tokens, which 3 ranks cannot share evenly"):
        plan_batch(load_recipe("paper/mdn_400M").training, 3)


def test_a_dry_run_prints_the_recipe_its_sizes_and_the_launch_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    arguments = ["--dry-run", "--nodes", "4", "--devices", "8", "--json", str(file)]
    assert main(["train", "paper/mdn_400M", *arguments]) == 0
    output = capsys.readouterr().out
    assert "learning_rate: 0.0003" in output
    assert "torchrun --nnodes 4 --nproc_per_node 8" in output
    plan = json.loads(file.read_text())
    assert 390e6 < plan["parameters"] < 440e6
    assert plan["tokens"] == 30720 * 524288
    assert plan["state_bytes"] == 16 * plan["parameters"]
    assert plan["activation_bytes"] > 1e9


def test_the_table_of_keys_in_the_docs_is_complete_and_true() -> None:
    assert "| `logging.log_every` | `10` | steps between the points of TensorBoard's training curves |" in field_table()
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    assert field_table() in page  # `mdn train --fields` prints it
