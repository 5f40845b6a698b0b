"""The torch backend's choice of a chunk size."""

from __future__ import annotations

from mdn.ops.momentum.chunk_torch import choose_chunk_size


def test_chunks_are_shorter_for_narrow_heads_and_never_longer_than_requested() -> None:
    wide, narrow = (choose_chunk_size(64, (2048,) * 4, 4, *dims, 64) for dims in ((128, 256), (64, 64)))
    assert (wide, narrow) == (64, 32)
    assert choose_chunk_size(8, (2048,), 4, 64, 64, 64) == 8
    assert choose_chunk_size(64, (5, 3), 4, 64, 64, 64) == 5
