"""The MDN layer against an independent token-by-token transcription, its ablations, its state and its names."""

import math

import pytest
import torch
from transformers import DynamicCache

import mdn.models  # noqa: F401  (registers the cache layer)
from mdn.layers import MIXERS, MomentumDeltaNet, TokenLayout
from mdn.models import MomentumDeltaNetConfig
from mdn.ops.boundaries import SequenceBoundaries
from small_models import small_config

SIZES = {"hidden_size": 12, "head_dim": 4, "num_heads": 2, "expand_v": 1.5, "conv_size": 3}
ABLATIONS = {
    "the paper's layer": {},
    "no output correction": {"use_output_correction": False},
    "no momentum": {"use_momentum": False},
    "no clamp": {"min_log_mu": None},
    "paper's clamp": {"min_log_mu": -1.0},
    "alpha unbounded": {"bound_alpha": False},
    "beta unbounded": {"bound_beta": False},
    "both unbounded": {"bound_alpha": False, "bound_beta": False},
    "sigmoid eta": {"eta_activation": "sigmoid"},
    "Gated DeltaNet with bounds": {"use_momentum": False, "eta_activation": "one"},
    "temperature": {"tau_factor": 2},
    "no gate": {"use_gate": False},
    "low-rank gate": {"use_lora_gate": True, "lora_gate_rank": 3},
    "FLA's gate": {"gate_activation": "swish"},
    "no convolution": {"use_short_conv": False},
    "convolution bias": {"conv_bias": True},
    "grouped value heads": {"num_v_heads": 6},
    "probe at the undecayed state": {"use_p_times_alpha": False},
    "recurrent mode": {"mode": "fused_recurrent"},
    "quasi-hyperbolic momentum": {"momentum": "quasi_hyperbolic", "num_v_heads": 4},
    "Nesterov's momentum": {"momentum": "nesterov"},
}


def make(**fields) -> MomentumDeltaNet:
    torch.manual_seed(0)
    layer = MomentumDeltaNet(**{**SIZES, **fields}, layer_idx=0).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return layer


