"""What the momentum rule promises beside its numbers: pairs of states, refused derivatives, gates of other dtypes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from mdn.ops import (
    SequenceBoundaries,
    blockwise_momentum_delta_rule,
    chunk_momentum_delta_rule,
    chunk_vector_momentum_delta_rule,
    fused_recurrent_momentum_delta_rule,
    momentum_delta_step,
    recurrent_momentum_delta_rule,
)


def plain_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 2, 8, generator=generator) for _ in range(3))
    log_alpha, log_mu = (-torch.rand(2, 9, 2, generator=generator) for _ in range(2))
    return {"q": q, "k": k, "v": v, "log_alpha": log_alpha, "log_mu": log_mu}


def test_a_backend_requested_for_blocks_is_torch_or_refused() -> None:
    blockwise_momentum_delta_rule(**plain_inputs(), backend="torch")
    with pytest.raises(ValueError, match="backend='cpu' cannot be used here: blockwise momentum"):
        blockwise_momentum_delta_rule(**plain_inputs(), backend="cpu")


@pytest.mark.parametrize("form", [chunk_momentum_delta_rule, recurrent_momentum_delta_rule])
def test_a_backward_pass_inside_autocast_has_the_gradients_of_one_outside(form) -> None:
    def gradients() -> tuple[torch.Tensor, ...]:
        inputs = {name: x.requires_grad_() for name, x in plain_inputs().items()}
        return torch.autograd.grad(form(**inputs, lookahead=True).o.square().sum(), list(inputs.values()))

    expected = gradients()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_batch_without_rows_is_computed_in_every_form(backend: str) -> None:
    inputs = {name: x[:0] for name, x in plain_inputs().items()}
    chunk = partial(chunk_momentum_delta_rule, backend=backend)
    for form in (chunk, recurrent_momentum_delta_rule, blockwise_momentum_delta_rule):
        o, state = form(**inputs, output_final_state=True)
        assert (o.shape, state.shape) == ((0, 9, 2, 8), (2, 0, 2, 8, 8))
        packed = {name: x[:1, :0] for name, x in plain_inputs().items()}
        nothing = SequenceBoundaries.from_attention_mask(torch.ones(0, 9))
        assert form(**packed, cu_seqlens=nothing).o.shape == (1, 0, 2, 8)
    token = {name: x[:, 0] for name, x in inputs.items()}
    assert momentum_delta_step(**token, state=torch.empty(2, 0, 2, 8, 8), backend=backend).shape == (0, 2, 8)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_the_initial_state_may_be_a_pair(backend: str) -> None:
    state = torch.randn(2, 2, 2, 8, 8, generator=torch.Generator().manual_seed(1))
    expected = chunk_momentum_delta_rule(**plain_inputs(), initial_state=state, backend=backend).o
    for pair in ((state[0], state[1]), (state[0].clone(), state[1].clone())):
        assert torch.equal(chunk_momentum_delta_rule(**plain_inputs(), initial_state=pair, backend=backend).o, expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_two_states_that_lie_in_one_tensor_have_derivatives_and_graphs_of_their_own() -> None:
    states = torch.randn(4, 2, 2, 8, 8, generator=torch.Generator().manual_seed(1))
    (S, M, direction, other), inputs = states, plain_inputs()

    def rule(S: torch.Tensor, M: torch.Tensor) -> torch.Tensor:
        return recurrent_momentum_delta_rule(**inputs, initial_state=(S, M)).o

    expected = rule(S, other)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(rule(S, forward_ad.make_dual(M, direction))).tangent
    torch.testing.assert_close(tangent, rule(S, M + direction) - rule(S, M), rtol=1e-4, atol=1e-5)  # linear in M
    torch.testing.assert_close(make_fx(rule)(S, M)(S, other), expected)
    torch.testing.assert_close(torch.jit.trace(rule, (S, M), check_trace=False)(S.clone(), other), expected)


@pytest.mark.parametrize("rule", [chunk_momentum_delta_rule, fused_recurrent_momentum_delta_rule])
def test_forward_mode_is_refused_by_the_chunk_form_and_works_for_the_recurrence(rule) -> None:
    inputs = plain_inputs()
    v = inputs.pop("v")
    message = r"^chunk_momentum_delta_rule does not support .*; recurrent_momentum_delta_rule does"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(lambda v: rule(**inputs, v=v).o, (v,), (v,))
    o, tangent = torch.func.jvp(lambda v: recurrent_momentum_delta_rule(**inputs, v=v).o, (v,), (v,))
    torch.testing.assert_close(tangent, o)  # linear in v


def test_the_vector_rule_names_its_own_recurrence_where_it_has_no_derivative() -> None:
    inputs = plain_inputs()
    inputs["log_alpha"] = inputs["log_alpha"].unsqueeze(-1).expand(2, 9, 2, 8)
    v = inputs.pop("v")
    message = "chunk_vector_momentum_delta_rule does not support .*; recurrent_vector_momentum_delta_rule does"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(lambda v: chunk_vector_momentum_delta_rule(**inputs, v=v).o, (v,), (v,))


def test_torch_func_grad_is_refused_by_name() -> None:
    inputs = plain_inputs()
    v = inputs.pop("v")
    per_sample = torch.func.vmap(torch.func.grad(lambda v: chunk_momentum_delta_rule(**inputs, v=v).o.sum()))
    with pytest.raises(NotImplementedError, match=r"torch.func derivatives; recurrent_momentum_delta_rule does"):
        per_sample(v.unsqueeze(0))


def test_the_recurrence_can_be_mapped_over_gates_and_a_pair_of_states() -> None:
    inputs, S = plain_inputs(), torch.ones(2, 2, 8, 8)
    scales = torch.tensor([1.0, 0.5])

    def rule(scale: torch.Tensor) -> torch.Tensor:
        scaled = {name: scale * x for name, x in inputs.items()}
        return recurrent_momentum_delta_rule(**scaled, initial_state=(scale * S, S)).o

    torch.testing.assert_close(torch.func.vmap(rule)(scales), torch.stack([rule(scale) for scale in scales]))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_vmap_has_the_gradients_of_a_loop(backend: str) -> None:
    inputs = plain_inputs()
    values = torch.randn(3, *inputs.pop("v").shape, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def rule(v: torch.Tensor) -> torch.Tensor:
        return chunk_momentum_delta_rule(**inputs, v=v, backend=backend).o

    expected = torch.stack([rule(v) for v in values])
    (gradient,) = torch.autograd.grad(expected.square().sum(), values)
    found = torch.func.vmap(rule)(values)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), values)[0], gradient)


def test_gates_and_states_in_float64_beside_float32_inputs_are_cast() -> None:
    inputs = plain_inputs()
    state = torch.zeros(2, 2, 2, 8, 8, dtype=torch.float64, requires_grad=True)
    gates = {name: inputs[name].double() for name in ("log_alpha", "log_mu")}
    o = chunk_momentum_delta_rule(**inputs | gates, initial_state=state).o
    torch.testing.assert_close(o, chunk_momentum_delta_rule(**inputs).o)
    o.sum().backward()
    assert state.grad.dtype == torch.float64
