"""Against FLA's published references of the same rule, where their arithmetic is sound: gates that decay slowly."""

from __future__ import annotations

import pytest
import torch

from conformance import torch_chunk
from definition import Tensors, make_inputs, relative_error, unit

naive = pytest.importorskip("fla.ops.momentum_delta_rule.naive")


def benign(T: int) -> Tensors:
    """mu falls no faster than alpha, beta is not small: the quotients in FLA's chunk form stay near one."""
    inputs = make_inputs(T=T)
    inputs["log_mu"], inputs["beta"] = 0.1 * inputs["log_mu"], 0.1 + inputs["beta"]
    return inputs


def fla_arguments(inputs: Tensors) -> dict[str, torch.Tensor]:
    """FLA's references take normalised vectors, p with its decay already in it, and S and M apart."""
    S, M = inputs["initial_state"]
    q, k = unit(inputs["q"]), unit(inputs["k"])
    gates = {name: inputs[name] for name in ("log_alpha", "log_mu", "beta", "eta")}
    p = k * inputs["log_alpha"].exp().unsqueeze(-1)
    return {"q": q, "k": k, "v": inputs["v"], "p": p, **gates, "initial_S": S, "initial_M": M}


@pytest.mark.parametrize("T", [1, 65, 130])
def test_the_rule_equals_flas_recurrent_reference(T: int) -> None:
    inputs = benign(T)
    expected = naive.recurrent_momentum_delta_rule_ref(**fla_arguments(inputs), output_final_state=True)
    for actual, reference in zip(torch_chunk(inputs), expected):
        assert relative_error(actual, reference) <= 2e-6


@pytest.mark.parametrize("T", [64, 130])
def test_the_rule_equals_flas_chunk_reference(T: int) -> None:
    """It adds 1e-6 to beta (at least 0.1 here), so it can only agree to about 1e-5."""
    inputs = benign(T)
    expected = naive.chunk_momentum_delta_rule_ref(**fla_arguments(inputs), output_final_state=True)
    for actual, reference in zip(torch_chunk(inputs), expected):
        assert relative_error(actual, reference) <= 1e-4


def test_the_same_arguments_in_the_same_order_as_flas_op() -> None:
    """An FLA user changes only the import."""
    import inspect

    from fla.ops.momentum_delta_rule import chunk_momentum_delta_rule as theirs

    from mdn.ops import chunk_momentum_delta_rule as ours

    shared = [name for name in inspect.signature(inspect.unwrap(theirs)).parameters if name != "kwargs"]
    own = list(inspect.signature(ours).parameters)
    common = [name for name in shared if name in own]
    assert own[: len(common)] == common
    assert set(common) >= {
        "q",
        "k",
        "v",
        "log_alpha",
        "log_mu",
        "p",
        "beta",
        "eta",
        "scale",
        "initial_state",
        "cu_seqlens",
    }
