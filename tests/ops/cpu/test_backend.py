"""``backend="cpu"`` through the public functions of ``mdn.ops``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mdn.ops
from cpu_cases import GRADIENT_ERROR, OUTPUT_ERROR, Inputs, definition, error, make_inputs, options_for
from mdn.ops import cpu
from mdn.ops.cpu import bindings


def chunked(inputs: Inputs, backend: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, p, log_alpha, log_mu, beta, eta, initial_state = inputs.as_tuple()
    return mdn.ops.chunk_momentum_delta_rule(
        q, k, v, log_alpha, log_mu, p, beta, eta, initial_state=initial_state, output_final_state=True, backend=backend
    )


def test_the_public_function_and_its_gradients_match_the_definition() -> None:
    inputs = make_inputs(batch=2, time=70, heads=2, value_heads=4, with_p=True)
    leaves = Inputs(*(x.clone().requires_grad_() for x in inputs.as_tuple()))
    exact = inputs.leaves()
    o, state = chunked(leaves)
    wanted = definition(exact, options_for(inputs))
    assert error(o.detach(), wanted[0]) <= OUTPUT_ERROR
    assert error(state.detach(), wanted[1]) <= OUTPUT_ERROR
    found = torch.autograd.grad(o.square().sum() + state.square().sum(), leaves.as_tuple())
    expected = torch.autograd.grad(wanted[0].square().sum() + wanted[1].square().sum(), exact.as_tuple())
    for gradient, want in zip(found, expected, strict=True):
        assert error(gradient, want) <= GRADIENT_ERROR


def test_the_public_step_uses_the_kernel_in_place() -> None:
    inputs = make_inputs(batch=2, time=9)
    state = inputs.initial_state.clone()
    for t in range(9):
        q, k, v, log_alpha, log_mu, beta, eta = (
            x[:, t] for x in (inputs.q, inputs.k, inputs.v, inputs.log_alpha, inputs.log_mu, inputs.beta, inputs.eta)
        )
        o = mdn.ops.momentum_delta_step(q, k, v, log_alpha, log_mu, None, beta, eta, state, backend="cpu")
    wanted, states = definition(inputs.converted(torch.float64), options_for(inputs))
    assert error(o, wanted[:, -1]) <= OUTPUT_ERROR
    assert error(state, states) <= OUTPUT_ERROR


def test_it_can_be_compiled_without_a_graph_break() -> None:
    inputs = make_inputs(time=40)
    wanted = chunked(inputs)[0]
    compiled = torch.compile(lambda *x: chunked(Inputs(*x))[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs.as_tuple()), wanted)


def test_it_runs_in_inference_mode() -> None:
    inputs = make_inputs(time=40)
    wanted = chunked(inputs)[0]
    with torch.inference_mode():
        assert torch.equal(chunked(inputs)[0], wanted)


def test_auto_takes_it_and_says_so() -> None:
    assert mdn.ops.explain_backend(torch.zeros(1)).startswith("auto -> cpu")


def test_asked_for_by_name_where_it_was_not_built_it_raises_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MDN_CPU_LIBRARY_DIR", str(tmp_path))
    bindings._find.cache_clear()
    try:
        assert cpu.why_unavailable() is not None
        with pytest.raises(ValueError, match="compiler"):
            chunked(make_inputs(time=4))
        assert "compiler" in mdn.ops.explain_backend(torch.zeros(1))
        assert mdn.ops.explain_backend(torch.zeros(1)).startswith("auto -> torch")
    finally:
        bindings._find.cache_clear()
