"""Cutting batches and packs into chunks: every token once, in order, rounds that are prefixes, and a way back."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mdn.ops import SequenceBoundaries
from mdn.ops.chunking import ByteCache, Sequences, chunk_indices, chunk_scan, plan_slabs

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def numbered(total: int, heads: int = 2, width: int = 3) -> torch.Tensor:
    """[1, total, H, D], every number different."""
    return torch.arange(1.0, 1 + total * heads * width).reshape(1, total, heads, width)


@given(LENGTHS, st.sampled_from([1, 4, 16]))
def test_a_scan_holds_every_token_once_after_its_predecessors_and_zeros_elsewhere(lengths, chunk_size) -> None:
    boundaries = SequenceBoundaries.from_lengths(lengths)
    x = numbered(boundaries.total)
    scan = chunk_scan(x, boundaries, chunk_size)
    chunks = scan.split(x)
    visited = {n: [] for n in range(len(lengths))}
    order = scan.rank_states(torch.arange(len(lengths))).tolist()
    for first, end in scan.rounds:
        for rank in range(end - first):
            visited[order[rank]].append(chunks[first + rank].transpose(0, 1))  # [C, H, D]
    assert sum(end - first for first, end in scan.rounds) == len(chunks)
    for n, (start, end) in enumerate(pairwise(boundaries.offsets)):
        tokens = torch.cat([*visited[n], chunks.new_zeros(0, 2, 3)])
        assert torch.equal(tokens[: end - start], x[0, start:end])
        assert not tokens[end - start :].any()
    assert torch.equal(scan.join(chunks), x)
    assert scan.unrank_states(torch.tensor(order)).tolist() == list(range(len(lengths)))


@pytest.mark.parametrize("time", [0, 1, 15, 16, 17])
def test_a_scan_of_a_batch_is_the_scan_of_the_pack_of_its_rows(time: int) -> None:
    x = numbered(3 * time)
    batch = x.reshape(3, time, 2, 3)
    scan, packed = chunk_scan(batch, None, 16), chunk_scan(x, SequenceBoundaries.from_lengths([time] * 3), 16)
    assert scan.rounds == packed.rounds
    assert torch.equal(scan.split(batch), packed.split(x))
    assert torch.equal(scan.join(scan.split(batch)), batch)


def test_a_scan_passes_gradients_both_ways() -> None:
    boundaries = SequenceBoundaries.from_lengths([5, 0, 1, 3])
    x = torch.randn(1, 9, 1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    scan = chunk_scan(x, boundaries, 4)
    assert torch.autograd.gradcheck(lambda x: scan.join(scan.split(x).square()), x)


@given(LENGTHS, st.sampled_from([1, 4, 16]), st.sampled_from([1, 4, 100]))
def test_a_plan_loads_every_token_once_after_its_predecessors(lengths, chunk_size: int, most: int) -> None:
    boundaries = SequenceBoundaries.from_lengths(lengths)
    x = numbered(boundaries.total, heads=1, width=1)
    visited = {n: [] for n in range(len(lengths))}
    for slab in plan_slabs(Sequences.of(1, boundaries.total, boundaries), chunk_size, most, CPU):
        assert len(slab.sequences) <= most
        for group in slab.groups:
            assert len(group.rounds) == 1 or group.chunks <= most
            chunks = group.load(x, torch.empty(group.chunks, group.size, 1), 1.0, torch.empty(4096)).squeeze(-1)
            for first, end in group.rounds:
                for row in range(first, end):
                    rank = row - first if group.members is None else int(group.members[row])
                    kept = slice(None) if group.valid is None else group.valid[row]
                    visited[slab.sequences[rank]] += chunks[row][kept].tolist()
    for n, (start, end) in enumerate(pairwise(boundaries.offsets)):
        assert visited[n] == x[0, start:end].flatten().tolist()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from([4, 16]))
def test_only_tails_are_filled_up_and_no_wider_than_the_longest(lengths: list[int], chunk_size: int) -> None:
    boundaries = SequenceBoundaries.from_lengths(lengths)
    for slab in plan_slabs(Sequences.of(1, boundaries.total, boundaries), chunk_size, 8, CPU):
        for group in (group for group in slab.groups if group.valid is not None):
            assert len(group.rounds) == 1
            assert group.valid.any(dim=0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[7, 0, 33, 1, 16], [20, 20, 20]])
def test_what_a_plan_loads_and_stores_again_is_the_tensor_times_the_factors(lengths, dtype: torch.dtype) -> None:
    """Two key heads serve four value heads; factors may be a number or one per value head and token."""
    boundaries = SequenceBoundaries.from_lengths(lengths)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, boundaries.total, 2, 3, generator=generator).to(dtype)
    factors = torch.rand(1, boundaries.total, 4, 1, generator=generator)
    found, scaled = torch.empty(1, boundaries.total, 4, 3, dtype=dtype), torch.empty(1, boundaries.total, 4, 3)
    scratch = torch.empty(8192)
    for slab in plan_slabs(Sequences.of(1, boundaries.total, boundaries), 16, 4, CPU):
        for group in slab.groups:
            chunks = torch.empty(group.chunks * 4, group.size, 3)
            by = group.load(factors, torch.empty(group.chunks * 4, group.size, 1), 1.0, scratch).squeeze(-1).clone()
            group.store(group.load(x, chunks, 0.5, scratch), found, 2.0, scratch)
            group.store(group.load(x, chunks, by, scratch), scaled, by, scratch)
    assert torch.equal(found, x.repeat_interleave(2, 2))
    torch.testing.assert_close(scaled, x.repeat_interleave(2, 2).float() * factors.square())


def test_chunks_are_numbered_in_each_sequence() -> None:
    boundaries = SequenceBoundaries.from_lengths([3, 0, 1, 5])
    table = chunk_indices(boundaries, 2)
    assert table.tolist() == [[0, 0], [0, 1], [2, 0], [3, 0], [3, 1], [3, 2]]
    assert chunk_indices(boundaries, 2) is table
    assert chunk_indices(boundaries, 64).tolist() == [[0, 0], [2, 0], [3, 0]]


def test_the_cache_is_bounded_in_bytes_and_keeps_what_was_used_last() -> None:
    made = []

    def get(key: int) -> int:
        return cache.get(key, lambda: made.append(key) or key, lambda value: 40)

    cache = ByteCache(100)
    for key in (1, 2, 1, 3, 1, 2):
        assert get(key) == key
    assert made == [1, 2, 3, 2]
    assert cache.used <= 100


def test_two_threads_that_make_the_same_value_count_it_once() -> None:
    cache = ByteCache(100)
    both_missed = threading.Barrier(2)

    def make() -> int:
        both_missed.wait(timeout=60)
        return 1

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: cache.get("key", make, lambda value: 40), range(2))) == [1, 1]
    assert cache.used == 40
    assert cache.get("other", lambda: 2, lambda value: 40) == 2
    assert cache.get("key", lambda: 3, lambda value: 40) == 1
