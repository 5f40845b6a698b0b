"""No decode step has derivatives: where one would be lost, every rule's step says so and names what has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from conformance import public_function
from definition import FIRST_ORDER, MOMENTUM, Tensors, make_inputs
from mdn.ops import fused_recurrent_momentum_delta_rule
from mdn.ops.first_order import linear_attn_step

RULES = ("general", "vector", *FIRST_ORDER)


def names(rule: str) -> tuple[str, str, str]:
    """The step, what has gradients, and what has every derivative."""
    return tuple(public_function(rule, form).__name__ for form in ("step", "chunk", "recurrent"))


def token(rule: str) -> Tensors:
    """One token of two rows, in float32, and the state before it."""
    made = make_inputs(rule, T=1, K=8, V=6, with_state=False)
    state = torch.zeros(2, 2, 2, 8, 6) if rule in MOMENTUM else torch.zeros(2, 2, 8, 6)
    return {name: x[:, 0] for name, x in made.items()} | {"state": state}


def step(rule: str, **arguments: Any) -> Tensor:
    return public_function(rule, "step")(**arguments)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_on_inputs_that_require_gradients_is_refused(rule: str, backend: str) -> None:
    function, chunk, _ = names(rule)
    for name in token(rule):
        given = token(rule)
        given[name].requires_grad_()
        shown = "S, M" if name == "state" and rule in MOMENTUM else name
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message follows
            step(rule, **given, backend=backend)
        assert str(caught.value) == (
            f"{function} has no gradient: use {chunk}, or torch.no_grad(); got tensors that require one: {shown}"
        )
        assert not given["state"].any()


@pytest.mark.parametrize("rule", RULES)
def test_without_gradients_the_same_inputs_are_taken(rule: str) -> None:
    plain, given = token(rule), token(rule)
    expected = step(rule, **plain)
    for x in given.values():
        x.requires_grad_()
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            state = torch.zeros_like(given["state"])
            assert torch.equal(step(rule, **given | {"state": state}), expected)
            assert torch.equal(state, plain["state"])


def test_the_normaliser_of_linear_attention_is_a_state_too() -> None:
    given = token("linear_attn")
    z_state = torch.zeros(2, 2, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"linear_attn_step has no gradient: .* require one: z_state"):
        linear_attn_step(**given, z_state=z_state)
    assert not given["state"].any()


@pytest.mark.parametrize("rule", ["general", "gated_delta_rule"])
def test_a_compiled_step_refuses_them_too(rule: str) -> None:
    given = token(rule)
    given["v"].requires_grad_()
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="has no gradient"):
        torch.compile(step, backend="eager")(rule, **given)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_under_forward_mode_is_refused(rule: str, backend: str) -> None:
    function, _, recurrent = names(rule)
    given = token(rule)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=f"^{function} does not support .*; {recurrent} does"),
    ):
        step(rule, **given | {"v": forward_ad.make_dual(given["v"], given["v"])}, backend=backend)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("rule", RULES)
def test_a_mapped_step_is_refused(rule: str, backend: str) -> None:
    function, _, recurrent = names(rule)
    given = token(rule)
    step(rule, **given, backend=backend)  # is prepared, so that the next one is not checked again
    v = given.pop("v")
    with pytest.raises(NotImplementedError, match=f"^{function} does not support .*; {recurrent} does"):
        torch.func.vmap(lambda v: step(rule, **given, v=v, backend=backend))(v.expand(3, *v.shape))


def test_the_lean_form_takes_the_chunk_form_for_gradients() -> None:
    inputs = make_inputs(T=3)
    inputs["v"].requires_grad_()
    o, _ = fused_recurrent_momentum_delta_rule(**inputs)
    o.sum().backward()
    assert inputs["v"].grad.any()
