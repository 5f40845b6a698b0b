"""Gated DeltaProduct: one step per token is Gated DeltaNet, and n steps are the loop that its paper defines."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.layers import GatedDeltaNet, GatedDeltaProduct
from mdn.models import MomentumDeltaNetConfig

SIZES = {"hidden_size": 32, "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 2}


def test_one_step_per_token_is_gated_deltanet() -> None:
    torch.manual_seed(0)
    product = GatedDeltaProduct(**SIZES, num_householder=1).double()
    plain = GatedDeltaNet(**SIZES).double()
    plain.load_state_dict(product.state_dict())
    x = torch.randn(2, 70, 32, dtype=torch.float64)
    torch.testing.assert_close(product(x), plain(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("use_short_conv", [True, False])
def test_the_layer_is_the_papers_loop(use_short_conv: bool) -> None:
    torch.manual_seed(1)
    layer = GatedDeltaProduct(**SIZES, num_householder=3, allow_neg_eigval=True, use_short_conv=use_short_conv).double()
    x = torch.randn(1, 21, 32, dtype=torch.float64)
    torch.testing.assert_close(layer(x), by_loop(layer, x), rtol=1e-11, atol=1e-11)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum() + 1e-6).sqrt()


def by_loop(layer: GatedDeltaProduct, x: Tensor) -> Tensor:
    """The definition at the top of the module, head by head and step by step."""
    H, HV, K, V, n = 2, 4, 8, 16, 3

    def stream(name: str, heads: int) -> Tensor:
        y = getattr(layer, f"{name}_proj")(x)[0].T  # [channels, T]
        if layer.use_short_conv:
            weight = getattr(layer, f"{name}_conv1d").weight.reshape(len(y), 1, -1)
            y = F.conv1d(F.pad(y, (weight.shape[-1] - 1, 0)), weight, groups=len(y))
        return F.silu(y).T.unflatten(-1, (heads, -1))

    q, k, v = stream("q", H), stream("k", H).unflatten(-1, (n, K)), stream("v", HV).unflatten(-1, (n, V))
    beta = 2 * layer.b_proj(x)[0].sigmoid().unflatten(-1, (HV, n))
    alpha = torch.exp(-layer.A_log.exp() * F.softplus(layer.a_proj(x)[0] + layer.dt_bias))
    S, outputs = torch.zeros(HV, K, V, dtype=x.dtype), []
    for t in range(x.shape[1]):
        o = []
        for head in range(HV):
            state, group = alpha[t, head] * S[head], head // (HV // H)
            for j in range(n):
                key = unit(k[t, group, j])
                state = state + beta[t, head, j] * torch.outer(key, v[t, head, j] - state.T @ key)
            S[head] = state
            o.append(state.T @ unit(q[t, group]) / K**0.5)
        outputs.append(torch.stack(o))
    return layer.output(torch.stack(outputs).unsqueeze(0), x)


def test_the_number_of_steps_is_a_mixer_option() -> None:
    options = {"num_householder": 3}
    config = MomentumDeltaNetConfig(**SIZES, mixer="gated_deltaproduct", mixer_options=options, allow_neg_eigval=True)
    layer = GatedDeltaProduct.from_config(config, 0)
    assert (layer.steps_per_token, layer.allow_neg_eigval) == (3, True)
    with pytest.raises(ValueError, match="num_householder must be at least 1"):
        GatedDeltaProduct(**SIZES, num_householder=0)
