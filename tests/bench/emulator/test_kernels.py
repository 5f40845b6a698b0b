"""Our kernels, compiled for real targets and executed through the public functions: right results, and no races.

`make test` runs one forward and backward pass, a pack, grouped heads and the decode step for sm_80, and one pass for
sm_90; the grid of dtypes, chunk sizes and head dimensions is marked slow. Most of the time is Triton's compiler.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mdn.bench.emulator import EmulatedGPU
from mdn.ops import chunk_momentum_delta_rule, momentum_delta_step, recurrent_momentum_delta_rule

pytest.importorskip("triton")
pytestmark = pytest.mark.first

# Largest difference over largest value; 16-bit operands are rounded before every product.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def make_inputs(T: int, H: int, HV: int, K: int, V: int, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    vectors = {name: torch.randn(1, T, H, K, dtype=dtype) for name in ("q", "k")}
    gates = {name: -2 * torch.rand(1, T, HV) for name in ("log_alpha", "log_mu")}
    gates["log_mu"][:, T // 3] = -torch.inf
    steps = {"beta": torch.rand(1, T, HV), "eta": torch.rand(1, T, HV)}
    return vectors | {"v": torch.randn(1, T, HV, V, dtype=dtype)} | gates | steps


def error(actual: Tensor, exact: Tensor) -> float:
    return ((actual.double() - exact).abs().max() / exact.abs().max()).item()


def check_pass(target: str, dtype: torch.dtype, T=40, H=1, HV=1, K=32, V=32, chunk_size=16, cu_seqlens=None) -> None:
    """Outputs, final state and every gradient against the float64 recurrence; not a single race."""
    gpu, inputs = EmulatedGPU(target, check=True), make_inputs(T, H, HV, K, V, dtype)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    with gpu.emulate():
        o, state = chunk_momentum_delta_rule(
            **leaves, cu_seqlens=cu_seqlens, output_final_state=True, chunk_size=chunk_size, backend="triton"
        )
        grad_o, grad_state = torch.randn_like(o), torch.randn_like(state)
        grads = torch.autograd.grad([o, state], list(leaves.values()), [grad_o, grad_state])
    exact = {name: x.double().requires_grad_() for name, x in inputs.items()}
    exact_o, exact_state = recurrent_momentum_delta_rule(**exact, cu_seqlens=cu_seqlens, output_final_state=True)
    exact_grads = torch.autograd.grad(
        [exact_o, exact_state], list(exact.values()), [grad_o.double(), grad_state.double()]
    )
    assert not gpu.races
    assert error(o, exact_o) < TOLERANCE[dtype]
    assert error(state, exact_state) < TOLERANCE[dtype]
    for name, grad, exact_grad in zip(inputs, grads, exact_grads):
        assert error(grad, exact_grad) < 2 * TOLERANCE[dtype], name


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_forward_and_backward_agree_with_the_recurrence(target):
    check_pass(target, torch.bfloat16)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_token_that_is_not_finite_leaves_earlier_ones_alone(target):
    outputs = {}
    for name in ("nothing", "k", "v"):
        inputs = make_inputs(40, 1, 1, 32, 32, torch.bfloat16)
        if name in inputs:
            inputs[name][:, 21] = torch.nan
        gpu = EmulatedGPU(target, check=True)
        with gpu.emulate():
            outputs[name] = chunk_momentum_delta_rule(**inputs, chunk_size=16, backend="triton").o
        assert not gpu.races
    for name in ("k", "v"):
        assert torch.equal(outputs[name][:, :21], outputs["nothing"][:, :21])
        assert outputs[name][:, 21:].isnan().all()


@pytest.mark.parametrize("chunk_size", [32, 64])
def test_longer_chunks_have_other_layouts(chunk_size):
    check_pass("sm_80", torch.bfloat16, K=32, V=16, chunk_size=chunk_size)


def test_a_pack_with_empty_and_one_token_sequences():
    check_pass("sm_80", torch.bfloat16, cu_seqlens=torch.tensor([0, 17, 17, 18, 40]))


def test_value_heads_that_share_a_key_head():
    check_pass("sm_80", torch.float32, H=1, HV=2)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_decode_step_updates_its_slots_only(target):
    gpu = EmulatedGPU(target, check=True)
    token = {name: x[0] for name, x in make_inputs(3, 1, 2, 32, 48, torch.bfloat16).items()}
    state = torch.randn(2, 6, 2, 32, 48)
    exact_state, slots = state.double(), torch.tensor([4, 0, 5])
    before = state.clone()
    with gpu.emulate():
        o = momentum_delta_step(**token, state=state, state_indices=slots, backend="triton")
    exact_token = {name: x.double() for name, x in token.items()}
    exact_o = momentum_delta_step(**exact_token, state=exact_state, state_indices=slots, backend="torch")
    assert not gpu.races
    assert error(o, exact_o) < TOLERANCE[torch.bfloat16]
    assert error(state, exact_state) < 1e-5
    assert torch.equal(state[:, [1, 2, 3]], before[:, [1, 2, 3]])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("K", "V", "chunk_size"), [(64, 64, 64), (96, 64, 32), (128, 256, 64), (256, 64, 64)])
def test_the_grid_of_shapes(target, dtype, K, V, chunk_size):
    check_pass(target, dtype, T=150, K=K, V=V, chunk_size=chunk_size)
