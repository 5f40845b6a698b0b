"""A call that needs only the final states: the same states as the whole pass, and no outputs."""

from __future__ import annotations

import pytest
import torch

from definition import make_inputs
from mdn.ops import backends
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.first_order import scalar_rules, vector_rules
from mdn.ops.first_order.inputs import FirstOrderOutput, FirstOrderTensors
from mdn.ops.first_order.rule import Rule, SharedArguments
from mdn.ops.momentum.interface import ForwardResult, RuleOptions, RuleTensors

BOUNDARIES = SequenceBoundaries.from_lengths([37, 0, 1, 27])


def tensors_of(rule: str, damaged: bool) -> RuleTensors:
    inputs = make_inputs(rule, 1, 65, 2, 4, 16, 24, N=4)
    if damaged:
        inputs["v"][0, 40, 1, 3] = float("nan")
    return RuleTensors(**{"p": None} | inputs)


def run(backend: str, tensors: RuleTensors, outputs: bool) -> ForwardResult:
    module = backends.backend_module(backend, tensors.family)
    return module.forward(tensors, BOUNDARIES, RuleOptions(0.25, 32, outputs=outputs), False)


@pytest.mark.parametrize("damaged", [False, True], ids=["finite", "with a NaN"])
@pytest.mark.parametrize(("rule", "backend"), [("momentum", "torch"), ("momentum", "cpu"), ("vector", "torch")])
def test_states_without_outputs_are_those_of_the_whole_pass(rule: str, backend: str, damaged: bool) -> None:
    tensors = tensors_of(rule, damaged)
    whole, states = run(backend, tensors, outputs=True), run(backend, tensors, outputs=False)
    assert states.o.numel() == 0
    torch.testing.assert_close(states.final_state, whole.final_state, rtol=0, atol=0, equal_nan=True)
    assert bool(whole.final_state.isnan().any()) == damaged


FIRST_ORDER = (
    scalar_rules.SIMPLE_GLA,
    scalar_rules.GATED_DELTA_RULE,
    scalar_rules.COMBA,
    vector_rules.GLA,
    vector_rules.KDA,
    vector_rules.RWKV7,
)


@pytest.mark.parametrize("damaged", [False, True], ids=["finite", "with a NaN"])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("rule", FIRST_ORDER, ids=lambda rule: rule.name)
def test_first_order_states_without_outputs(rule: Rule, backend: str, damaged: bool) -> None:
    inputs = make_inputs(rule.name, 1, 65, 2, 4, 16, 24, N=4)
    if damaged:
        inputs["v"][0, 40, 1, 3] = float("nan")
    tensors = FirstOrderTensors(**{field: inputs[name] for field, name in rule.arguments.items()})

    def run(outputs: bool) -> FirstOrderOutput:
        shared = SharedArguments(None, inputs["initial_state"], True, BOUNDARIES, outputs=outputs)
        return rule.chunk(tensors, shared, 32, backend, {})

    whole, states = run(True), run(False)
    assert states.o.numel() == 0
    # The torch form of vector decays multiplies q and p in one product, which some processors round differently than p
    # alone.
    atol = 0 if backend == "cpu" else 2e-6 * float(whole.final_state.nan_to_num().abs().max())
    torch.testing.assert_close(states.final_state, whole.final_state, rtol=0, atol=atol, equal_nan=True)
    assert bool(whole.final_state.isnan().any()) == damaged
