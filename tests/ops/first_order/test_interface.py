"""The first-order rules' interface: FLA's signatures, options, special cases, backends, clear errors."""

import importlib
import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from first_order_cases import RULES, arguments, chunk, random_state, recurrent
from mdn.ops import SequenceBoundaries, first_order
from mdn.ops.first_order.rule import REFUSED
from mdn.ops.l2norm import l2norm


@pytest.mark.parametrize("rule", RULES)
def test_arguments_have_the_names_order_and_defaults_of_fla(rule):
    theirs = inspect.signature(
        inspect.unwrap(getattr(importlib.import_module(f"fla.ops.{rule}"), f"chunk_{rule}"))
    ).parameters
    ours = inspect.signature(chunk(rule)).parameters
    shared = [name for name in ours if name in theirs]
    assert shared == [name for name in theirs if name in ours]
    for name in shared:
        if name != "chunk_size":
            assert ours[name].default == theirs[name].default
    left_out = set(theirs) - set(ours) - {"kwargs"}
    tensors = arguments(rule, T=3)
    plain, _ = chunk(rule)(**tensors)
    for name in left_out - set(REFUSED):  # hints to its kernels
        assert torch.equal(chunk(rule)(**tensors, **{name: True})[0], plain)
    for name in left_out & set(REFUSED):
        with pytest.raises(ValueError, match=f"{name}=True is not supported"):
            chunk(rule)(**tensors, **{name: True})
    with pytest.raises(ValueError, match="unknown argument 'head_first'"):
        chunk(rule)(**tensors, head_first=True)
    assert {"scale", "initial_state", "output_final_state", "cu_seqlens"} <= set(shared)


@pytest.mark.parametrize("rule", RULES)
def test_the_definition_takes_the_arguments_of_the_chunk_form_in_their_order(rule):
    how = {"chunk_size", "backend", "check_gates", "context_parallel", "hints"}
    chunkwise = inspect.signature(chunk(rule)).parameters
    loop = inspect.signature(recurrent(rule)).parameters
    assert list(loop) == [name for name in chunkwise if name not in how]
    assert all(loop[name].default == chunkwise[name].default for name in loop)


@pytest.mark.parametrize("rule", RULES)
def test_a_named_backend_that_cannot_work_says_why(rule):
    tensors = arguments(rule, T=3, dtype=torch.float32)
    with pytest.raises(ValueError, match="backend='fla' cannot be used here: FLA's kernels need tensors on a GPU"):
        chunk(rule)(**tensors, backend="fla")
    with pytest.raises(ValueError, match=r"backend must be one of auto, torch, cpu, triton, fla, got 'cuda'"):
        chunk(rule)(**tensors, backend="cuda")
    with pytest.raises(ValueError, match="backend='cpu' cannot be used here: the native kernel takes float32"):
        chunk(rule)(**{name: x.double() for name, x in tensors.items()}, backend="cpu")


@pytest.mark.parametrize("backend", ["fla", "auto"])
@pytest.mark.parametrize("rule", RULES)
def test_on_a_gpu_the_kernels_of_fla_get_the_arguments_by_their_names(rule, backend, monkeypatch):
    """Without a GPU: its check is switched off, and a function that notes its call stands in for FLA's."""
    module = importlib.import_module(f"fla.ops.{rule}")
    signature, calls = inspect.signature(inspect.unwrap(getattr(module, f"chunk_{rule}"))), []

    def kernel(*args, **kwargs):
        calls.append(signature.bind(*args, **kwargs).arguments)
        return "output", "state"

    monkeypatch.setattr(module, f"chunk_{rule}", kernel)
    monkeypatch.setattr("mdn.ops.backends._why_not_fla", lambda device, dtype: None)
    tensors, boundaries = arguments(rule, B=1, T=9, HV=4), SequenceBoundaries.from_lengths([4, 5])
    state = random_state(rule, 2, HV=4)
    options = {"scale": 0.3, "initial_state": state, "output_final_state": True, "cu_seqlens": boundaries}
    if "cu_seqlens_cpu" in signature.parameters:
        options["cu_seqlens_cpu"] = boundaries.cu_seqlens
    assert chunk(rule)(**tensors, **options, backend=backend) == ("output", "state")
    chunk(rule)(**tensors, cu_seqlens=SequenceBoundaries.from_lengths([4, 5], "meta"), backend=backend)
    call, moved = calls
    assert moved["cu_seqlens"].tolist() == [0, 4, 9]
    assert call["scale"] == 0.3
    assert call["initial_state"] is state
    assert call["cu_seqlens"] is boundaries.cu_seqlens
    if "cu_seqlens_cpu" in signature.parameters:
        assert call["cu_seqlens_cpu"] is boundaries.cu_seqlens
    grouped_in_fla = rule in ("gated_delta_rule", "comba", "kda")
    for name, tensor in tensors.items():
        repeats = tensor.shape[2] < 4 and not grouped_in_fla
        assert torch.equal(call[name], tensor.repeat_interleave(2, 2) if repeats else tensor), name


def test_a_bound_of_gates_that_a_rule_does_not_have_is_refused():
    with pytest.raises(ValueError, match="unknown argument 'lower_bound'"):
        chunk("gated_delta_rule")(**arguments("gated_delta_rule", T=3), lower_bound=-5.0)


