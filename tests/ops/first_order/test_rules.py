"""Chain of evidence for every first-order rule: definition -> chunkwise form -> gradients -> packs, segments, steps."""

import pytest
import torch
from torch import Tensor

from first_order_cases import GATES, RULES, VECTOR, arguments, chunk, flat, random_state, recurrent, step
from mdn.ops import SequenceBoundaries
from mdn.ops.first_order.chunk_vector import decayed_products


def close(found: Tensor, expected: Tensor, relative: float) -> None:
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    error = (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0
    assert error <= relative * max(1.0, expected.abs().max().item() if found.numel() else 0.0)


def outputs_and_gradients(compute, tensors: dict[str, Tensor], state, **options) -> list[Tensor]:
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    parts = [x.clone().requires_grad_() for x in (state if isinstance(state, tuple) else (state,))]
    output, final = compute(
        **leaves, initial_state=tuple(parts) if len(parts) > 1 else parts[0], output_final_state=True, **options
    )
    final = flat(final)
    generator = torch.Generator().manual_seed(3)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in (output, final))
    gradients = torch.autograd.grad(loss, [*leaves.values(), *parts])
    return [output.detach(), final.detach(), *gradients]


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("rule", RULES)
def test_chunkwise_outputs_states_and_gradients_equal_the_definition(rule, gates):
    tensors, state = arguments(rule, T=70, H=2, HV=4, gates=gates), random_state(rule, 2, HV=4)
    expected = outputs_and_gradients(recurrent(rule), tensors, state)
    for chunk_size in (16, 64):
        found = outputs_and_gradients(chunk(rule), tensors, state, chunk_size=chunk_size)
        for x, y in zip(found, expected, strict=True):
            close(x, y, 1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_equal_finite_differences(rule):
    tensors, state = arguments(rule, B=1, T=5, H=1, HV=2, K=3, V=2, gates="mild"), random_state(rule, 1, 2, 3, 2)
    names = list(tensors)
    parts = state if isinstance(state, tuple) else (state,)

    def compute(*leaves: Tensor):
        initial = leaves[len(names) :]
        named = dict(zip(names, leaves))
        output, final = chunk(rule)(
            **named, initial_state=initial if len(initial) > 1 else initial[0], output_final_state=True, chunk_size=4
        )
        return output, flat(final)

    leaves = [x.clone().requires_grad_() for x in (*tensors.values(), *parts)]
    assert torch.autograd.gradcheck(compute, leaves, eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("gates", ["strong", "hard zeros"])
@pytest.mark.parametrize("rule", VECTOR)
def test_float32_keeps_its_precision_when_vector_decays_reach_minus_twenty_a_step(rule, gates):
    exact = arguments(rule, T=200, K=32, V=16, gates=gates)
    expected = outputs_and_gradients(recurrent(rule), exact, random_state(rule, 2, K=32, V=16))
    single = {name: x.float() for name, x in exact.items()}
    state = random_state(rule, 2, K=32, V=16, dtype=torch.float32)
    for x, y in zip(outputs_and_gradients(chunk(rule), single, state), expected, strict=True):
        assert x.dtype == torch.float32
        close(x, y, 5e-6)


@pytest.mark.parametrize("gates", ["strong", "mixed", "hard zeros"])
@pytest.mark.parametrize("lengths", [None, [3, 0, 1, 70, 17]])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in VECTOR])
def test_the_native_kernel_gives_the_outputs_states_and_gradients_of_the_definition(rule, lengths, gates):
    boundaries = None if lengths is None else SequenceBoundaries.from_lengths(lengths)
    batch, time, count = (2, 91, 2) if lengths is None else (1, sum(lengths), len(lengths))
    exact = arguments(rule, B=batch, T=time, H=2, HV=4, K=16, V=16, gates=gates)
    state = random_state(rule, count, HV=4, K=16, V=16)
    expected = outputs_and_gradients(recurrent(rule), exact, state, cu_seqlens=boundaries)
    single = {name: x.float() for name, x in exact.items()}
    state = random_state(rule, count, HV=4, K=16, V=16, dtype=torch.float32)
    found = outputs_and_gradients(chunk(rule), single, state, cu_seqlens=boundaries, backend="cpu")
    for x, y in zip(found, expected, strict=True):
        close(x, y, 1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_a_pack_equals_its_sequences_one_by_one(rule):
    lengths = [3, 0, 1, 70, 17, 0, 1]
    tensors, state = arguments(rule, B=1, T=sum(lengths), HV=4), random_state(rule, len(lengths), HV=4)
    boundaries = SequenceBoundaries.from_lengths(lengths)
    output, final = chunk(rule)(
        **tensors, initial_state=state, output_final_state=True, cu_seqlens=boundaries.cu_seqlens, chunk_size=16
    )
    final, whole_state = flat(final), state if isinstance(state, tuple) else (state,)
    for n, (start, end) in enumerate(zip(boundaries.offsets, boundaries.offsets[1:])):
        alone = {name: x[:, start:end] for name, x in tensors.items()}
        initial = tuple(part[n : n + 1] for part in whole_state)
        expected, last = recurrent(rule)(
            **alone, initial_state=initial if len(initial) > 1 else initial[0], output_final_state=True
        )
        close(output[:, start:end], expected, 1e-12)
        close(final[n : n + 1], flat(last), 1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_a_pack_equal_those_of_the_definition(rule):
    lengths = [0, 5, 33, 1, 20]
    tensors, state = arguments(rule, B=1, T=sum(lengths)), random_state(rule, len(lengths))
    boundaries = SequenceBoundaries.from_lengths(lengths)
    found = outputs_and_gradients(chunk(rule), tensors, state, cu_seqlens=boundaries, chunk_size=16)
    expected = outputs_and_gradients(recurrent(rule), tensors, state, cu_seqlens=boundaries)
    for x, y in zip(found, expected, strict=True):
        close(x, y, 1e-12)


def test_a_pack_seen_in_inference_mode_can_be_trained_on_afterwards():
    tensors = arguments("kda", B=1, T=23)
    boundaries = SequenceBoundaries.from_lengths([20, 3])
    with torch.inference_mode():
        expected, _ = chunk("kda")(**tensors, cu_seqlens=boundaries)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    output, _ = chunk("kda")(**leaves, cu_seqlens=boundaries)
    output.sum().backward()
    assert torch.equal(output, expected)
    assert all(torch.isfinite(x.grad).all() for x in leaves.values())


@pytest.mark.parametrize("rule", RULES)
def test_segments_with_states_passed_on_equal_the_whole_sequence(rule):
    tensors = arguments(rule, T=75)
    whole, final = chunk(rule)(**tensors, output_final_state=True)
    pieces, state = [], None
    for start, end in ((0, 1), (1, 40), (40, 75)):
        piece = {name: x[:, start:end] for name, x in tensors.items()}
        output, state = chunk(rule)(**piece, initial_state=state, output_final_state=True)
        pieces.append(output)
    close(torch.cat(pieces, 1), whole, 1e-12)
    close(flat(state), flat(final), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # on a CPU float32 goes to the native kernel
@pytest.mark.parametrize("rule", RULES)
def test_one_token_steps_in_place_equal_the_definition(rule, dtype):
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    tensors, state = arguments(rule, T=9, HV=4, dtype=dtype), random_state(rule, 2, HV=4, dtype=dtype)
    expected, final = recurrent(rule)(**tensors, initial_state=state, output_final_state=True)
    states = {"state": state, "z_state": None}
    if isinstance(state, tuple):
        states = {"state": state[0], "z_state": state[1][:, 0]}
    states = {name: x.clone() for name, x in states.items() if x is not None}
    for t in range(9):
        output = step(rule)(**{name: x[:, t] for name, x in tensors.items()}, **states)
        close(output, expected[:, t], tolerance)
    close(flat(tuple(states.values()) if len(states) > 1 else states["state"]), flat(final), tolerance)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "linear_attn"])
def test_a_step_changes_only_the_slots_it_is_given(rule):
    tensors = {name: x[:, 0] for name, x in arguments(rule, T=1).items()}
    slots = random_state(rule, 5)
    before, chosen = slots.clone(), torch.tensor([3, 1])
    alone = slots[chosen].clone()
    expected = step(rule)(**tensors, state=alone)
    found = step(rule)(**tensors, state=slots, state_indices=chosen)
    close(found, expected, 0.0)
    close(slots[chosen], alone, 0.0)
    assert torch.equal(slots[[0, 2, 4]], before[[0, 2, 4]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_half_precision_keeps_a_float32_state_and_loses_only_the_rounding_of_its_output(rule, dtype):
    tensors = arguments(rule, T=70, dtype=dtype)
    output, final = chunk(rule)(**tensors, output_final_state=True)
    exact, exact_final = recurrent(rule)(**{name: x.double() for name, x in tensors.items()}, output_final_state=True)
    assert output.dtype == dtype
    assert flat(final).dtype == torch.float32
    close(flat(final), flat(exact_final), 1e-5)
    close(output, exact, torch.finfo(dtype).eps)


def test_autocast_does_not_lower_the_precision_of_the_state():
    tensors = arguments("gated_delta_rule", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = chunk("gated_delta_rule")(**tensors, output_final_state=True)
    outside = chunk("gated_delta_rule")(**tensors, output_final_state=True)
    for x, y in zip(inside, outside):
        assert torch.equal(x, y)


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_row_of_tokens_returns_the_state_unchanged(rule):
    tensors, state = arguments(rule, T=0), random_state(rule, 2)
    output, final = chunk(rule)(**tensors, initial_state=state, output_final_state=True)
    assert output.shape == (2, 0, 2, 6)
    assert torch.equal(flat(final), flat(state))


def test_decayed_scores_equal_their_sum_written_out():
    torch.manual_seed(0)
    left, right = torch.randn(3, 2, 8, 4, dtype=torch.float64), torch.randn(3, 3, 8, 4, dtype=torch.float64)
    g = -20 * torch.rand(3, 8, 4, dtype=torch.float64)
    scores = decayed_products(left, right, g)
    for i in range(8):
        for j in range(8):
            decay = g[:, j + 1 : i + 1].sum(1).exp() if j <= i else torch.zeros(3, 4, dtype=torch.float64)
            expected = torch.einsum("bmd,bnd,bd->bmn", left[:, :, i], right[:, :, j], decay)
            close(scores[..., i, j], expected, 1e-14)
