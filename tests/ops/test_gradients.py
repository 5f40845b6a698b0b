"""Gradients: finite differences, what is saved for them, and what a second backward says.

That they are those of the definition, on every backend, is in test_conformance.py.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from conformance import torch_chunk
from definition import Tensors, leaves, make_inputs, run_with_gradients
from mdn.ops import chunk_momentum_delta_rule, fused_recurrent_momentum_delta_rule, recurrent_momentum_delta_rule


def tiny(**changes) -> Tensors:
    return leaves(make_inputs(**{"B": 1, "T": 5, "H": 1, "K": 3, "V": 2, "dtype": torch.float64} | changes))


def checked(inputs: Tensors, form=torch_chunk, **options) -> bool:
    """Numerical against computed derivatives of o and the final state, for every input at once."""
    names = list(inputs)
    return gradcheck(
        lambda *tensors: tuple(form(dict(zip(names, tensors)), **options)), tuple(inputs.values()), atol=1e-6
    )


@pytest.mark.parametrize("chunk_size", [1, 2, 64])
def test_gradcheck_in_float64(chunk_size: int) -> None:
    assert checked(tiny(), chunk_size=chunk_size)


def test_gradcheck_with_p_grouped_heads_and_scale() -> None:
    assert checked(tiny(T=4, HV=2, with_p=True), chunk_size=2, scale=0.7)


def test_gradcheck_without_norm_and_without_alpha_in_p() -> None:
    assert checked(tiny(with_p=True), use_qk_l2norm_in_kernel=False, use_p_times_alpha=False, chunk_size=3)


def test_a_pack_passes_gradcheck() -> None:
    assert checked(tiny(T=4, N=3, K=2), cu_seqlens=torch.tensor([0, 3, 3, 4]), chunk_size=2)


def test_gradcheck_without_an_initial_state() -> None:
    assert checked(tiny(with_state=False), chunk_size=2)


def test_gradcheck_of_the_recurrent_form() -> None:
    assert checked(tiny(T=3, with_p=True), lambda x: recurrent_momentum_delta_rule(**x, output_final_state=True))


def test_gradients_have_the_dtype_and_shape_of_their_inputs_whatever_they_are() -> None:
    inputs = make_inputs(T=10, HV=4, with_p=True, dtype=torch.bfloat16)
    inputs["log_mu"], inputs["beta"] = inputs["log_mu"].double(), inputs["beta"].bfloat16()
    inputs = leaves(inputs)
    results = run_with_gradients(torch_chunk, inputs)
    for name, x in inputs.items():
        gradient = results[f"grad_{name}"]
        assert (gradient.dtype, gradient.shape) == (x.dtype, x.shape), name
        assert gradient.isfinite().all(), name


def test_short_inputs_with_gradients_go_through_the_chunk_form() -> None:
    inputs = make_inputs(T=5)
    fused, chunk = (
        run_with_gradients(lambda x, f=f: f(**x, output_final_state=True, backend="torch"), leaves(inputs))
        for f in (fused_recurrent_momentum_delta_rule, chunk_momentum_delta_rule)
    )
    for name, x in chunk.items():
        assert torch.equal(fused[name], x), name


def test_a_second_backward_raises_and_names_the_alternative() -> None:
    inputs = leaves(make_inputs(T=4))
    o, _ = torch_chunk(inputs)
    (first,) = torch.autograd.grad(o.square().sum(), inputs["k"], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative; use recurrent_momentum_delta_rule"):
        first.square().sum().backward()


def test_the_recurrent_form_has_a_second_derivative() -> None:
    inputs = tiny(T=3)
    o, _ = recurrent_momentum_delta_rule(**inputs)
    (first,) = torch.autograd.grad(o.square().sum(), inputs["k"], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), inputs["v"])
    assert second.isfinite().all()
    assert second.any()


def test_only_the_inputs_and_the_errors_are_kept_for_the_backward_pass() -> None:
    """Per token and head: q, k, v, the residual and four gates, nothing of size K x V or C."""
    inputs = leaves(make_inputs(B=1, T=300, H=2, K=16, V=24, with_state=False))
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        torch_chunk(inputs)
    assert sum(kept.values()) <= 4 * 300 * 2 * (16 + 16 + 24 + 24 + 4)
