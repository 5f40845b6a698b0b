"""Whole mixers against layers that nobody here wrote, with copied weights: FLA's, and transformers' Mamba2 and KDA."""

import inspect

import pytest
import torch
from torch import Tensor, nn
from transformers import KimiLinearConfig, Mamba2Config
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2

from fla_on_cpu import fla_on_cpu  # noqa: F401
from mdn.layers import MIXERS, TokenLayout
from mdn.layers.init import initialise

# our name -> (FLA's class, arguments of both)
PAIRS = {
    "gated_deltanet": ("GatedDeltaNet", {"head_dim": 8, "num_heads": 2, "num_v_heads": 4, "expand_v": 2}),
    "comba": ("Comba", {"head_dim": 8, "num_heads": 2, "expand_v": 2}),
    "kda": ("KimiDeltaAttention", {"head_dim": 8, "num_heads": 2, "num_v_heads": 4}),
    "deltanet": ("DeltaNet", {"num_heads": 4}),
    "gla": ("GatedLinearAttention", {"num_heads": 4}),
    "linear_attention": ("LinearAttention", {"num_heads": 4}),
    "rwkv7": ("RWKV7Attention", {"head_dim": 8, "num_hidden_layers": 3}),
    "mamba2": ("Mamba2", {"head_dim": 8, "state_size": 16}),
}
VARIANTS = [
    *((name, {}) for name in PAIRS),
    ("gated_deltanet", {"allow_neg_eigval": True, "use_gate": False}),
    ("comba", {"use_inner_decay": False, "correction_factor": 0.02}),
    ("deltanet", {"use_gate": True, "allow_neg_eigval": True}),
    ("deltanet", {"use_beta": False, "use_short_conv": False}),
    ("gla", {"use_short_conv": True, "clamp_min": -0.01}),
    ("linear_attention", {"feature_map": "elu", "do_feature_map_norm": True}),
]


def randomised(module: nn.Module) -> nn.Module:
    """Every parameter random, so that none can be ignored or confused with another."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def tokens(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_a_mixer_loads_the_weights_of_the_layer_in_fla_and_computes_the_same(fla_on_cpu, name, options):  # noqa: F811
    peer_name, sizes = PAIRS[name]
    arguments = {"hidden_size": 32, "layer_idx": 0, "norm_eps": 1e-5, **sizes, **options}
    theirs = randomised(getattr(fla_on_cpu, peer_name)(**arguments))
    ours = MIXERS[name](**arguments)
    ours.load_state_dict(theirs.state_dict())
    x = tokens(2, 20, 32).requires_grad_()
    expected = theirs(x)[0]
    found = ours(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weights = tokens(2, 20, 32)
    pair = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-4)


def test_later_layers_of_rwkv7_blend_in_the_first_layers_values_as_in_fla(fla_on_cpu):  # noqa: F811
    arguments = {"hidden_size": 32, "head_dim": 8, "num_hidden_layers": 3}
    theirs = [randomised(fla_on_cpu.RWKV7Attention(**arguments, layer_idx=i)) for i in (0, 1)]
    ours = [MIXERS["rwkv7"](**arguments, layer_idx=i) for i in (0, 1)]
    for mine, other in zip(ours, theirs):
        mine.load_state_dict(other.state_dict())
    x = tokens(2, 20, 32)
    first, _, _, values = theirs[0](x)
    expected = theirs[1](first, v_first=values)[0]
    layout = TokenLayout((2, 20))
    found = ours[1](ours[0](x, layout), layout)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    with pytest.raises(ValueError, match="layer 1 needs the values of the first RWKV-7 layer"):
        ours[1](x)


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "mamba2"])
def test_first_values_of_parameters_have_the_distribution_of_fla(fla_on_cpu, name):  # noqa: F811
    peer_name, sizes = PAIRS[name]
    arguments = {"hidden_size": 512, "layer_idx": 0, **sizes, "num_heads": 64, "head_dim": 8}
    drop = {"rwkv7": ["num_heads"], "deltanet": ["head_dim"], "gla": ["head_dim"], "linear_attention": ["head_dim"]}
    arguments = {key: value for key, value in arguments.items() if key not in [*drop.get(name, []), "num_v_heads"]}
    torch.manual_seed(0)
    theirs, ours = getattr(fla_on_cpu, peer_name)(**arguments), MIXERS[name](**arguments)
    if name == "rwkv7":  # FLA's constructor fills its linear layers too; here the model does
        for module in ours.modules():
            initialise(module)
    own = dict(theirs.named_parameters(recurse=name == "rwkv7"))
    assert set(own) <= set(ours.state_dict())
    for key, expected in own.items():
        found = ours.state_dict()[key].flatten().double()
        expected = expected.detach().flatten().double()
        for share in (0.1, 0.5, 0.9):
            spread = expected.std() / expected.numel() ** 0.5
            assert abs(found.quantile(share) - expected.quantile(share)) <= 8 * spread + 1e-6, (key, share)


def test_mamba2_equals_transformers_with_copied_weights(monkeypatch):
    for function in ("mamba2_chunk_scan", "causal_conv1d_fn"):
        monkeypatch.setattr(mamba2, function, inspect.unwrap(getattr(mamba2, function)))
    config = Mamba2Config(
        hidden_size=32, head_dim=8, num_heads=8, state_size=16, expand=2, n_groups=2, chunk_size=16, num_hidden_layers=1
    )
    theirs = randomised(mamba2.Mamba2Mixer(config, 0).eval())
    options = {"head_dim": 8, "state_size": 16, "n_groups": 2, "norm_groups": 1, "norm_eps": config.layer_norm_epsilon}
    ours = MIXERS["mamba2"](hidden_size=32, **options, layer_idx=0)
    ours.load_state_dict(theirs.state_dict())
    x = tokens(2, 50, 32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_kda_equals_transformers_with_copied_weights(monkeypatch):
    for function in ("chunk_kimi_delta_attention", "causal_conv1d_fn"):  # its torch code, not the kernels of FLA
        monkeypatch.setattr(kimi, function, inspect.unwrap(getattr(kimi, function)))
    config = KimiLinearConfig(hidden_size=32, linear_head_dim=8, linear_num_heads=4, num_hidden_layers=1)
    theirs = randomised(kimi.KimiLinearDeltaAttention(config, 0).eval())
    ours = MIXERS["kda"](hidden_size=32, head_dim=8, num_heads=4, norm_eps=config.rms_norm_eps, layer_idx=0)
    weights = theirs.state_dict()
    q_conv, k_conv, v_conv = weights.pop("conv1d.weight").chunk(3)
    renamed = {
        "forget_gate.f_a_proj.weight": "f_proj.0.weight",
        "forget_gate.f_b_proj.weight": "f_proj.1.weight",
        "forget_gate.dt_bias": "dt_bias",
        "forget_gate.A_log": "A_log",
        "g_a_proj.weight": "g_proj.0.weight",
        "g_b_proj.weight": "g_proj.1.weight",
    }
    weights = {renamed.get(name, name): value for name, value in weights.items()}
    weights["A_log"] = weights["A_log"].flatten()
    convolutions = {"q_conv1d.weight": q_conv, "k_conv1d.weight": k_conv, "v_conv1d.weight": v_conv}
    ours.load_state_dict(weights | convolutions | {"g_proj.1.bias": torch.zeros(32)})
    x = tokens(2, 50, 32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
