"""RMS norm and the gated head-wise norm against their formulas, in every precision."""

import pytest
import torch

from mdn.layers import GatedRMSNorm, RMSNorm


def formula(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-7)]
)
def test_rms_norm_keeps_the_dtype_and_computes_the_formula(dtype, tolerance):
    torch.manual_seed(0)
    norm = RMSNorm(16, eps=1e-3).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, 16).to(dtype)
    found = norm(x)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), formula(x.double(), norm.weight.double(), 1e-3), rtol=tolerance, atol=1e-9
    )


@pytest.mark.parametrize(
    ("name", "activation"),
    [("sigmoid", torch.sigmoid), ("swish", lambda g: g * torch.sigmoid(g)), ("silu", lambda g: g * torch.sigmoid(g))],
)
def test_the_gate_multiplies_the_norm_of_every_head(name, activation):
    torch.manual_seed(0)
    norm = GatedRMSNorm(8, activation=name).double()
    x, gate = torch.randn(2, 2, 3, 4, 8, dtype=torch.float64)
    expected = formula(x, norm.weight, 1e-6) * activation(gate)
    torch.testing.assert_close(norm(x, gate), expected)


def test_an_unknown_gate_activation_is_refused():
    with pytest.raises(ValueError, match="gate's activation"):
        GatedRMSNorm(8, activation="relu")
