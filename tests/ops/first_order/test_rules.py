"""The first-order rules: finite differences, and what torch's modes may not change. Results: test_conformance.py."""

from functools import partial

import pytest
import torch
from torch import Tensor

from first_order_cases import RULES, arguments, chunk, flat, random_state, recurrent
from mdn.ops import SequenceBoundaries
from mdn.ops.first_order.chunk_vector import decayed_products


@pytest.mark.parametrize("rule", RULES)
def test_gradients_equal_finite_differences(rule):
    tensors, state = arguments(rule, B=1, T=5, H=1, HV=2, K=3, V=2, gates="mild"), random_state(rule, 1, 2, 3, 2)
    names = list(tensors)
    parts = state if isinstance(state, tuple) else (state,)

    def compute(*leaves: Tensor):
        initial = leaves[len(names) :]
        named = dict(zip(names, leaves))
        output, final = chunk(rule)(
            **named, initial_state=initial if len(initial) > 1 else initial[0], output_final_state=True, chunk_size=4
        )
        return output, flat(final)

    leaves = [x.clone().requires_grad_() for x in (*tensors.values(), *parts)]
    assert torch.autograd.gradcheck(compute, leaves, eps=1e-6, atol=1e-7)


def test_a_pack_seen_in_inference_mode_can_be_trained_on_afterwards():
    tensors = arguments("kda", B=1, T=23)
    boundaries = SequenceBoundaries.from_lengths([20, 3])
    with torch.inference_mode():
        expected, _ = chunk("kda")(**tensors, cu_seqlens=boundaries)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    output, _ = chunk("kda")(**leaves, cu_seqlens=boundaries)
    output.sum().backward()
    assert torch.equal(output, expected)
    assert all(torch.isfinite(x.grad).all() for x in leaves.values())


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_a_pack_that_was_never_used_compiles_into_one_graph(rule: str):
    tensors = arguments(rule, B=1, T=23, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(chunk(rule), fullgraph=True, backend="aot_eager")
    found = compiled(**tensors, cu_seqlens=SequenceBoundaries.from_lengths([20, 0, 3]))
    expected = chunk(rule)(**tensors, cu_seqlens=SequenceBoundaries.from_lengths([20, 0, 3]), backend="torch")
    torch.testing.assert_close(found.o, expected.o)


def test_autocast_does_not_lower_the_precision_of_the_state():
    tensors = arguments("gated_delta_rule", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = chunk("gated_delta_rule")(**tensors, output_final_state=True)
    outside = chunk("gated_delta_rule")(**tensors, output_final_state=True)
    for x, y in zip(inside, outside):
        assert torch.equal(x, y)


@pytest.mark.parametrize("form", ["torch", "cpu", "recurrent"])
@pytest.mark.parametrize("rule", RULES)
def test_a_backward_pass_inside_autocast_has_the_gradients_of_one_outside(rule: str, form: str):
    compute = recurrent(rule) if form == "recurrent" else partial(chunk(rule), backend=form)

    def gradients() -> tuple[Tensor, ...]:
        leaves = {name: x.requires_grad_() for name, x in arguments(rule, T=20, dtype=torch.float32).items()}
        return torch.autograd.grad(compute(**leaves)[0].square().sum(), list(leaves.values()))

    expected = gradients()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_a_compiled_backward_pass_leaves_autocast_too(rule: str):
    leaves = {name: x.requires_grad_() for name, x in arguments(rule, T=20, dtype=torch.float32).items()}
    torch._dynamo.reset()
    compiled = torch.compile(chunk(rule), fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(compiled(**leaves).o.square().sum(), list(leaves.values()))
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(compiled(**leaves).o.square().sum(), list(leaves.values()))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_decayed_scores_equal_their_sum_written_out():
    torch.manual_seed(0)
    left, right = torch.randn(3, 2, 8, 4, dtype=torch.float64), torch.randn(3, 3, 8, 4, dtype=torch.float64)
    g = -20 * torch.rand(3, 8, 4, dtype=torch.float64)
    scores = decayed_products(left, right, g)
    for i in range(8):
        for j in range(8):
            decay = g[:, j + 1 : i + 1].sum(1).exp() if j <= i else torch.zeros(3, 4, dtype=torch.float64)
            expected = torch.einsum("bmd,bnd,bd->bmn", left[:, :, i], right[:, :, j], decay)
            torch.testing.assert_close(scores[..., i, j], expected, rtol=1e-14, atol=1e-14)
