"""FLA's layers without a GPU: their wiring and weights, with FLA's naive functions in place of its Triton kernels."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import fla.layers as layers
    import fla.layers.mamba2
    from fla.modules import FusedRMSNormGated, GatedMLP, RMSNorm, ShortConvolution
    from fla.modules.token_shift import token_shift_ref
    from fla.ops.comba.naive import naive_chunk_comba
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.kda.gate import naive_kda_gate
    from fla.ops.kda.naive import naive_recurrent_kda
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn
    from fla.ops.rwkv7.fused_addcmul import torch_addcmul_rwkv7
    from fla.ops.rwkv7.fused_k_update import k_update_ref
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def gated_delta_rule(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, **_):
    group = v.shape[2] // q.shape[2]
    q, k = (unit(x).repeat_interleave(group, 2) for x in (q, k))
    beta = (1 + allow_neg_eigval) * beta.sigmoid()
    return naive_recurrent_gated_delta_rule(q, k, v, beta, naive_gdn_gate(g, A_log, dt_bias))


def comba(q, k, v, p, g, beta, **_):
    return naive_chunk_comba(unit(q), unit(k), v, unit(p), g, beta)


def kda(q, k, v, g, beta, A_log, dt_bias, **_):
    return naive_recurrent_kda(unit(q), unit(k), v, naive_kda_gate(g, A_log, dt_bias), beta.sigmoid())


def delta_rule(q, k, v, beta, **_):
    o, state = delta_rule_recurrence(*(x.transpose(1, 2) for x in (unit(q), unit(k), v, beta)))
    return o.transpose(1, 2), state


def gla(q, k, v, gk, **_):
    return naive_recurrent_gla(q, k, v, gk)


def linear_attn(q, k, v, normalize, **_):
    return naive_recurrent_linear_attn(q, k, v, normalize=normalize)


def rwkv7(r, w, k, v, a, b, **_):
    r, w, k, v, a, b = (x.transpose(1, 2) for x in (r * r.shape[-1] ** 0.5, w, k, v, a, b))  # its scale is D^-0.5
    o, state = dplr_recurrence(r, k, v, a, b, w)
    return o.transpose(1, 2), state


def token_shift(x, cu_seqlens, **_):
    return token_shift_ref(x, cu_seqlens), None


def convolution(self, x, **_):
    y = F.conv1d(F.pad(x.mT, (self.kernel_size[0] - 1, 0)), self.weight, self.bias, groups=x.shape[-1]).mT
    return F.silu(y), None


def rms_norm(self, x, residual=None, prenorm=False, *_):
    """With a residual: the norm of the sum and, if `prenorm`, the sum itself."""
    x = x if residual is None else x + residual
    y = F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
    return (y, x) if prenorm else y


def gated_rms_norm(self, x, gate, *_):
    return rms_norm(self, x) * (torch.sigmoid(gate) if self.activation == "sigmoid" else F.silu(gate))


def norm_of_gated(self, x, gate):
    return F.rms_norm(x * F.silu(gate), x.shape[-1:], self.weight, self.eps)


def gated_mlp(self, x, **_):
    return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.fixture
def fla_on_cpu(monkeypatch: pytest.MonkeyPatch):
    """``fla.layers``, whose forward passes run on a CPU for as long as the test does."""
    rules = {
        "gated_deltanet.chunk_gated_delta_rule": gated_delta_rule,
        "comba.chunk_comba": comba,
        "kda.chunk_kda": kda,
        "delta_net.fused_recurrent_delta_rule": delta_rule,
        "gla.fused_recurrent_gla": gla,
        "linear_attn.chunk_linear_attn": linear_attn,
        "rwkv7.chunk_rwkv7": rwkv7,
        "rwkv7.fused_addcmul_rwkv7": torch_addcmul_rwkv7,
        "rwkv7.fused_k_rwkv7": k_update_ref,
        "rwkv7.gate_output_correction": gate_output_correction_ref,
        "rwkv7.token_shift": token_shift,
    }
    for place, function in rules.items():
        monkeypatch.setattr(f"fla.layers.{place}", function)
    monkeypatch.setattr("fla.models.rwkv7.modeling_rwkv7.token_shift", token_shift)
    monkeypatch.setitem(fla.layers.mamba2.ACT2FN, "silu", F.silu)
    monkeypatch.setitem(fla.layers.mamba2.ACT2FN, "sqrelu", lambda x: F.relu(x).square())
    monkeypatch.setattr(layers.GatedDeltaNet, "_use_fused_qkv_conv", lambda self, **_: False)
    monkeypatch.setattr(GatedMLP, "forward", gated_mlp)
    for module, forward in (
        (ShortConvolution, convolution),
        (RMSNorm, rms_norm),
        (FusedRMSNormGated, gated_rms_norm),
        (fla.layers.mamba2.RMSNormGated, norm_of_gated),
    ):
        monkeypatch.setattr(module, "forward", forward)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield layers
