"""Packed sequences: each one computed as if it were alone, states and gradients included, whatever its length."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mdn.ops import (
    SequenceBoundaries,
    chunk_momentum_delta_rule,
    fused_recurrent_momentum_delta_rule,
    recurrent_momentum_delta_rule,
)
from momentum_cases import (
    assert_within_bars,
    errors_against_recurrence,
    leaves,
    make_inputs,
    only_tokens,
    relative_error,
    run_with_gradients,
    torch_chunk,
)

PACKS = {
    "one token each": [1] * 7,
    "empty among others": [0, 5, 0, 0, 64, 0],
    "ragged": [1, 63, 64, 65, 2, 130, 0, 1],
    "one sequence": [90],
    "nothing at all": [0, 0],
    "many short": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8],
}


def offsets_of(lengths: list[int]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
def test_a_pack_is_each_sequence_alone(lengths: list[int]) -> None:
    offsets = offsets_of(lengths)
    inputs = make_inputs(B=1, T=offsets[-1], N=len(lengths), H=2, HV=4, with_p=True, dtype=torch.float64)
    o, state = torch_chunk(inputs, cu_seqlens=torch.tensor(offsets))
    for n, (start, end) in enumerate(pairwise(offsets)):
        wanted_o, wanted_state = torch_chunk(only_tokens(inputs, start, end, sequence=n))
        assert relative_error(o[:, start:end], wanted_o) <= 1e-13
        assert relative_error(state[:, n : n + 1], wanted_state) <= 1e-13


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
def test_a_pack_matches_the_float64_recurrence_with_all_gradients(lengths: list[int]) -> None:
    offsets = offsets_of(lengths)
    inputs = make_inputs(B=1, T=offsets[-1], N=len(lengths), H=1, HV=2, with_p=True)
    assert_within_bars(errors_against_recurrence(inputs, offsets))


def test_a_pack_larger_than_one_slab_of_work() -> None:
    lengths = [1 + n % 17 for n in range(40)]
    inputs = make_inputs(B=1, T=sum(lengths), N=40, H=4, K=8, V=8)
    assert_within_bars(errors_against_recurrence(inputs, offsets_of(lengths)))


def test_no_sequence_sees_another_even_when_that_one_is_not_finite() -> None:
    inputs = make_inputs(B=1, T=100, N=3)
    clean = {name: x.clone() for name, x in inputs.items()}
    inputs["v"][:, 40:70] = float("nan")
    inputs["k"][:, 40:70] = float("inf")
    inputs["initial_state"][:, 1] = float("nan")
    boundaries = torch.tensor([0, 40, 70, 100])
    found, wanted = (
        run_with_gradients(lambda x: torch_chunk(x, cu_seqlens=boundaries), leaves(x)) for x in (inputs, clean)
    )
    outside = torch.cat([torch.arange(40), torch.arange(70, 100)])
    assert torch.equal(found[0][:, outside], wanted[0][:, outside])
    assert torch.equal(found[1][:, [0, 2]], wanted[1][:, [0, 2]])
    for name in ("q", "k", "v", "log_alpha", "log_mu", "beta", "eta"):
        assert torch.equal(found[2][name][:, outside], wanted[2][name][:, outside]), name


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_boundaries_may_be_a_tensor_or_the_shared_object(dtype: torch.dtype) -> None:
    inputs = make_inputs(B=1, T=30, N=2)
    tensor = torch.tensor([0, 11, 30], dtype=dtype)
    wanted = torch_chunk(inputs, cu_seqlens=SequenceBoundaries.from_lengths([11, 19]))
    for found, want in zip(torch_chunk(inputs, cu_seqlens=tensor), wanted):
        assert torch.equal(found, want)


def test_boundaries_written_to_between_calls_are_read_again() -> None:
    inputs = make_inputs(B=1, T=30, N=2)
    boundaries = torch.tensor([0, 11, 30])
    torch_chunk(inputs, cu_seqlens=boundaries)
    boundaries[1] = 17
    found = torch_chunk(inputs, cu_seqlens=boundaries)
    for result, want in zip(found, torch_chunk(inputs, cu_seqlens=torch.tensor([0, 17, 30]))):
        assert torch.equal(result, want)


@pytest.mark.parametrize("form", [recurrent_momentum_delta_rule, fused_recurrent_momentum_delta_rule])
def test_the_other_forms_take_packs_too(form) -> None:
    inputs = make_inputs(B=1, T=20, N=4, dtype=torch.float64)
    boundaries = torch.tensor([0, 1, 1, 9, 20])
    found = form(**inputs, cu_seqlens=boundaries, output_final_state=True)
    for result, want in zip(found, torch_chunk(inputs, cu_seqlens=boundaries)):
        assert relative_error(result, want) <= 1e-13


def test_a_pack_through_the_automatic_backend() -> None:
    inputs = make_inputs(B=1, T=140, N=4)
    boundaries = torch.tensor([0, 1, 70, 70, 140])
    found = chunk_momentum_delta_rule(**inputs, cu_seqlens=boundaries, output_final_state=True)
    for result, want in zip(found, torch_chunk(inputs, cu_seqlens=boundaries)):
        assert relative_error(result, want) <= 4e-6
