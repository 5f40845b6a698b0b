"""The torch backend's schedule: every token once, in order, and padding only in the tails."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mdn.ops.momentum.schedule import choose_chunk_size, make_schedule

CPU = torch.device("cpu")


def schedule(lengths: list[int], chunk_size: int, heads: int = 2, most: int = 8):
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    return starts, make_schedule(tuple(starts), tuple(lengths), chunk_size, heads, most, CPU)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.sampled_from([1, 4, 16]))
def test_every_token_is_computed_once_and_after_its_predecessors(lengths: list[int], chunk_size: int) -> None:
    starts, slabs = schedule(lengths, chunk_size)
    visited: dict[int, list[int]] = {n: [] for n in range(len(lengths))}
    for slab in slabs:
        for group in slab.groups:
            for first, end in group.rounds:
                for row in range(first, end):
                    position = row - first if group.members is None else int(group.members[row])
                    kept = slice(None) if group.padding is None else ~group.padding[row]
                    visited[slab.sequences[position]] += group.tokens[row][kept].tolist()
    for n, (start, length) in enumerate(zip(starts, lengths)):
        assert visited[n] == list(range(start, start + length))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from([4, 16]))
def test_only_tails_are_padded_and_padding_repeats_their_last_token(lengths: list[int], chunk_size: int) -> None:
    _, slabs = schedule(lengths, chunk_size)
    for group in (group for slab in slabs for group in slab.groups if group.padding is not None):
        assert len(group.rounds) == 1
        assert not group.padding.all(dim=0).any()  # no wider than the longest tail
        for tokens, padding in zip(group.tokens, group.padding):
            assert (tokens[padding] == tokens[~padding][-1]).all()


def test_a_dense_batch_needs_no_padding_whatever_its_length() -> None:
    for length in (1, 15, 16, 17, 200):
        _, slabs = schedule([length] * 3, 16)
        assert all(group.padding is None and group.block is not None for slab in slabs for group in slab.groups)


def test_chunks_are_shorter_for_narrow_heads_and_never_longer_than_asked() -> None:
    wide, narrow = (choose_chunk_size(64, (2048,) * 4, 4, *dims, 8192, 64) for dims in ((128, 256), (64, 64)))
    assert (wide, narrow) == (64, 32)
    assert choose_chunk_size(8, (2048,), 4, 64, 64, 8192, 64) == 8
    assert choose_chunk_size(64, (5, 3), 4, 64, 64, 8192, 64) == 5