def transcribed(layer: MomentumDeltaNet, x: torch.Tensor, **fields) -> torch.Tensor:
    """One sequence ``[T, D]`` through the paper's equations with plain loops; ``fields`` are the layer's arguments."""
    get = {**SIZES, "num_v_heads": SIZES["num_heads"], "min_log_mu": -2.0, "tau_factor": 1, **fields}.get
    heads, value_heads, width = get("num_heads"), get("num_v_heads"), get("conv_size")
    group = value_heads // heads
    sigmoid, softplus = torch.sigmoid, lambda z: torch.log1p(z.exp())

    def stream(name):
        projected = x @ getattr(layer, f"{name}_proj").weight.T
        if not get("use_short_conv", True):
            return projected * sigmoid(projected)
        convolution = getattr(layer, f"{name}_conv1d")
        out = torch.zeros_like(projected)
        for t in range(len(x)):
            for j in range(width):
                if t - j >= 0:
                    out[t] += convolution.weight[:, 0, width - 1 - j] * projected[t - j]
            out[t] += 0 if convolution.bias is None else convolution.bias
        return out * sigmoid(out)

    q, k, v = stream("q").reshape(len(x), heads, -1), stream("k").reshape(len(x), heads, -1), stream("v")
    v = v.reshape(len(x), value_heads, -1)
    outputs = torch.zeros_like(v)
    for h in range(value_heads):
        g = h // group
        S = M = torch.zeros(q.shape[-1], v.shape[-1], dtype=x.dtype)
        for t in range(len(x)):
            eta = torch.tensor(1.0, dtype=x.dtype)
            if get("eta_activation") != "one":
                e = x[t] @ layer.e_proj.weight[h] / math.sqrt(x.shape[-1] / get("tau_factor"))
                eta = 2 * sigmoid(e) if get("eta_activation") == "sigmoid" else 1 + torch.tanh(e)
            alpha = torch.exp(-layer.A_log[g].exp() * softplus(x[t] @ layer.a_proj.weight[h] + layer.dt_bias[h]))
            beta = sigmoid(x[t] @ layer.b_proj.weight[h])
            if layer.log_factor is not None:
                theta = torch.atan(eta * layer.log_factor[g].exp())
                alpha = alpha * (torch.cos(theta) ** 2 if get("bound_alpha", True) else 1)
                beta = beta * (torch.sin(theta) ** 2 if get("bound_beta", True) else 1)
            mu = torch.tensor(0.0, dtype=x.dtype)
            if get("use_momentum", True):
                mu = torch.exp(-layer.Mu_log[g].exp() * softplus(x[t] @ layer.m_proj.weight[h] + layer.mu_bias[h]))
                mu = mu if get("min_log_mu") is None else mu.clamp(min=math.exp(get("min_log_mu")))
            query = q[t, g] - (layer.D_log[g].exp() * k[t, g] if get("use_output_correction", True) else 0)
            query = query / (query.square().sum() + 1e-6).sqrt()
            key = k[t, g] / (k[t, g].square().sum() + 1e-6).sqrt()
            probe = alpha * key if get("use_p_times_alpha", True) else key
            write = torch.outer(key, v[t, h] - S.T @ probe)
            M = mu * M - eta * write
            step = M
            if get("momentum") == "quasi_hyperbolic":  # between momentum and plain gradient
                nu = sigmoid(x[t] @ layer.n_proj.weight[h] + layer.nu_bias[h])
                step = nu * M - (1 - nu) * eta * write
            if get("momentum") == "nesterov":  # the momentum after one more step of decay, and the gradient
                step = mu * M - eta * write
            S = alpha * S - beta * step
            outputs[t, h] = S.T @ query / math.sqrt(len(key))
    normed = outputs / (outputs.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.o_norm.weight
    if get("use_gate", True):
        gate = layer.g_proj(x).reshape(normed.shape)
        normed = normed * (gate * sigmoid(gate) if get("gate_activation") == "swish" else sigmoid(gate))
    return normed.reshape(len(x), -1) @ layer.o_proj.weight.T


@pytest.mark.parametrize("name", sorted(ABLATIONS))
def test_the_layer_equals_a_transcription_of_the_paper_in_float64(name):
    layer = make(**ABLATIONS[name])
    x = torch.randn(2, 11, SIZES["hidden_size"], dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack([transcribed(layer, row, **ABLATIONS[name]) for row in x])
        torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", sorted(ABLATIONS))
def test_every_parameter_of_every_ablation_gets_a_gradient(name):
    layer = make(**ABLATIONS[name])
    layer(torch.randn(2, 7, SIZES["hidden_size"], dtype=torch.float64)).square().sum().backward()
    without = [n for n, p in layer.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
    assert without == []


def cached(layer: MomentumDeltaNet) -> DynamicCache:
    return DynamicCache(config=MomentumDeltaNetConfig(num_hidden_layers=1))


@pytest.mark.parametrize(
    "name",
    [
        *("the paper's layer", "no convolution", "grouped value heads", "no momentum", "recurrent mode"),
        *("quasi-hyperbolic momentum", "Nesterov's momentum"),
    ],
)
def test_pieces_and_single_tokens_with_a_cache_equal_the_whole(name):
    layer = make(**ABLATIONS[name])
    x = torch.randn(2, 20, SIZES["hidden_size"], dtype=torch.float64)
    cache = cached(layer)
    with torch.no_grad():
        found = torch.cat([layer(piece, None, cache) for piece in x.split([7, 1, 1, 5, 1, 5], dim=1)], dim=1)
        torch.testing.assert_close(found, layer(x))


def places(cache: DynamicCache) -> list[int]:
    layer = cache.layers[0]
    states = (*layer.recurrent_states.values(), *layer.conv_states.values())
    return [state.data_ptr() for state in states if state is not None]


def test_a_decode_step_updates_the_cached_tensors_in_place_and_allocates_no_new_state():
    layer = make()
    cache = cached(layer)
    x = torch.randn(2, 6, SIZES["hidden_size"], dtype=torch.float64)
    with torch.no_grad():
        layer(x[:, :5], None, cache)
        before = places(cache)
        layer(x[:, 5:], None, cache)
    assert places(cache) == before
    assert len(before) == 2 + 3  # S, M and the convolutions of q, k, v


def test_without_momentum_only_the_fast_weight_is_kept():
    layer = make(use_momentum=False)
    cache = cached(layer)
    with torch.no_grad():
        layer(torch.randn(2, 6, SIZES["hidden_size"], dtype=torch.float64), None, cache)
    assert len(places(cache)) == 1 + 3
    assert "M" not in layer.state_shapes()


def test_packed_sequences_equal_separate_ones_forward_and_backward():
    layer = make()
    lengths = (5, 1, 0, 8)
    layout = TokenLayout((1, 14), SequenceBoundaries.from_lengths(lengths))
    x = torch.randn(1, 14, SIZES["hidden_size"], dtype=torch.float64)
    weights = torch.randn_like(x)

    def gradients(y, inputs):
        return torch.autograd.grad((y * weights).sum(), [inputs, *layer.parameters()])

    packed = x.clone().requires_grad_()
    together = layer(packed, layout)
    separate = x.clone().requires_grad_()
    apart = torch.cat([layer(piece) for piece in separate.split(lengths, dim=1) if piece.shape[1]], dim=1)
    torch.testing.assert_close(together, apart)
    for found, expected in zip(gradients(together, packed), gradients(apart, separate)):
        torch.testing.assert_close(found, expected)


def test_blockwise_momentum_differs_from_stepwise_and_a_block_of_one_does_not():
    x = torch.randn(1, 12, SIZES["hidden_size"], dtype=torch.float64)
    with torch.no_grad():
        stepwise = make()(x)
        torch.testing.assert_close(make(momentum_block_size=1)(x), stepwise)
        blockwise = make(momentum_block_size=4)(x)
    torch.testing.assert_close(blockwise[:, 0], stepwise[:, 0])  # the first error of a block is the true one
    assert (blockwise - stepwise).abs().max() > 1e-3


def test_state_dict_names_and_shapes_are_those_of_the_authors_checkpoints():
    D, H, HV, K, V, W = 32, 2, 4, 8, 16, 4
    expected = {"A_log": (H,), "Mu_log": (H,), "log_factor": (H,), "D_log": (H,), "dt_bias": (HV,), "mu_bias": (HV,)}
    expected |= {f"{name}_proj.weight": (HV, D) for name in "abme"}
    expected |= {f"{name}_proj.weight": (H * K, D) for name in "qk"}
    expected |= {f"{name}_proj.weight": (HV * V, D) for name in "vg"} | {"o_proj.weight": (D, HV * V)}
    expected |= {f"{name}_conv1d.weight": (H * K, 1, W) for name in "qk"} | {"v_conv1d.weight": (HV * V, 1, W)}
    expected |= {"o_norm.weight": (V,)}
    layer = MomentumDeltaNet(D, head_dim=K, num_heads=H, num_v_heads=HV, expand_v=2, conv_size=W)
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == expected


def test_only_quasi_hyperbolic_momentum_adds_weights_and_it_begins_half_way():
    kinds = {kind: MomentumDeltaNet(**SIZES, momentum=kind) for kind in ("heavy_ball", "quasi_hyperbolic", "nesterov")}
    names = {kind: set(layer.state_dict()) for kind, layer in kinds.items()}
    assert names["quasi_hyperbolic"] - names["heavy_ball"] == {"n_proj.weight", "nu_bias"}
    assert names["nesterov"] == names["heavy_ball"] < names["quasi_hyperbolic"]
    halfway = kinds["quasi_hyperbolic"]
    gates = halfway.gates(torch.zeros(1, 1, SIZES["hidden_size"]))
    torch.testing.assert_close(gates.direct, gates.beta * gates.eta)


@pytest.mark.slow  # importing FLA takes long
@pytest.mark.parametrize("fields", [{}, {"num_v_heads": 4}, {"use_output_correction": False}])
def test_a_state_dict_of_flas_layer_loads(fields):
    from fla.layers.momentum_deltanet import MomentumDeltaNet as Theirs

    sizes = {"hidden_size": 32, "head_dim": 8, "num_heads": 2, "expand_v": 2.0, "conv_size": 4}
    MomentumDeltaNet(**sizes, **fields).load_state_dict(Theirs(**sizes, **fields).state_dict())


def test_the_gates_can_be_watched_by_a_hook_and_asked_for_directly():
    layer = make()
    x = torch.randn(1, 5, SIZES["hidden_size"], dtype=torch.float64)
    seen = []
    handle = layer.gate_map.register_forward_hook(lambda module, inputs, gates: seen.append(gates))
    layer(x)
    handle.remove()
    layer(x)
    assert len(seen) == 1
    for watched, asked in zip(seen[0][:4], layer.gates(x)[:4]):
        torch.testing.assert_close(watched, asked)
    assert seen[0].direct is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "parallel"}, "mode \\(attn_mode"),
        ({"expand_v": 1.3}, "expand_v"),
        ({"num_v_heads": 3}, "num_v_heads"),
        ({"tau_factor": 0.5}, "tau_factor"),
        ({"momentum_block_size": 0}, "momentum_block_size"),
        ({"gate_activation": "tanh"}, "gate's activation"),
        ({"eta_activation": "gelu"}, "eta_activation"),
        ({"momentum": "adam"}, "momentum must be one of heavy_ball, quasi_hyperbolic, nesterov"),
        ({"momentum": "nesterov", "use_momentum": False}, "momentum must be 'heavy_ball' where use_momentum is false"),
        ({"mu_init": 0}, "mu_init must be a positive number or a pair"),
        ({"mu_init": [0.1]}, "mu_init"),
        ({"mu_init": True}, "mu_init"),
        ({"log_factor_init": (2.0, 0.05)}, "log_factor_init"),
        ({"log_factor_init": "wide"}, "log_factor_init"),
    ],
)
def test_bad_arguments_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        MomentumDeltaNet(**{**SIZES, **fields})


