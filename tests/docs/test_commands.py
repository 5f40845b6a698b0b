"""Every command in README and docs runs, in a short form, in a folder with a tiny trained run at runs/demo.

A new command in the documentation needs a line in SHORT (what makes it quick) or in NOT_RUN (why it cannot run here).
Commands run in the order of SHORT: one may use what an earlier one left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from eval_support import write_data
from mdn.cli import COMMANDS, build_parser, main
from pages import ROOT, Command, commands
from training_support import write_corpus

pytestmark = pytest.mark.first

ALL = commands()

TINY = (
    "data.source=files data.paths=[corpus] data.cache_dir=cache data.held_out=0.2 data.held_out_bytes=2000 "
    "tokenizer.vocab_size=300 model.hidden_size=32 model.num_heads=2 model.head_dim=8 model.num_hidden_layers=1 "
    "training.batch_tokens=128 training.micro_batch_tokens=64 training.sequence_length=32 training.steps=2 "
    "training.warmup_steps=1 sample.max_new_tokens=3"
)
ONE_CELL = (
    "seeds=[0] learning_rates=[1e-3] mixers=[linear_attention] training.steps=1 training.batch_tokens=64 "
    "'test=[{length: 64, pairs: 8, examples: 2}]' --processes 1"
)
ONE_MODEL = "--rows full --seeds 1 --paper-seeds 0 --steps 2 --batch-tokens 256 --text corpus --processes 1"
ONE_TASK = "--tasks rewriting --blocks 16 --seeds 1 --steps 1 --processes 1"
SMALL_MODELS = "--mixers momentum_deltanet attention --hidden-size 64 --layers 1 --repeats 1"

SHORT = {
    "mdn info mdn_400M": "",
    "mdn info --all": "",
    "mdn train recipes/demo.yaml model.mixer=gated_deltanet": f"{TINY} output=runs/gated",
    "mdn train recipes/demo.yaml": f"{TINY} output=runs/plain",
    "mdn train runs/demo": "",  # finished: shown again
    "mdn train runs/demo training.steps=1400": "training.steps=3",
    "mdn train --fields": "",
    "mdn train paper/mdn_400M --dry-run --nodes 4": "",
    "mdn train paper/mdn_400M training.sequence_length=131072 training.micro_batch_tokens=131072 "
    "distributed.context_parallel=8 --dry-run --devices 8": "",
    "mdn train demo training.steps=1000 model.mixer=gated_deltanet": f"{TINY} output=runs/again",
    "mdn demo": f"{TINY} output=runs/shown",
    'mdn generate runs/demo --prompt "def "': "--max-new-tokens 3",
    'mdn generate runs/demo --prompt "def " --weights int8': "--max-new-tokens 3",
    "mdn quantize runs/demo models/demo-int8 --weights int8": "",
    "mdn convert downloads/gdn models/gdn": "",
    "mdn convert downloads/gated-deltanet models/gdn": "",
    "mdn eval runs/demo --suite perplexity": "--data my_files --limit 1 --max-length 64",
    "mdn eval runs/mdn runs/gdn --suite perplexity,commonsense": (
        "--data my_files --skip-missing --limit 1 --max-length 64"
    ),
    "mdn eval runs/demo --suite retrieval --data my_files --skip-missing": "--limit 1 --max-length 64",
    "mdn mqar recipes/mqar/quick.yaml": f"{ONE_CELL} --out runs/mqar",
    "mdn mqar quick seeds=[0,1,2,3,4] training.steps=1200 --out runs/longer": "--list",
    "mdn mqar quick mixers=[momentum_deltanet,kda] seeds=[0]": "--list",
    "mdn mqar quick --list": "",
    "mdn mqar quick --save-models": f"{ONE_CELL} --out runs/saved",
    "mdn mqar quick --out runs/mqar-quick --processes 2": "--list",
    "mdn mqar rewrite --out runs/mqar-rewrite --processes 2": "--list",
    "mdn needle --mixers momentum_deltanet,gated_deltanet,attention": (
        "--mixers linear_attention --lengths 80 --depths 2 --examples 1 --steps 1"
    ),
    "mdn needle --model runs/demo --lengths 512,1024 --examples 5 --haystack documentation --keys 1": (
        "--lengths 256 --depths 1 --examples 1"
    ),
    "mdn ablate": ONE_MODEL,
    "mdn ablate --only-read": ONE_MODEL,
    "mdn ablate --rows full --seeds 1": ONE_MODEL,
    "mdn train runs/ablate/full-exact-seed0/recipe.yaml model.mixer=gated_deltanet "
    "output=runs/dynamics/gated_deltanet": "training.steps=2",
    "mdn study --list": "",
    "mdn study oscillation --limit-minutes 20": "--quick --limit-minutes 0",
    "mdn study all": "--list",
    "mdn study oscillation": "--list",
    "mdn study forecasting": "--list",
    "mdn study retrieval": "--list",
    "mdn study retrieval --tasks rewriting --models mdn --rate 0.003": "--list",
    "mdn study state-tracking": "--list",
    "mdn study language": "--list",
    "mdn study ablation": "--list",
    "mdn analyze spectra": "--points 50",
    "mdn analyze spectra --model runs/ablate/full-exact-seed0/model --text argparse.py": "--points 50",
    "mdn analyze stability": "--heads 2 --steps 64 --windows 32",
    "mdn analyze stability --heads 64 --steps 2048": "--heads 2 --steps 64 --windows 32",
    "mdn analyze state-norm mdn=runs/ablate/full-exact-seed0/model gdn=runs/dynamics/gated_deltanet/model "
    "comba=runs/dynamics/comba/model --text argparse.py --tokens 256": "--tokens 32 --sequences 1",
    "mdn analyze causality": ONE_TASK,
    "mdn analyze causality --seeds 2": ONE_TASK,  # finished: read again
    "mdn analyze causality --seeds 2 --only-read": ONE_TASK,
    "mdn report runs/demo --out page.html": "",
    "mdn report runs/demo runs/ablate --out page.html": "",
    "mdn bench op": "--quick",
    "mdn bench op --accuracy": "--quick",
    "mdn bench op --general": "--quick",
    "mdn bench decode": (
        "--mixers momentum_deltanet,attention --hidden-size 64 --layers 1 --heads 2 --contexts 16 --batches 1 "
        "--repeats 1 --seconds 0.01"
    ),
    "mdn bench decode --weights": "--model mdn_tiny --batches 1,2 --repeats 1 --seconds 0.01 --no-llama",
    "mdn train 20M": f"{TINY} output=runs/20M",
    "mdn bench quality runs/demo runs/20M": "",
    "mdn bench train": f"{SMALL_MODELS} --lengths 32 --tokens 32",
    "mdn bench train --lengths 512 2048 8192": f"{SMALL_MODELS} --lengths 32 --tokens 32",
    "mdn bench train --json train.json --plot train.png": f"{SMALL_MODELS} --lengths 32 --tokens 32",
    "mdn bench context-parallel": (
        "--tokens 16 --hidden-size 32 --heads 2 --head-dim 16 --repeats 1 --json cp.json --plot cp.png"
    ),
}
AS_PRINTED = (
    "torchrun --nproc_per_node 2 --standalone --no-python mdn train demo training.steps=20 "
    "distributed.context_parallel=2",
    "torchrun --nproc_per_node 2 --standalone --no-python mdn train demo training.steps=20 "
    "distributed.tensor_parallel=2",
    "torchrun --nproc_per_node 4 --standalone --no-python mdn train demo training.steps=20 "
    "distributed.context_parallel=2 distributed.tensor_parallel=2",
)
NOT_RUN = {
    "mdn eval runs/demo --tasks boolq,nq_open --limit 100": "downloads the tasks' data",
    "mdn bench op --device cuda": "needs a GPU; tests/bench/test_op.py has what can be tested without one",
    "mdn bench kernels --quick --targets sm_90 --key-dims 128": "compiles for minutes; see tests/ops/triton",
    "mdn bench kernels --variants sm_80 sm_90 --json benchmarks/results/kernels.json": "compiles for half an hour",
    "torchrun --nnodes 1 --nproc_per_node 8 --standalone --no-python mdn train paper/mdn_400M": "needs eight GPUs",
    "torchrun --nnodes 1 --nproc_per_node 8 --standalone --no-python mdn train paper/mdn_1.3B "
    "distributed.strategy=fsdp": "needs eight GPUs",
    "python -m mdn.ops.triton.selftest": "needs a GPU; without one, tests/ops/triton/test_availability.py",
    "python -m mdn.bench.kernel_tables benchmarks/results/kernels.json docs/kernels.md docs/kernel-tables.md": (
        "writes the pages; tests/bench/test_kernel_report.py compares their tables with the report"
    ),
    "python -m mdn.bench.context_parallel_results docs/experiments/data/context_parallel.json docs/distributed.md": (
        "writes the page; tests/bench compares its tables with the results"
    ),
    "mdn bench train --lengths 512 --profile demo paper/mdn_400M": "needs 8 GB of memory",
    "python -m mdn.analysis.figures": "writes docs/figures; compared in tests/analysis",
    "python -m mdn.experiments.studies.pages": "writes docs/experiments; compared in tests/experiments",
    "pytest tests/ops/triton": "part of this suite",
    "python setup.py build_ext --inplace": "part of the installation",
    "mdn serve runs/demo --port 8000": "needs vLLM: tests/serving runs it",
    "mdn serve runs/demo --vllm='--max-num-seqs 64'": "needs vLLM: tests/serving/test_http.py starts one like it",
    "mdn bench serve --batches 1,2,4,8,16,32 --contexts 128,512,2048,8192 --rounds 9 "
    "--json benchmarks/results/serve.json": "needs vLLM: tests/serving/test_bench.py runs a short form",
    "python -m mdn.bench.serving_page benchmarks/results/serve.json docs/serving.md": (
        "writes the page; tests/bench/test_serving_page.py compares its tables with the record"
    ),
    "tests/sanitizers/run": "minutes of compilation: `make sanitize`",
}


def in_short(line: str) -> list[str]:
    """The arguments of `mdn`, followed by what SHORT adds."""
    return shlex.split(line)[1:] + shlex.split(SHORT[line])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a reader: recipes, texts, a foreign checkpoint, and a small model at runs/demo."""
    place = tmp_path_factory.mktemp("reader")
    for name in ("recipes", "configs"):
        (place / name).symlink_to(ROOT / name)
    write_corpus(place / "corpus")
    write_data(place / "my_files")
    (place / "argparse.py").write_text(Path(argparse.__file__).read_text())
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    foreign = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    for name in ("gdn", "gated-deltanet"):
        foreign.save_pretrained(place / "downloads" / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["train", "demo", *shlex.split(TINY), "output=runs/demo"]) == 0
    for name in ("mdn", "gdn", "dynamics/comba"):
        (place / "runs" / name).parent.mkdir(exist_ok=True)
        (place / "runs" / name).symlink_to(place / "runs" / "demo")
    return place


