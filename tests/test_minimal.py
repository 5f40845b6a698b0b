"""The single readable file: runs alone, stays short, and computes the definition."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from definition import Tensors, make_inputs, momentum_delta_rule, relative_error, unit
from mdn import minimal

SOURCE = Path(minimal.__file__)


def minimal_inputs(inputs: Tensors) -> tuple[minimal.Inputs, torch.Tensor, torch.Tensor]:
    """The file takes unit queries and keys, and S and M apart."""
    vectors = inputs | {name: unit(inputs[name]) for name in ("q", "k")}
    return minimal.Inputs(**{name: vectors[name] for name in minimal.Inputs._fields}), *inputs["initial_state"]


def test_it_has_at_most_120_lines_and_imports_only_torch() -> None:
    text = SOURCE.read_text()
    assert len(text.splitlines()) <= 120
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imported if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in imported if isinstance(node, ast.ImportFrom)}
    assert names == {"torch", "torch.nn.functional", "typing"}


def test_it_runs_alone_and_prints_that_both_forms_agree(tmp_path: Path) -> None:
    copy = shutil.copy(SOURCE, tmp_path / "alone.py")
    done = subprocess.run([sys.executable, str(copy)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        *_, result, _gradients, _by, gradient = line.replace(",", "").split()
        assert float(result) < 1e-12, line
        assert float(gradient) < 1e-11, line


@pytest.mark.parametrize("form", [minimal.recurrence, minimal.chunkwise], ids=["recurrence", "chunkwise"])
def test_both_forms_compute_the_definition(form) -> None:
    inputs = make_inputs(T=70, dtype=torch.float64)
    expected_o, expected_state = momentum_delta_rule(**inputs)
    o, S, M = form(*minimal_inputs(inputs))
    assert relative_error(o, expected_o) < 1e-12
    assert relative_error(torch.stack([S, M]), expected_state) < 1e-12


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 256])
def test_gradients_agree_for_every_chunk_size_with_hard_zeros_among_the_gates(chunk_size: int) -> None:
    torch.manual_seed(1)
    inputs, S, M = minimal.random_inputs(B=1, T=65, H=2, K=8, V=6)
    assert inputs.log_mu.isinf().any()
    leaves = [x.requires_grad_() for x in (*inputs, S, M)]
    forms = minimal.recurrence(inputs, S, M), minimal.chunkwise(inputs, S, M, chunk_size)
    gradients = [torch.autograd.grad([x.square().sum() for x in form], leaves) for form in forms]
    for first, second in (*zip(*forms), *zip(*gradients)):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-11)
