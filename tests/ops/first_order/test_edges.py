"""The edges of the first-order rules: bad arguments, non-finite numbers, meta tensors, autocast, derivatives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

from first_order_cases import RULES, VECTOR, arguments, chunk, random_state, recurrent, step
from mdn.layers import LinearAttention, TokenLayout
from mdn.ops import SequenceBoundaries
from mdn.vllm.states import DecodeState

SCALAR = [rule for rule in RULES if rule not in VECTOR]
BACKENDS = [(rule, "torch") for rule in RULES] + [(rule, "cpu") for rule in SCALAR]
ON_EVERY_BACKEND = pytest.mark.parametrize(("rule", "backend"), BACKENDS)


def token(rule: str, **sizes: Any) -> dict[str, Tensor]:
    """One token of two rows, float32."""
    return {name: x[:, 0] for name, x in arguments(rule, T=1, dtype=torch.float32, **sizes).items()}


def slots(count: int) -> Tensor:
    return torch.zeros(count, 2, 8, 6)


@ON_EVERY_BACKEND
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chunk_size": -5}, "chunk_size must be a power of two, got -5"),
        ({"chunk_size": 0}, "chunk_size must be a power of two, got 0"),
        ({"chunk_size": 48}, "chunk_size must be a power of two, got 48"),
        ({"chunk_size": 16.0}, "chunk_size must be a power of two, got 16.0"),
        ({"scale": float("nan")}, "scale must be a finite number"),
        (
            {"initial_state": torch.zeros(2, 2, 8, 6, dtype=torch.int64)},
            "initial_state must be a floating-point tensor",
        ),
        (
            {"initial_state": torch.zeros(3, 2, 8, 6)},
            r"initial_state must have shape \[N, HV, K, V\] = \[2, 2, 8, [67]\], got \[3, 2, 8,",
        ),
        ({"k": None}, "k must be a torch.Tensor, got NoneType"),
        ({"v": "v"}, "v must be a torch.Tensor, got str"),
    ],
)
def test_bad_arguments_of_a_chunkwise_form_are_named(rule: str, backend: str, wrong: dict[str, Any], message: str):
    tensors = arguments(rule, T=5, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        chunk(rule)(**tensors | wrong, backend=backend)


@pytest.mark.parametrize("form", [chunk, recurrent])
@pytest.mark.parametrize("rule", RULES)
def test_boundaries_of_the_wrong_kind_or_for_a_batch_are_named(rule: str, form: Any):
    for given in ([0, 5], 5):
        with pytest.raises(ValueError, match=r"cu_seqlens must be a tensor or SequenceBoundaries, got (list|int)"):
            form(rule)(**arguments(rule, B=1, T=5), cu_seqlens=given)
    with pytest.raises(ValueError, match="cu_seqlens needs a packed row, B == 1, got B = 2"):
        form(rule)(**arguments(rule, B=2, T=5), cu_seqlens=torch.tensor([0, 5]))


@pytest.mark.parametrize("form", [chunk, recurrent, step])
@pytest.mark.parametrize("rule", RULES)
def test_every_tensor_that_is_none_is_named(rule: str, form: Any):
    tensors, state = (token(rule), {"state": slots(2)}) if form is step else (arguments(rule, T=5), {})
    for name in tensors:
        for given in ([1.0], 1, "x"):
            with pytest.raises(ValueError, match=f"^{name} must be a torch.Tensor, got (list|int|str)"):
                form(rule)(**tensors | {name: given}, **state)


@pytest.mark.parametrize("form", [chunk, recurrent])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"g_gamma": -0.1}, "g_gamma must be a torch.Tensor, got float"),
        ({"g_gamma": torch.tensor([-1])}, "g_gamma must be a floating-point tensor, got torch.int64"),
        ({"g_gamma": -torch.ones(3)}, r"g_gamma must have shape \[2\], got \[3\]"),
        ({"g_gamma": -torch.ones(2), "v": 1}, "v must be a torch.Tensor, got int"),
    ],
)
def test_constant_decays_of_the_wrong_kind_are_named(form: Any, given: dict[str, Any], message: str):
    tensors = arguments("simple_gla", T=5)
    del tensors["g"]
    with pytest.raises(ValueError, match=message):
        form("simple_gla")(**tensors | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"state": None}, "state must be a torch.Tensor, got NoneType"),
        ({"v": 1}, "v must be a torch.Tensor, got int"),
        ({"v": torch.ones(2, 2, 6).long()}, "v must be a floating-point tensor, got torch.int64"),
        ({"z_state": 1}, r"z_state must be torch.float32 \[2, 2, 8\], as the state without V, got int"),
    ],
)
def test_a_normalised_step_names_what_is_wrong(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        step("linear_attn")(**token("linear_attn") | {"state": slots(2), "z_state": torch.zeros(2, 2, 8)} | given)


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"g": [1.0]}, "g must be a torch.Tensor, got list"),
        ({"beta": 1}, "beta must be a torch.Tensor, got int"),
        ({"A_log": 0.5}, "A_log must be a torch.Tensor, got float"),
        ({"A_log": torch.zeros(3)}, r"A_log must have 2 entries, \[2\], got shape \[3\]"),
        ({"dt_bias": [0.0]}, "dt_bias must be a torch.Tensor, got list"),
        ({"dt_bias": torch.zeros(3)}, r"dt_bias must have (2|16) entries, .*, got shape \[3\]"),
    ],
)
def test_raw_gates_and_their_parameters_are_named(rule: str, given: dict[str, Any], message: str):
    made = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(16 if rule == "kda" else 2)}
    options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    with pytest.raises(ValueError, match=message):
        chunk(rule)(**arguments(rule, T=5) | made | given, **options)


@pytest.mark.parametrize("form", [chunk, recurrent])
@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_a_missing_raw_gate_is_named(rule: str, form: Any):
    with pytest.raises(
        ValueError, match=r"^g must be a (raw gate with use_gate_in_kernel=True|torch.Tensor), got None"
    ):
        form(rule)(**arguments(rule, T=5) | {"g": None}, use_gate_in_kernel=True, A_log=torch.zeros(2))


def test_kda_names_a_wrong_bound():
    tensors, options = arguments("kda", T=5), {"use_gate_in_kernel": True, "A_log": torch.zeros(2)}
    for bound in ("low", 1.0, float("-inf")):
        with pytest.raises(ValueError, match="lower_bound must be a finite number <= 0 or None, got"):
            chunk("kda")(**tensors, **options, lower_bound=bound)


@ON_EVERY_BACKEND
def test_the_heads_of_an_initial_state_are_checked_before_anything_is_computed(rule: str, backend: str):
    with pytest.raises(ValueError, match=r"initial_state must .*, got \[2, 5, 8, 6\]|got \[2, 5, 8, 7\]"):
        chunk(rule)(**arguments(rule, T=5, dtype=torch.float32), initial_state=torch.zeros(2, 5, 8, 6), backend=backend)


@ON_EVERY_BACKEND
def test_heads_without_dimensions_are_refused(rule: str, backend: str):
    tensors = arguments(rule, T=5, dtype=torch.float32, K=0)
    with pytest.raises(ValueError, match="head dimensions must be positive, got K = 0"):
        chunk(rule)(**tensors, backend=backend)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_size_that_is_not_finite_is_refused(backend: str, value: float):
    tensors = arguments("delta_rule", T=5, dtype=torch.float32)
    tensors["beta"][1, 2, 0] = value
    with pytest.raises(ValueError, match="beta must be finite"):
        chunk("delta_rule")(**tensors, backend=backend)


@ON_EVERY_BACKEND
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"state_indices": torch.tensor([1, 1])}, "state_indices must be distinct"),
        ({"state_indices": torch.tensor([0.9, 1.0])}, "state_indices must be an int64 or int32 tensor"),
        ({"state_indices": torch.tensor([True, False])}, "state_indices must be an int64 or int32 tensor"),
        ({"state_indices": torch.tensor([0, 5])}, r"state_indices must lie in 0\.\.4, got 5"),
        ({"state_indices": torch.tensor([-1, 0])}, r"state_indices must lie in 0\.\.4, got -1"),
        ({"state_indices": torch.tensor([0, 1, 2])}, r"state_indices must have shape \[2\], got \[3\]"),
        ({"state_indices": None}, r"state must have shape .* = \[2, 2, 8, 6\], got \[5, 2, 8, 6\]"),
        ({"state": slots(5).double()}, "state must be torch.float32 to be updated in place, got torch.float64"),
        ({"state": slots(5).long()}, "state must be torch.float32 to be updated in place, got torch.int64"),
        ({"state": slots(5)[:, :, :7]}, r"state must have shape .* got \[5, 2, 7, 6\]"),
        ({"state": slots(1).expand(5, 2, 8, 6)}, "state must not overlap itself"),
        ({"state": None}, "state must be a torch.Tensor, got NoneType"),
        ({"scale": float("inf")}, "scale must be a finite number"),
        ({"scale": [1.0]}, r"scale must be a finite number or None, got \[1.0\]"),
    ],
)
def test_a_step_refuses_states_and_slots_that_it_cannot_update(
    rule: str, backend: str, wrong: dict[str, Any], message: str
):
    given = {"state": slots(5), "state_indices": torch.tensor([3, 1])} | wrong
    with pytest.raises(ValueError, match=message):
        step(rule)(**token(rule), **given, backend=backend)


@pytest.mark.parametrize(
    ("rule", "backend"), [case for case in BACKENDS if case[0] not in ("linear_attn", "delta_rule")]
)
def test_a_step_refuses_decays_above_one(rule: str, backend: str):
    tensors, name = token(rule, gates="mild"), "w" if rule == "rwkv7" else "g"
    state = slots(2)
    with pytest.raises(ValueError, match=f"{name} must be <= 0"):
        step(rule)(**tensors | {name: -tensors[name]}, state=state, backend=backend)
    assert not state.any()
    step(rule)(**tensors | {name: -tensors[name]}, state=state, backend=backend, check_gates=False)


@ON_EVERY_BACKEND
def test_gates_of_a_chunkwise_form_are_not_looked_at_when_the_caller_says_so(rule: str, backend: str):
    tensors = arguments(rule, T=5, gates="mild", dtype=torch.float32)
    name = next((name for name in ("g", "w") if name in tensors), None)
    plain = chunk(rule)(**tensors, backend=backend)[0]
    assert torch.equal(chunk(rule)(**tensors, backend=backend, check_gates=False)[0], plain)
    if name is not None:
        growing = tensors | {name: -0.1 * tensors[name]}
        with pytest.raises(ValueError, match=f"{name} must be <= 0"):
            chunk(rule)(**growing, backend=backend)
        chunk(rule)(**growing, backend=backend, check_gates=False)


@pytest.mark.native
@pytest.mark.parametrize("rule", RULES)
def test_a_step_runs_on_the_backend_that_was_requested(rule: str, monkeypatch: pytest.MonkeyPatch):
    def kernel(*arguments: Any, **options: Any) -> Tensor:
        raise RuntimeError("the native kernel was called")

    monkeypatch.setattr("mdn.ops.cpu.prepared_first_order_step", kernel)
    monkeypatch.setattr("mdn.ops.cpu.vector_decay.step_", kernel)
    step(rule)(**token(rule), state=slots(2), backend="torch")
    with pytest.raises(ValueError, match=r"backend='fla' cannot be used here: .* not for decode steps"):
        step(rule)(**token(rule), state=slots(2), backend="fla")
    with pytest.raises(ValueError, match="triton"):
        step(rule)(**token(rule), state=slots(2), backend="triton")
    with pytest.raises(RuntimeError, match="the native kernel was called"):
        step(rule)(**token(rule, V=5), state=torch.zeros(2, 2, 8, 5), backend="cpu")


@pytest.mark.native
@pytest.mark.parametrize("rule", RULES)
def test_a_transposed_state_is_updated_by_torch_and_refused_for_the_kernel(rule: str):
    tensors, plain, transposed = token(rule), slots(2), torch.zeros(2, 2, 6, 8).mT
    expected = step(rule)(**tensors, state=plain)
    with pytest.raises(ValueError, match="backend='cpu' needs a state that is contiguous in its last dimension, got"):
        step(rule)(**tensors, state=transposed, backend="cpu")
    torch.testing.assert_close(step(rule)(**tensors, state=transposed), expected)
    torch.testing.assert_close(transposed, plain)


@pytest.mark.native
@pytest.mark.parametrize("rule", RULES)
def test_slots_that_a_tensor_subclass_names_are_those_that_change(rule: str):
    tensors, indices = token(rule), torch.tensor([5, 3])
    plain, found = slots(7), slots(7)
    expected = step(rule)(**tensors, state=plain, state_indices=indices)
    o = step(rule)(**tensors, state=found, state_indices=TwoTensor(indices, indices.clone()))
    torch.testing.assert_close(o.a if isinstance(o, TwoTensor) else o, expected)
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("column", [0, 3, 5])
def test_a_normaliser_inside_the_state_is_refused_before_the_state_changes(column: int, backend: str):
    state = slots(2)
    message = "state and z_state must be different memory to be updated in place, but they share some"
    with pytest.raises(ValueError, match=message):
        step("linear_attn")(**token("linear_attn"), state=state, z_state=state[..., column], backend=backend)
    inside = state.view(-1)[8:40].view(2, 2, 8)
    with pytest.raises(ValueError, match="but they might share some"):
        step("linear_attn")(**token("linear_attn"), state=state, z_state=inside, backend=backend)
    assert not state.any()


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_normaliser_may_lie_beside_the_state_as_the_chunkwise_form_returns_it(backend: str):
    tensors = arguments("linear_attn", T=6, dtype=torch.float32)
    whole, _ = chunk("linear_attn")(**tensors)
    prompt = {name: x[:, :5] for name, x in tensors.items()}
    _, (state, z) = chunk("linear_attn")(**prompt, output_final_state=True, backend=backend)
    assert state.untyped_storage().data_ptr() == z.untyped_storage().data_ptr()
    last = {name: x[:, 5] for name, x in tensors.items()}
    o = step("linear_attn")(**last, state=state, z_state=z[:, 0], backend=backend)
    torch.testing.assert_close(o, whole[:, 5], rtol=1e-4, atol=1e-5)


def in_pages(*states: Tensor, before: int, behind: int) -> tuple[Tensor, ...]:
    """The same numbers as views of one tensor of pages, in which the states follow each other and something else lies
    ``before`` and ``behind`` them: how vLLM keeps them."""
    pages, sizes = len(states[0]), [state[0].numel() for state in states]
    memory = torch.full((pages, before + sum(sizes) + behind), float("nan"))
    parts = memory[:, before : before + sum(sizes)].split(sizes, dim=1)
    views = tuple(part.unflatten(1, state.shape[1:]) for part, state in zip(parts, states))
    for view, state in zip(views, states):
        view.copy_(state)
    return views


PAGES = pytest.mark.parametrize(("before", "behind"), [(0, 0), (6, 0), (0, 10), (40, 3)])


@PAGES
@pytest.mark.parametrize("turned", [False, True], ids=["S first", "z first"])
@pytest.mark.parametrize("indices", [None, [3, 1]], ids=["all pages", "slots"])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_state_and_its_normaliser_may_share_pages(backend, indices, turned, before, behind):
    tensors, count = token("linear_attn"), 2 if indices is None else 5
    expected_S, expected_z = random_state("linear_attn", count, dtype=torch.float32)
    expected_z = expected_z[:, 0]
    given = {"state_indices": None if indices is None else torch.tensor(indices), "backend": backend}
    if turned:
        z, S = in_pages(expected_z, expected_S, before=before, behind=behind)
    else:
        S, z = in_pages(expected_S, expected_z, before=before, behind=behind)
    expected = step("linear_attn")(**tensors, state=expected_S, z_state=expected_z, **given)
    o = step("linear_attn")(**tensors, state=S, z_state=z, **given)
    for found, right in ((o, expected), (S, expected_S), (z, expected_z)):
        torch.testing.assert_close(found, right)
    inside = z.as_strided(z.shape, z.stride(), z.storage_offset() + (1 if turned else -1))
    with pytest.raises(ValueError, match="state and z_state must be different memory"):
        step("linear_attn")(**tensors, state=S, z_state=inside, **given)


@PAGES
@torch.no_grad()
def test_the_layer_decodes_on_pages_that_hold_both_states(before: int, behind: int):
    torch.manual_seed(0)
    layer = LinearAttention(hidden_size=32, num_heads=2, do_feature_map_norm=True)
    states = torch.randn(5, 2, 16, 16), torch.rand(5, 2, 16)
    tokens, used = torch.randn(2, 1, 32), torch.tensor([4, 1])
    outputs = [
        layer.mix(tokens, TokenLayout((2, 1)), DecodeState(pages, 0, used))
        for pages in (states, in_pages(*states, before=before, behind=behind))
    ]
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize(
    ("z_state", "message"),
    [
        (torch.zeros(1, 1, 8).expand(2, 2, 8), "z_state must not overlap itself to be updated in place"),
        (torch.zeros(2, 2, 8, device="meta"), "z_state must be on the device of the state, cpu, got meta"),
    ],
)
def test_a_normaliser_that_cannot_be_updated_is_refused_before_the_state_changes(z_state: Tensor, message: str):
    state = slots(2)
    with pytest.raises(ValueError, match=message):
        step("linear_attn")(**token("linear_attn"), state=state, z_state=z_state)
    assert not state.any()


@pytest.mark.native
@pytest.mark.parametrize("rule", RULES)
def test_steps_on_both_backends_agree_for_slots_in_a_strided_state(rule: str):
    tensors, indices = token(rule), torch.tensor([4, 0], dtype=torch.int32)
    pool = torch.randn(2, 5, 8, 6, generator=torch.Generator().manual_seed(1)).transpose(0, 1)
    found = {}
    for backend in ("torch", "cpu"):
        state = torch.empty_strided(pool.shape, pool.stride()).copy_(pool)
        o = step(rule)(**tensors, state=state, state_indices=indices, backend=backend)
        found[backend] = o, state
    for x, y in zip(found["torch"], found["cpu"], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.native
def test_p_may_have_the_heads_of_v_on_every_backend():
    tensors = arguments("comba", T=9, H=2, HV=4, dtype=torch.float32)
    wide = tensors | {"p": tensors["p"].repeat_interleave(2, 2)}
    for backend in ("torch", "cpu"):
        whole, expected = (chunk("comba")(**given, backend=backend).o for given in (wide, tensors))
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
        token, state = {name: x[:, 0] for name, x in wide.items()}, torch.zeros(2, 4, 8, 6)
        torch.testing.assert_close(step("comba")(**token, state=state, backend=backend), expected[:, 0])


@pytest.mark.parametrize("lengths", [None, [5, 0, 40, 25]])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("rule", "backend", "damaged"),
    [(*case, name) for case in BACKENDS for name in ("k", "v")]
    + [("comba", "torch", "p"), ("comba", "cpu", "p"), ("rwkv7", "torch", "a"), ("rwkv7", "torch", "b")],
)
def test_a_number_that_is_not_finite_does_no_harm_to_earlier_tokens(
    rule: str, backend: str, damaged: str, value: float, lengths: list[int] | None
):
    boundaries = None if lengths is None else SequenceBoundaries.from_lengths(lengths)
    tensors = arguments(rule, B=2 if lengths is None else 1, T=70, H=2, HV=4, dtype=torch.float32)
    tensors[damaged][0, 33, 1, 2] = value
    options = {"output_final_state": True, "cu_seqlens": boundaries}
    if rule == "linear_attn":
        options["normalize"] = False
    found, state = chunk(rule)(**tensors, **options, backend=backend)
    expected, expected_state = recurrent(rule)(**tensors, **options)
    unharmed = expected.isfinite()
    assert not unharmed.all()
    assert torch.equal(found.isfinite(), unharmed)
    torch.testing.assert_close(found[unharmed], expected[unharmed], rtol=1e-4, atol=1e-4)
    read, expected_read = state.sum(2).isfinite(), expected_state.sum(2).isfinite()  # as any query sees it
    assert torch.equal(read, expected_read)


def test_earlier_tokens_keep_their_gradients_when_a_later_one_is_not_finite():
    tensors = arguments("gated_delta_rule", T=40)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    clean = torch.autograd.grad(chunk("gated_delta_rule")(**leaves).o[:, :20].sum(), list(leaves.values()))
    damaged = dict(leaves)
    damaged["v"] = leaves["v"].detach().clone().index_fill_(1, torch.tensor([30]), float("nan")).requires_grad_()
    found = torch.autograd.grad(chunk("gated_delta_rule")(**damaged).o[:, :20].sum(), list(damaged.values()))
    for x, y in zip(found, clean, strict=True):
        torch.testing.assert_close(x[:, :20], y[:, :20])


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("rule", ["simple_gla", "gated_delta_rule", "kda", "rwkv7"])
def test_derivatives_that_a_chunkwise_form_does_not_have_raise_and_name_the_way_out(rule: str, backend: str):
    tensors = arguments(rule, T=5, dtype=torch.float32)
    v = tensors.pop("v")

    def compute(v: Tensor) -> Tensor:
        return chunk(rule)(**tensors, v=v, backend=backend).o

    with pytest.raises(NotImplementedError, match=f"does not support torch.func transforms; recurrent_{rule} does"):
        torch.func.jvp(compute, (v,), (v,))
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=f"forward-mode derivatives; recurrent_{rule} does"),
    ):
        compute(forward_ad.make_dual(v, v))
    o, tangent = torch.func.jvp(lambda v: recurrent(rule)(**tensors, v=v).o, (v,), (v,))
    torch.testing.assert_close(tangent, o)  # all rules are linear in v


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("rule", RULES)
def test_a_second_derivative_is_right_or_refused(rule: str, backend: str):
    """With respect to every pair of inputs, through `autograd.grad`, which stops where a gradient has no edges."""
    tensors = arguments(rule, B=1, T=4, H=1, HV=1, K=3, V=2, gates="mild", dtype=torch.float32)

    def second(form: Any, first: str, then: str, **options: Any) -> Tensor:
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        loss = form(rule)(**leaves, **options)[0].square().sum()
        (gradient,) = torch.autograd.grad(loss, leaves[first], create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), leaves[then], allow_unused=True, materialize_grads=True)[0]

    refusals = []
    for pair in itertools.product(tensors, repeat=2):
        try:
            found = second(chunk, *pair, backend=backend)
        except NotImplementedError as error:
            refusals.append(str(error))
        else:
            torch.testing.assert_close(found, second(recurrent, *pair), rtol=1e-3, atol=1e-4)
    assert refusals
    assert all("no second derivative; use the rule's recurrent_* function" in message for message in refusals)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_a_graph_of_gradients_can_be_made_under_activation_checkpointing(rule: str, backend: str):
    tensors = {name: x.requires_grad_() for name, x in arguments(rule, T=5, dtype=torch.float32).items()}

    def compute(k: Tensor) -> Tensor:
        return chunk(rule)(**tensors | {"k": k}, backend=backend).o

    (expected,) = torch.autograd.grad(compute(tensors["k"]).square().sum(), tensors["k"])
    o = torch.utils.checkpoint.checkpoint(compute, tensors["k"], use_reentrant=False)
    (found,) = torch.autograd.grad(o.square().sum(), tensors["k"], create_graph=True)
    assert torch.equal(found, expected)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        found.sum().backward()


@pytest.mark.parametrize("rule", RULES)
def test_the_definition_can_be_mapped_over_every_input(rule: str):
    """As the chunkwise form says where it is mapped."""
    tensors, state = arguments(rule, T=5, dtype=torch.float32), random_state(rule, 2, dtype=torch.float32)
    given = tensors | {"initial_state": state}
    scales = torch.tensor([1.0, 0.5])

    def compute(scale: Tensor) -> Tensor:
        scaled = {name: scale * x for name, x in tensors.items()}
        states = tuple(scale * x for x in state) if isinstance(state, tuple) else scale * state
        return recurrent(rule)(**scaled, initial_state=states).o

    with pytest.raises(NotImplementedError, match=f"torch.func transforms; recurrent_{rule} does"):
        torch.func.vmap(lambda v: chunk(rule)(**given | {"v": v}).o)(tensors["v"].expand(2, *tensors["v"].shape))
    expected = torch.stack([compute(scale) for scale in scales])
    torch.testing.assert_close(torch.func.vmap(compute)(scales), expected)


@pytest.mark.parametrize("rule", RULES)
def test_meta_tensors_have_shapes_in_every_form(rule: str):
    tensors = {name: x.to("meta") for name, x in arguments(rule, T=5, dtype=torch.float32).items()}
    for form in (chunk, recurrent):
        o, state = form(rule)(**tensors, output_final_state=True)
        assert o.shape == (2, 5, 2, 6)
        assert o.is_meta
        assert (state[0] if isinstance(state, tuple) else state).shape == (2, 2, 8, 6)
    one = {name: x[:, 0] for name, x in tensors.items()}
    assert step(rule)(**one, state=slots(2).to("meta")).shape == (2, 2, 6)


@ON_EVERY_BACKEND
def test_a_batch_without_rows_is_computed_in_every_form(rule: str, backend: str):
    tensors = {name: x[:0] for name, x in arguments(rule, T=5, dtype=torch.float32).items()}
    for form, options in ((chunk, {"backend": backend}), (recurrent, {})):
        o, state = form(rule)(**tensors, output_final_state=True, **options)
        assert o.shape == (0, 5, 2, 6)
        assert (state[0] if isinstance(state, tuple) else state).shape == (0, 2, 8, 6)
        packed = {name: x[:, :0] for name, x in arguments(rule, B=1, T=5, dtype=torch.float32).items()}
        nothing = SequenceBoundaries.from_attention_mask(torch.ones(0, 5))
        assert form(rule)(**packed, cu_seqlens=nothing, **options).o.shape == (1, 0, 2, 6)
    one, none = {name: x[:, 0] for name, x in tensors.items()}, torch.empty(0, dtype=torch.long)
    assert step(rule)(**one, state=slots(0), backend=backend).shape == (0, 2, 6)
    assert step(rule)(**one, state=slots(3), state_indices=none, backend=backend).shape == (0, 2, 6)


@ON_EVERY_BACKEND
def test_autocast_does_not_change_a_step(rule: str, backend: str):
    states = [random_state(rule, 2, dtype=torch.float32) for _ in range(2)]
    states = [state[0] if isinstance(state, tuple) else state for state in states]
    plain = step(rule)(**token(rule), state=states[0], backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        inside = step(rule)(**token(rule), state=states[1], backend=backend)
    assert torch.equal(plain, inside)
    assert torch.equal(*states)


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_values_in_float32_keep_their_precision_beside_keys_in_bfloat16(backend: str):
    tensors = arguments("simple_gla", dtype=torch.float32)
    mixed = tensors | {"q": tensors["q"].bfloat16(), "k": tensors["k"].bfloat16()}
    exact, _ = recurrent("simple_gla")(**{name: x.double() for name, x in mixed.items()})
    found, _ = chunk("simple_gla")(**mixed, backend=backend)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_gates_and_states_in_float64_are_taken_beside_float32_inputs():
    tensors = arguments("gated_delta_rule", dtype=torch.float32)
    wide = tensors | {"g": tensors["g"].double(), "initial_state": random_state("gated_delta_rule", 2)}
    found, _ = chunk("gated_delta_rule")(**wide)
    plain, _ = chunk("gated_delta_rule")(**tensors, initial_state=wide["initial_state"].float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, plain)