@pytest.mark.parametrize("line", SHORT)
def test_a_documented_command_runs_in_its_short_form(line, place, monkeypatch, capsys) -> None:
    monkeypatch.chdir(place)
    shutil.rmtree(place / "models", ignore_errors=True)  # `mdn convert` does not write where something is
    assert main(in_short(line)) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("line", AS_PRINTED)
def test_a_documented_line_of_torchrun_runs_as_printed(line: str, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        shlex.split(line), cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (summary,) = tmp_path.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["steps"] == 20


def shown(commands: list[Command]) -> str:
    return "\n" + "\n".join(f"{command.page}: {command.line}" for command in commands)


def test_every_documented_command_is_run_or_has_a_reason_not_to() -> None:
    exempt = [c for c in ALL if c.is_a_name or c.is_a_pattern or c.words[0] == "make"]
    unknown = [c for c in ALL if c not in exempt and c.line not in (*SHORT, *AS_PRINTED, *NOT_RUN)]
    assert not unknown, shown(unknown)


def test_every_command_of_the_table_is_documented() -> None:
    documented = {command.line for command in ALL}
    assert [line for line in (*SHORT, *AS_PRINTED, *NOT_RUN) if line not in documented] == []


@pytest.mark.parametrize("line", [line for line in NOT_RUN if line.startswith("mdn ")])
def test_a_command_that_is_not_run_is_at_least_parsed(line: str) -> None:
    assert build_parser(shlex.split(line)[1:]).parse_args(shlex.split(line)[1:]).run is not None


@pytest.mark.parametrize(
    "command", [c for c in ALL if c.words[0] == "mdn" and (c.is_a_name or c.is_a_pattern)], ids=lambda c: c.line
)
def test_names_and_patterns_use_commands_and_options_that_exist(command: Command) -> None:
    words = [word for word in command.words[1:] if re.fullmatch("[a-z-]+", word)]
    target = COMMANDS[words[0]]
    if isinstance(target, dict) and len(words) > 1:
        assert words[1] in target
    with pytest.raises(SystemExit) as stopped:
        main([*words[: 2 if isinstance(target, dict) and len(words) > 1 else 1], "--help"])
    assert stopped.value.code == 0


def test_every_target_of_make_exists() -> None:
    targets = {command.words[1] for command in ALL if command.words[0] == "make"}
    assert {"demo", "test"} <= targets
    done = subprocess.run(["make", "-n", *sorted(targets)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