def initial_gates(**fields):
    """s and -log mu of every head of a fresh layer, where all projections are zero."""
    torch.manual_seed(0)
    layer = MomentumDeltaNet(hidden_size=8, head_dim=2, num_heads=400, num_v_heads=800, min_log_mu=None, **fields)
    with torch.no_grad():
        return layer.log_factor.exp(), -layer.gates(torch.zeros(1, 1, 8)).log_mu.flatten()


def test_initial_decays_of_the_momentum_are_those_of_the_weight_times_mu_init():
    _, released = initial_gates()
    assert released.max() <= 16 * 0.1
    torch.testing.assert_close(initial_gates(mu_init=10)[1], 10 * released, rtol=1e-4, atol=0)
    _, drawn = initial_gates(mu_init=[1e-3, 1.5])
    assert 1e-3 * 0.99 <= drawn.min() < 2e-3
    assert 1.0 < drawn.max() <= 1.5 * 1.01
    assert drawn.log().mean() == pytest.approx(math.log(1e-3 * 1.5) / 2, abs=0.3)  # evenly over the logs


def test_initial_factors_are_uniform_up_to_a_number_or_log_uniform_in_a_range():
    for fields, mean in (({}, 2.0), ({"log_factor_init": 1}, 0.5)):
        assert initial_gates(**fields)[0].mean() == pytest.approx(mean, rel=0.1)
    drawn, _ = initial_gates(log_factor_init=[0.05, 2.0])
    assert 0.05 <= drawn.min() < 0.06
    assert 1.8 < drawn.max() <= 2.0
    assert drawn.log().mean() == pytest.approx(math.log(0.1) / 2, abs=0.2)


def test_a_cache_without_recurrent_layers_is_refused_with_the_way_to_make_one():
    layer = make()
    with pytest.raises(ValueError, match="DynamicCache\\(config"):
        layer(torch.randn(1, 3, SIZES["hidden_size"], dtype=torch.float64), None, DynamicCache())
    with pytest.raises(ValueError, match="layer_idx"):
        MomentumDeltaNet(**SIZES)(torch.randn(1, 3, 12), None, DynamicCache())


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_gate_parameters_named_as_not_decayed_exist_in_the_layer(mixer):
    layer = MIXERS[mixer].from_config(small_config(mixer), 0)
    parameters = {name for name, _ in layer.named_parameters(recurse=False)}
    assert set(layer.no_weight_decay) - {"nu_bias"} <= parameters  # nu_bias: quasi-hyperbolic momentum only