def test_importing_the_rules_brings_neither_fla_nor_triton_nor_transformers():
    code = "import sys, mdn.ops.first_order; print([m for m in ('fla', 'triton', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_norm_inside_equals_the_norm_outside():
    tensors = arguments("comba")
    inside, _ = chunk("comba")(**tensors, use_qk_l2norm_in_kernel=True)
    outside, _ = chunk("comba")(**tensors | {name: l2norm(tensors[name]) for name in ("q", "k", "p")})
    torch.testing.assert_close(inside, outside)


@pytest.mark.parametrize("form", [chunk, recurrent])
def test_raw_gates_become_decays_and_strengths(form):
    tensors = arguments("gated_delta_rule", gates="mild")
    raw, A_log, dt_bias = torch.randn(2, 70, 2).double(), torch.randn(2).double(), torch.randn(2).double()
    found, _ = form("gated_delta_rule")(
        **tensors | {"g": raw},
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
    )
    g, beta = -A_log.exp() * F.softplus(raw + dt_bias), 2 * tensors["beta"].sigmoid()
    expected, _ = chunk("gated_delta_rule")(**tensors | {"g": g, "beta": beta})
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", [chunk, recurrent])
def test_raw_vector_gates_may_be_bounded_from_below(form):
    tensors = arguments("kda", gates="mild")
    raw, A_log, dt_bias = torch.randn(2, 70, 2, 8).double(), torch.randn(2).double(), torch.randn(16).double()
    options = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": -5.0}
    found, _ = form("kda")(**tensors | {"g": raw}, **options)
    g = -5.0 * torch.sigmoid(A_log.exp()[:, None] * (raw + dt_bias.view(2, 8)))
    expected, _ = chunk("kda")(**tensors | {"g": g})
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", [chunk, recurrent])
@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_states_may_have_their_value_columns_first(form, rule):
    tensors, state = arguments(rule), random_state(rule, 2)
    options = {"output_final_state": True}
    o, final = form(rule)(**tensors, initial_state=state.mT, state_v_first=True, **options)
    expected, expected_final = form(rule)(**tensors, initial_state=state, **options)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(final.mT, expected_final)


def test_a_constant_decay_equals_the_same_decay_given_by_token():
    tensors = arguments("simple_gla")
    gamma = torch.tensor([-0.1, -3.0]).double()
    found, _ = chunk("simple_gla")(tensors["q"], tensors["k"], tensors["v"], g_gamma=gamma)
    expected, _ = chunk("simple_gla")(**tensors | {"g": gamma.expand(2, 70, 2)})
    torch.testing.assert_close(found, expected)


def test_equal_vector_decays_make_gla_scalar_and_kda_the_gated_delta_rule():
    scalar = arguments("gated_delta_rule")
    vector = scalar | {"g": scalar["g"].unsqueeze(-1).expand(2, 70, 2, 8)}
    torch.testing.assert_close(chunk("kda")(**vector)[0], chunk("gated_delta_rule")(**scalar)[0])
    for tensors in (scalar, vector):
        del tensors["beta"]
    torch.testing.assert_close(chunk("gla")(**vector)[0], chunk("simple_gla")(**scalar)[0])


BAD_INPUTS = {
    "v must have shape": lambda t: {"v": t["v"][:, :-1]},
    "k must have shape": lambda t: {"k": t["k"][..., :-1]},
    "v must have a multiple of the 2 heads": lambda t: {"v": t["v"][:, :, :1]},
    "g must have shape": lambda t: {"g": t["g"][..., :1]},
    r"g must be <= 0 \(the log of a gate in \[0, 1\]\), got": lambda t: {"g": -t["g"] + 1},
    "g must be <= 0 .* got NaN in 280 of 280 places": lambda t: {"g": t["g"] * torch.nan},
    "beta must have shape": lambda t: {"beta": t["beta"][:, :5]},
    "q must be a floating-point tensor": lambda t: {"q": t["q"].long(), "k": t["k"].long()},
    "initial_state must have shape": lambda t: {"initial_state": torch.zeros(1, 2, 8, 6)},
    "cu_seqlens needs a packed row, B == 1, got B = 2": lambda t: {"cu_seqlens": torch.tensor([0, 70])},
    "chunk_size must be a power of two, got 48": lambda t: {"chunk_size": 48},
    "allow_neg_eigval=True needs": lambda t: {"allow_neg_eigval": True},
}


@pytest.mark.parametrize("message", BAD_INPUTS)
def test_bad_input_raises_an_error_that_names_the_argument(message):
    tensors = arguments("gated_delta_rule", gates="mild")
    with pytest.raises(ValueError, match=message):
        chunk("gated_delta_rule")(**tensors | BAD_INPUTS[message](tensors))


def test_boundaries_that_do_not_cover_the_pack_are_refused():
    tensors = arguments("kda", B=1, T=10)
    with pytest.raises(ValueError, match="cu_seqlens must cover all 10 tokens"):
        chunk("kda")(**tensors, cu_seqlens=torch.tensor([0, 4, 9]))


def test_a_step_refuses_a_state_of_the_wrong_shape():
    tensors = {name: x[:, 0] for name, x in arguments("gla", T=1).items()}
    with pytest.raises(ValueError, match="state must have shape"):
        first_order.gla_step(**tensors, state=random_state("gla", 3))


def test_two_kinds_of_decay_at_once_are_refused():
    tensors = arguments("simple_gla", T=3)
    with pytest.raises(ValueError, match="g and g_gamma must not be given together"):
        chunk("simple_gla")(**tensors, g_gamma=torch.zeros(2))
