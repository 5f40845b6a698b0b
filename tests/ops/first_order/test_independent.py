"""The first-order rules against code that nobody here wrote: transformers' torch functions and FLA's naive ones."""

import inspect

import pytest
import torch
from fla.ops.comba.naive import naive_chunk_comba, naive_recurrent_comba
from fla.ops.delta_rule.naive import delta_rule_recurrence
from fla.ops.generalized_delta_rule.dplr.naive import dplr_chunkwise, dplr_recurrence
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.linear_attn.naive import naive_recurrent_linear_attn
from fla.ops.simple_gla.naive import naive_recurrent_simple_gla
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from first_order_cases import arguments, chunk, random_state, recurrent

FORMS = pytest.mark.parametrize("form", [chunk, recurrent])


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def single(rule: str, **sizes) -> dict[str, Tensor]:
    return arguments(rule, **sizes, dtype=torch.float32)


def head_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


@FORMS
@pytest.mark.parametrize("peer", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_gated_delta_rule_equals_qwen3_next(form, peer):
    tensors, state = single("gated_delta_rule", gates="mild"), random_state("gated_delta_rule", 2, dtype=torch.float32)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected = inspect.unwrap(getattr(qwen3_next, peer))(*tensors.values(), **options)
    for x, y in zip(form("gated_delta_rule")(**tensors, **options), expected):
        close(x, y)


def test_gradients_of_the_gated_delta_rule_equal_those_of_qwen3_next():
    tensors = single("gated_delta_rule", gates="mild")
    peer = inspect.unwrap(qwen3_next.torch_chunk_gated_delta_rule)
    gradients = []
    for compute in (chunk("gated_delta_rule"), peer):
        leaves = [x.clone().requires_grad_() for x in tensors.values()]
        output, _ = compute(*leaves, use_qk_l2norm_in_kernel=True)
        gradients.append(torch.autograd.grad(output.square().sum(), leaves))
    for x, y in zip(*gradients):
        close(x, y, 1e-4)


@FORMS
@pytest.mark.parametrize("peer", ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"])
def test_kda_equals_kimi_linear(form, peer):
    tensors, state = single("kda", gates="mild"), random_state("kda", 2, dtype=torch.float32)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected = inspect.unwrap(getattr(kimi, peer))(*tensors.values(), **options)
    for x, y in zip(form("kda")(**tensors, **options), expected):
        close(x, y)


@FORMS
def test_kda_with_grouped_value_heads_equals_fla(form):
    tensors = single("kda", H=2, HV=4)
    expected = naive_recurrent_kda(*tensors.values(), output_final_state=True)
    for x, y in zip(form("kda")(**tensors, output_final_state=True), expected):
        close(x, y)


@FORMS
def test_scalar_decay_equals_the_chunk_scan_of_mamba2(form):
    torch.manual_seed(0)
    batch, time, heads, groups, width, size = 2, 50, 4, 2, 6, 8
    x, B, C = (
        torch.randn(batch, time, heads, width),
        torch.randn(batch, time, groups, size),
        torch.randn(2, time, groups, size),
    )
    dt, A = torch.rand(batch, time, heads), -torch.rand(heads) * 4
    state = torch.randn(batch, heads, width, size)
    expected, final = inspect.unwrap(mamba2.mamba2_chunk_scan)(
        x, dt, A, B, C, 16, initial_states=state, return_final_states=True
    )
    options = {"scale": 1.0, "initial_state": state, "output_final_state": True, "state_v_first": True}
    found, found_final = form("simple_gla")(C, B, x * dt[..., None], dt * A, **options)
    close(found, expected)
    close(found_final, final)


@FORMS
def test_simple_gla_equals_fla(form):
    tensors, state = single("simple_gla"), random_state("simple_gla", 2, dtype=torch.float32)
    options = {"initial_state": state, "output_final_state": True}
    for x, y in zip(form("simple_gla")(**tensors, **options), naive_recurrent_simple_gla(**tensors, **options)):
        close(x, y)


@FORMS
@pytest.mark.parametrize("normalize", [False, True])
def test_linear_attention_equals_fla(form, normalize):
    tensors = single("linear_attn")
    state, z = random_state("linear_attn", 2, dtype=torch.float32)
    options = {"initial_state": (state, z) if normalize else state, "output_final_state": True, "normalize": normalize}
    found, final = form("linear_attn")(**tensors, **options)
    expected, expected_final = naive_recurrent_linear_attn(**tensors, **options)
    close(found, expected)
    for x, y in zip(final if normalize else [final], expected_final if normalize else [expected_final]):
        close(x, y)


@FORMS
def test_gla_equals_fla(form):
    tensors, state = single("gla"), random_state("gla", 2, dtype=torch.float32)
    options = {"initial_state": state, "output_final_state": True}
    for x, y in zip(form("gla")(**tensors, **options), naive_recurrent_gla(*tensors.values(), **options)):
        close(x, y)


@FORMS
def test_delta_rule_equals_fla(form):
    tensors, state = single("delta_rule"), random_state("delta_rule", 2, dtype=torch.float32)
    options = {"initial_state": state, "output_final_state": True}
    expected, final = delta_rule_recurrence(*head_first(*tensors.values()), **options)
    found, found_final = form("delta_rule")(**tensors, **options)
    close(found, expected.transpose(1, 2))
    close(found_final, final)


@FORMS
def test_comba_equals_fla(form):
    tensors, state = single("comba", gates="mild"), random_state("comba", 2, dtype=torch.float32)
    options = {"initial_state": state, "output_final_state": True}
    for x, y in zip(form("comba")(**tensors, **options), naive_chunk_comba(**tensors, **options)):
        close(x, y)


@FORMS
def test_comba_equals_the_other_definition_of_fla_when_p_is_decayed(form):
    # FLA's kernels and its naive_chunk_comba read the error before the decay, its naive_recurrent_comba after it.
    tensors, state = single("comba"), random_state("comba", 2, dtype=torch.float32)
    options = {"initial_state": state, "output_final_state": True}
    decayed = tensors | {"p": tensors["g"].exp().unsqueeze(-1) * tensors["p"]}
    for x, y in zip(form("comba")(**decayed, **options), naive_recurrent_comba(**tensors, **options)):
        close(x, y)


@FORMS
@pytest.mark.parametrize("peer", [dplr_recurrence, dplr_chunkwise])
def test_rwkv7_equals_the_diagonal_plus_low_rank_rule_of_fla(form, peer):
    tensors, state = single("rwkv7", T=64, gates="mild"), random_state("rwkv7", 2, dtype=torch.float32)
    r, w, k, v, a, b = head_first(*tensors.values())
    expected, final = peer(r, k, v, a, b, w, initial_state=state)
    options = {"scale": r.shape[-1] ** -0.5, "initial_state": state, "output_final_state": True}
    found, found_final = form("rwkv7")(**tensors, **options)
    close(found, expected.transpose(1, 2))
    close(found_final, final)
