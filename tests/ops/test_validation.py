"""Bad input: every error is a ValueError that names the argument, what was given and what is expected."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch

from definition import Tensors, make_inputs
from mdn.ops import (
    blockwise_momentum_delta_rule,
    chunk_momentum_delta_rule,
    fused_recurrent_momentum_delta_rule,
    gated_delta_rule_step,
    momentum_delta_step,
    recurrent_momentum_delta_rule,
)
from mdn.ops.shared_checks import _shared_elements, may_overlap

FORMS = (
    chunk_momentum_delta_rule,
    fused_recurrent_momentum_delta_rule,
    recurrent_momentum_delta_rule,
    blockwise_momentum_delta_rule,
)
GATES = ("log_alpha", "log_mu", "beta", "eta", "direct")


def message_of(function, **arguments) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller reads the message
        function(**arguments)
    return str(caught.value)


def bad(changes: dict, form=chunk_momentum_delta_rule, B: int = 2) -> str:
    """The message for inputs [B, 4, 2, 16], values [B, 4, 2, 24] with some arguments replaced."""
    return message_of(form, **(make_inputs("general", B=B, T=4) | changes))


def spoiled(name: str, value: float) -> dict:
    gate = make_inputs("general", T=4)[name]
    gate[1, 2, 0] = value
    return {name: gate}


SHAPES = {
    "q of rank 3": ({"q": torch.ones(2, 4, 16)}, "q must have shape [B, T, H, D], got [2, 4, 16]"),
    "k of another length": (
        {"k": torch.ones(2, 3, 2, 16)},
        "k must have the shape of q, [2, 4, 2, 16], got [2, 3, 2, 16]",
    ),
    "p of another width": (
        {"p": torch.ones(2, 4, 2, 8)},
        "p must have the shape of k, [2, 4, 2, 16], got [2, 4, 2, 8]",
    ),
    "v of another batch": ({"v": torch.ones(1, 4, 2, 24)}, "v must begin with [2, 4] as q does, got [1, 4, 2, 24]"),
    "v heads no multiple": (
        {"v": torch.ones(2, 4, 3, 24)},
        "v must have a multiple of the 2 heads of q and k, got 3 heads",
    ),
    "empty values": ({"v": torch.ones(2, 4, 2, 0)}, "head dimensions must be positive, got 16 for q, k and 0 for v"),
    "gate per key dim": (
        {"log_mu": -torch.ones(2, 4, 2, 16)},
        "log_mu must have shape [2, 4, 2], one per value head, got [2, 4, 2, 16]",
    ),
    "state without M": (
        {"initial_state": torch.ones(2, 2, 16, 24)},
        "initial_state must have shape [2, N, HV, K, V] = [2, 2, 2, 16, 24], got [2, 2, 16, 24]",
    ),
    "state for too few": (
        {"initial_state": torch.ones(2, 1, 2, 16, 24)},
        "initial_state must have shape [2, N, HV, K, V] = [2, 2, 2, 16, 24], got [2, 1, 2, 16, 24]",
    ),
}


@pytest.mark.parametrize(("changes", "expected"), SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("form", FORMS)
def test_wrong_shapes_are_refused(form, changes: dict, expected: str) -> None:
    assert bad(changes, form) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["q", "k", "v", *GATES])
def test_wrong_dtypes_are_refused(form, name: str) -> None:
    integers = make_inputs("general", T=4)[name].int()
    expected = f"{name} must be float64, float32, bfloat16 or float16, got torch.int32"
    assert bad({name: integers}, form) == expected


@pytest.mark.parametrize("name", ["k", "v", "p"])
def test_vectors_share_the_dtype_of_q(name: str) -> None:
    half = make_inputs(T=4, with_p=True)[name].half()
    assert bad({name: half}) == f"{name} must have the dtype of q, torch.float32, got torch.float16"


@pytest.mark.parametrize("name", ["k", "v", *GATES, "initial_state"])
def test_tensors_on_different_devices_are_refused(name: str) -> None:
    elsewhere = make_inputs("general", T=4)[name].to("meta")
    assert bad({name: elsewhere}) == f"{name} must be on the device of q, cpu, got meta"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["q", "k", "v", "p", *GATES])
def test_things_that_are_not_tensors(form, name: str) -> None:
    assert bad({name: [1.0]}, form) == f"{name} must be a torch.Tensor, got list"
    assert bad({name: 1}, form) == f"{name} must be a torch.Tensor, got int"


def test_a_state_that_is_no_tensor_or_no_float() -> None:
    state = make_inputs(T=4)["initial_state"]
    assert "initial_state must be a tensor [2, slots, HV, K, V] or the pair (S, M), got str" in bad(
        {"initial_state": "state"}
    )
    assert bad({"initial_state": torch.tensor(1.0)}).endswith("= [2, 2, 2, 16, 24], got []")
    expected = "initial_state must be a floating-point tensor, got torch.int64"
    assert bad({"initial_state": state.long()}) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["log_alpha", "log_mu"])
@pytest.mark.parametrize(
    ("value", "shown"), [(0.25, "0.25"), (float("inf"), "inf"), (float("nan"), "NaN in 1 of 16 places")]
)
def test_logs_above_zero_and_nan_are_refused(form, name: str, value: float, shown: str) -> None:
    expected = f"{name} must be <= 0 (the log of a gate in [0, 1]), got {shown}"
    assert bad(spoiled(name, value), form) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["beta", "eta", "direct"])
@pytest.mark.parametrize(
    ("value", "shown"), [(-0.5, "-0.5"), (float("inf"), "inf"), (float("nan"), "NaN in 1 of 16 places")]
)
def test_factors_below_zero_infinite_and_nan(form, name: str, value: float, shown: str) -> None:
    assert bad(spoiled(name, value), form) == f"{name} must be finite and >= 0, got {shown}"


def test_gates_are_not_looked_at_when_the_caller_says_so() -> None:
    inputs = make_inputs(T=4) | spoiled("beta", -0.5)
    o, _ = chunk_momentum_delta_rule(**inputs, check_gates=False)
    assert o.isfinite().all()


PACKS = {
    "unsorted": ([0, 3, 2, 4], "cu_seqlens must be sorted, but entry 2 is 2 after 3"),
    "short": ([0, 2, 3], "cu_seqlens must cover all 4 tokens of the packed row, but it ends at 3"),
    "long": ([0, 2, 5], "cu_seqlens must cover all 4 tokens of the packed row, but it ends at 5"),
    "late start": ([1, 4], "cu_seqlens must start at 0, got 1"),
    "one number": ([4], "cu_seqlens must have shape [N + 1] with N >= 1, got [1]"),
    "two dimensions": ([[0, 4]], "cu_seqlens must have shape [N + 1] with N >= 1, got [1, 2]"),
    "not whole": ([0.0, 4.0], "cu_seqlens must be int32 or int64, got torch.float32"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("offsets", "expected"), PACKS.values(), ids=PACKS.keys())
def test_wrong_boundaries_are_refused(form, offsets: list, expected: str) -> None:
    assert bad({"cu_seqlens": torch.tensor(offsets)}, form, B=1) == expected


@pytest.mark.parametrize("form", FORMS)
def test_boundaries_of_the_wrong_kind_or_for_a_batch(form) -> None:
    assert bad({"cu_seqlens": [0, 4]}, form, B=1) == "cu_seqlens must be a tensor or SequenceBoundaries, got list"
    assert bad({"cu_seqlens": torch.tensor([0, 4])}, form) == "cu_seqlens needs a packed row, B == 1, got B = 2"


@pytest.mark.parametrize("chunk_size", [0, -1, 257, 16.0, True, "64"])
def test_wrong_chunk_sizes_are_refused(chunk_size) -> None:
    assert bad({"chunk_size": chunk_size}) == f"chunk_size must be an integer from 1 to 256, got {chunk_size!r}"


@pytest.mark.parametrize("block_size", [0, -3, 2.0, True])
def test_wrong_block_sizes_are_refused(block_size) -> None:
    expected = f"block_size must be a positive integer, got {block_size!r}"
    assert bad({"block_size": block_size}, blockwise_momentum_delta_rule) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", ["half", float("nan")])
def test_wrong_scales_are_refused(form, scale) -> None:
    assert re.search(rf"scale must be .*, got {re.escape(repr(scale))}", bad({"scale": scale}, form))


@pytest.mark.parametrize("form", [form for form in FORMS if form is not blockwise_momentum_delta_rule])
def test_looking_ahead_reads_the_decayed_state(form) -> None:
    expected = "lookahead needs use_p_times_alpha=True: the error is taken at the decayed state, got False"
    assert bad({"lookahead": True, "use_p_times_alpha": False}, form) == expected


# ------------------------------------------------------------------------------------------------------- decode step


def token(**changes) -> Tensors:
    """One token for a batch of two, state of two slots."""
    inputs = make_inputs("general", T=1)
    arguments = {name: x[:, 0] for name, x in inputs.items() if name != "initial_state"}
    return {"p": None} | arguments | {"state": inputs["initial_state"]} | changes


def bad_step(**changes) -> str:
    return message_of(momentum_delta_step, **token(**changes))


def test_a_step_refuses_wrong_shapes() -> None:
    assert bad_step(q=torch.ones(2, 1, 2, 16)) == "q must have shape [B, H, D], got [2, 1, 2, 16]"
    assert bad_step(beta=torch.ones(2)) == "beta must have shape [2, 2], one per value head, got [2]"
    expected = "S of the state must have shape [slots, HV, K, V] = [2, 2, 16, 24], got [1, 2, 16, 24]"
    assert bad_step(state=torch.ones(2, 1, 2, 16, 24)) == expected


def test_step_state_dtype_device_and_kind() -> None:
    expected = "S of the state must be torch.float32 to be updated in place, got torch.float16"
    assert bad_step(state=torch.ones(2, 2, 2, 16, 24).half()) == expected
    assert re.match(
        r"S of the state must be on the device of q, cpu, got meta",
        bad_step(state=torch.ones(2, 2, 2, 16, 24).to("meta")),
    )
    assert re.match(r"state must be .*, got NoneType", bad_step(state=None))


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(
    ("indices", "given"),
    [
        (torch.tensor([0]), r"\[1\]"),
        (torch.tensor([0, 2]), "2"),
        (torch.tensor([-1, 0]), "-1"),
        (torch.tensor([0.0, 1.0]), "torch.float32"),
        ([0, 1], "list"),
    ],
    ids=["too few", "too large", "negative", "not whole", "a list"],
)
def test_a_step_refuses_wrong_slots(backend: str, indices, given: str) -> None:
    assert re.search(rf"^state_indices must .*{given}", bad_step(state_indices=indices, backend=backend))


def test_a_step_names_wrong_vectors_and_scales_before_its_slots() -> None:
    slots = torch.tensor([0, 1])
    assert bad_step(v=None, state_indices=slots) == "v must be a torch.Tensor, got NoneType"
    assert bad_step(v=torch.tensor(1.0), state_indices=slots) == "v must have shape [B, H, D], got []"
    assert bad_step(scale=[1.0]) == "scale must be a finite number or None, got [1.0]"


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_true_is_no_scale_even_where_one_has_been_used(backend: str) -> None:
    momentum_delta_step(**token(scale=1), backend=backend)
    assert bad_step(scale=True, backend=backend) == "scale must be a finite number or None, got True"
    inputs = make_inputs("gated_delta_rule", T=1)
    given = {name: x[:, 0] for name, x in inputs.items() if name != "initial_state"}
    given |= {"state": inputs["initial_state"], "backend": backend}
    gated_delta_rule_step(**given, scale=1)
    with pytest.raises(ValueError, match="scale must be a finite number or None, got True"):
        gated_delta_rule_step(**given, scale=True)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_log_mu_is_not_read_where_momentum_is_forgotten(backend: str) -> None:
    outputs = []
    for log_mu in (token()["log_mu"], torch.ones(2, 2), torch.full((2, 2), float("nan"))):
        S = token()["state"][0].clone()
        outputs.append((momentum_delta_step(**token(state=(S, None), log_mu=log_mu), backend=backend), S))
    assert all(torch.equal(o, outputs[0][0]) and torch.equal(S, outputs[0][1]) for o, S in outputs)


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_step_slots_that_are_named_twice(backend: str) -> None:
    message = bad_step(state_indices=torch.tensor([1, 1]), backend=backend)
    assert re.search(r"^state_indices must .*(distinct|once|twice)", message)


@pytest.mark.parametrize("name", GATES)
def test_a_step_refuses_gates_out_of_range(name: str) -> None:
    gate = token()[name].clone()
    gate[0, 1] = float("nan")
    assert bad_step(**{name: gate}).endswith("got NaN in 1 of 4 places")


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_step_refuses_states_that_share_memory(backend: str) -> None:
    state = torch.ones(2, 2, 2, 16, 24)
    assert "S of the state must not overlap itself" in bad_step(
        state=(state[0, :1].expand(2, -1, -1, -1), state[1]), backend=backend
    )
    assert "S and M of the state must be different memory" in bad_step(state=(state[0], state[0]), backend=backend)
    assert "S and M of the state must be" in bad_step(state=state[:1].expand(2, -1, -1, -1, -1), backend=backend)
    other = state.view(-1)[24:].as_strided((2, 2, 16, 24), (784, 392, 24, 1))
    assert bad_step(state=(state[0], other), backend=backend).endswith("but they might share some")


def addresses(shape: list[int], strides: list[int], begin: int = 0) -> set[int]:
    return {begin + sum(map(int.__mul__, strides, i)) for i in itertools.product(*map(range, shape))}


def random_layouts(draw: random.Random) -> tuple[list[int], list[int], list[int], list[int]]:
    """Two shapes and their strides, each without overlap in itself; often with some strides in common, and in one of
    them sizes of 1 whose strides mean nothing."""
    while True:
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
        later_shape = [1 if draw.random() < 0.2 else size for size in shape]
        strides = [draw.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 30, 48]) for _ in shape]
        later_strides = [
            stride if size > 1 and draw.random() < 0.6 else draw.choice([1, 2, 3, 4, 8, 12, 30])
            for size, stride in zip(later_shape, strides)
        ]
        pairs = (shape, strides), (later_shape, later_strides)
        if not any(may_overlap(torch.empty_strided(*pair, device="meta")) for pair in pairs):
            return shape, strides, later_shape, later_strides


def test_shared_elements_are_those_of_the_sets_of_addresses() -> None:
    draw, found = random.Random(5), dict.fromkeys(("none", "share some", "might share some"), 0)
    for _ in range(4000):
        layouts = random_layouts(draw)
        if draw.random() < 0.5:
            layouts = (*layouts[2:], *layouts[:2])
        shape, strides, later_shape, later_strides = layouts
        mine = addresses(shape, strides)
        distance = draw.randint(0, max(mine) + 2)
        shares = bool(mine & addresses(later_shape, later_strides, distance))
        answer = _shared_elements(distance, *map(tuple, layouts))
        assert answer in (("share some", "might share some") if shares else ("none", "might share some")), layouts
        if all(1 in sizes or a == b for a, b, *sizes in zip(strides, later_strides, shape, later_shape)):
            assert answer != "might share some", layouts
        found[answer] += 1
    assert min(found.values()) > 400, found


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_the_states_of_a_step_may_take_turns_in_one_tensor_but_share_nothing(backend: str) -> None:
    plain = token()["state"].clone()
    expected = momentum_delta_step(**token(state=plain), backend=backend)
    pool = torch.zeros(3, 2, 16, 24)
    for first, second in ((pool[:2], pool[1:]), (pool[1:], pool[:2]), (pool[::2], pool[1:])):
        assert "S and M of the state must be different memory" in bad_step(state=(first, second), backend=backend)
    assert not pool.any()
    slots = torch.zeros(2, 3, 2, 16, 24)  # [slots, M and S around what is neither, HV, K, V]
    S, M = slots[:, 2], slots[:, 0]
    S.copy_(token()["state"][0])
    M.copy_(token()["state"][1])
    assert torch.equal(momentum_delta_step(**token(state=(S, M)), backend=backend), expected)
    assert torch.equal(torch.stack([S, M]), plain)
    assert not slots[:, 1].any()


def test_a_step_without_its_state_says_what_is_missing() -> None:
    assert "state must be a tensor [2, slots, HV, K, V] or the pair (S, M), got NoneType" in bad_step(state=None)
    assert "state must be a pair of tensors (S, M), but S is NoneType" in bad_step(state=(None, None))
    assert bad_step(state=torch.tensor(1.0)).endswith("or the pair (S, M), got shape []")


def test_nothing_is_written_to_the_state_by_a_step_that_is_refused() -> None:
    state = make_inputs(T=1)["initial_state"]
    before = state.clone()
    with pytest.raises(ValueError, match="beta must have shape"):
        momentum_delta_step(**token(state=state, beta=torch.ones(2)))
    assert torch.equal(state, before)
