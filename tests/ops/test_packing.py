"""Packs: how boundaries may be given, and that every form of the rule takes them. Results: test_conformance.py."""

from __future__ import annotations

import pytest
import torch

from conformance import Case, check, torch_chunk
from definition import make_inputs, momentum_delta_rule, relative_error
from mdn.ops import SequenceBoundaries, blockwise_momentum_delta_rule, fused_recurrent_momentum_delta_rule


def test_a_pack_of_many_short_sequences_larger_than_one_slab_of_work() -> None:
    check(Case(lengths=tuple(1 + n % 17 for n in range(40)), H=4, HV=4, K=8, V=8), "torch")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_boundaries_may_be_a_tensor_or_the_shared_object(dtype: torch.dtype) -> None:
    inputs = make_inputs(B=1, T=30, N=2)
    tensor = torch.tensor([0, 11, 30], dtype=dtype)
    expected = torch_chunk(inputs, cu_seqlens=SequenceBoundaries.from_lengths([11, 19]))
    for actual, reference in zip(torch_chunk(inputs, cu_seqlens=tensor), expected):
        assert torch.equal(actual, reference)


def test_boundaries_written_to_between_calls_are_read_again() -> None:
    inputs = make_inputs(B=1, T=30, N=2)
    boundaries = torch.tensor([0, 11, 30])
    torch_chunk(inputs, cu_seqlens=boundaries)
    boundaries[1] = 17
    expected = torch_chunk(inputs, cu_seqlens=torch.tensor([0, 17, 30]))
    for actual, reference in zip(torch_chunk(inputs, cu_seqlens=boundaries), expected):
        assert torch.equal(actual, reference)


@pytest.mark.parametrize(
    ("form", "block_size"), [(fused_recurrent_momentum_delta_rule, 1), (blockwise_momentum_delta_rule, 3)]
)
def test_the_other_forms_take_packs_and_count_blocks_from_the_start_of_each_sequence(form, block_size: int) -> None:
    offsets = [0, 5, 5, 6, 20]
    inputs = make_inputs(B=1, T=20, N=4, dtype=torch.float64)
    options = {"block_size": block_size} if block_size > 1 else {}
    found = form(**inputs, cu_seqlens=torch.tensor(offsets), output_final_state=True, **options)
    for actual, expected in zip(found, momentum_delta_rule(**inputs, offsets=offsets, block_size=block_size)):
        assert relative_error(actual, expected) <= 1e-13
