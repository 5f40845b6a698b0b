"""Every mixer in the backbone: hybrids, training, RWKV-7's own blocks, and the shipped configs with their table."""

from pathlib import Path

import pytest
import torch

from mdn.layers import MIXERS, ChannelMixing
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.models.info import all_facts, page

RECURRENT = sorted(set(MIXERS) - {"attention"})
DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def model(mixer: str, random: bool = True, **fields) -> MomentumDeltaNetForCausalLM:
    """A small model; `random` fills every parameter, because RWKV-7's blocks begin as the identity."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_heads": 4, "head_dim": 8, "vocab_size": 61}
    config = MomentumDeltaNetConfig(mixer=mixer, intermediate_size=48, **sizes | fields)
    torch.manual_seed(0)
    made = MomentumDeltaNetForCausalLM(config)
    if random:
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return made.eval()


RWKV7_BLOCKS = {"mlp": "rwkv7", "norm": "layernorm", "norm_embeddings": True}
VARIANTS = [
    *((name, {"attn": {"layers": [0, 2], "num_heads": 4, "num_kv_heads": 2}}) for name in RECURRENT),
    ("momentum_deltanet", {"momentum": "quasi_hyperbolic", "num_heads": 2, "num_v_heads": 4}),
    ("momentum_deltanet", {"momentum": "nesterov"}),
    ("momentum_deltanet", {"use_momentum": False, "eta_activation": "one"}),
    ("rwkv7", RWKV7_BLOCKS),
    ("rwkv7", {}),
    ("mamba2", {"use_mlp": False, "mixer_options": {"state_size": 16, "n_groups": 2}}),
    ("linear_attention", {"mixer_options": {"feature_map": "elu", "do_feature_map_norm": True}}),
    ("gla", {"mixer_options": {"use_short_conv": True}}),
    ("kda", {"mixer_options": {"lower_bound": -5.0}, "num_heads": 2, "num_v_heads": 4}),
]


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_padding_packing_and_decoding_give_the_logits_of_each_sequence_alone(name, fields):
    made = model(name, **fields)
    ids = torch.randint(0, 61, (2, 75), generator=torch.Generator().manual_seed(2))
    short, long = ids[:1, 30:], ids[1:]
    expected = [made(short).logits, made(long).logits]
    bound = 2e-5 * max(x.abs().max() for x in expected)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    padded = made(ids, attention_mask=mask).logits
    packed = made(torch.cat([short, long], 1), cu_seqlens=torch.tensor([0, 45, 120])).logits
    prefill = made(ids[:, :70], attention_mask=mask[:, :70], use_cache=True)
    pieces, cache = [prefill.logits], prefill.past_key_values
    for t in range(70, 75):
        now = made(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache, use_cache=True)
        pieces.append(now.logits)
    decoded = torch.cat(pieces, 1)
    found = {
        "padded": (padded[:1, 30:], padded[1:]),
        "packed": (packed[:, :45], packed[:, 45:]),
        "decoded": (decoded[:1, 30:], decoded[1:]),
    }
    for kind, pair in found.items():
        for x, y in zip(pair, expected, strict=True):
            assert (x - y).abs().max() <= bound, kind


@pytest.mark.parametrize(("name", "fields"), [*((name, {}) for name in sorted(MIXERS)), ("rwkv7", RWKV7_BLOCKS)])
def test_a_model_learns_a_sequence_by_heart(name, fields):
    made = model(name, random=False, num_hidden_layers=2, **fields).train()
    ids = torch.randint(0, 61, (1, 24), generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = made(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 3.5
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("name", ["gated_deltanet", "kda", "mamba2", "rwkv7"])  # both cores, and the two other shells
def test_the_model_is_one_graph_to_the_compiler(name):
    made = model(name, num_hidden_layers=2 if name == "rwkv7" else 1)
    ids = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(3))
    expected = made(ids, use_cache=False).logits
    torch.compiler.reset()
    found = torch.compile(made, backend="eager", fullgraph=True)(ids, use_cache=False).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", RECURRENT)
def test_gradient_checkpointing_does_not_change_the_gradients(name):
    gradients = []
    ids = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(3))
    for checkpointing in (False, True):
        made = model(name).train()
        if checkpointing:
            made.gradient_checkpointing_enable()
        made(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in made.parameters()])
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y)


def test_channel_mixing_stands_in_blocks_with_a_recurrent_mixer_only():
    made = model("rwkv7", attn={"layers": [1], "num_heads": 4}, mlp="rwkv7")
    assert [isinstance(layer.mlp, ChannelMixing) for layer in made.model.layers] == [True, False, True]


def test_an_unknown_mixer_option_is_named():
    with pytest.raises(ValueError, match=r"mixer_options has unknown keys \['state'\]; Mamba2 knows \['hidden_size'"):
        model("mamba2", mixer_options={"state": 3})


def test_the_page_of_models_is_what_the_command_prints_and_sizes_are_those_of_the_paper():
    facts = all_facts()
    assert DOCS.read_text() == page(facts)
    for name, of_one in facts.items():
        if name != "mdn_tiny":
            expected, tolerance = (1.45e9, 0.02) if name.endswith("1.3B") else (0.415e9, 0.06)
            assert of_one.total_parameters == pytest.approx(expected, rel=tolerance), name


@pytest.mark.parametrize(("name", "fields"), [*((name, {}) for name in sorted(MIXERS)), ("rwkv7", RWKV7_BLOCKS)])
def test_a_half_precision_model_prefills_and_decodes_near_the_float32_one(name, fields):
    made = model(name, **fields)
    ids = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(2))
    expected = made(ids).logits
    half = made.to(torch.bfloat16)
    prefill = half(ids[:, :19], use_cache=True)
    last = half(ids[:, 19:], past_key_values=prefill.past_key_values, use_cache=True)
    found = torch.cat([prefill.logits, last.logits], 1)
    assert found.dtype == torch.bfloat16
    assert (found - expected).abs().max() <= 0.1 * expected.abs().max()


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_training_under_autocast_gives_finite_gradients_in_float32(name):
    made = model(name).train()
    ids = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", torch.bfloat16):
        loss = made(ids, labels=ids).loss
    loss.backward()
    for key, parameter in made.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert torch.isfinite(parameter.grad).all(), key
