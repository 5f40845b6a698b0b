"""The torch backend's choice of a chunk size, and its groups of chunks."""

from __future__ import annotations

import pytest

from conformance import Case, check
from definition import MOMENTUM
from mdn.ops.momentum import chunk_torch, vector_torch
from mdn.ops.momentum.chunk_torch import choose_chunk_size


def test_chunks_are_shorter_for_narrow_heads_and_never_longer_than_requested() -> None:
    wide, narrow = (choose_chunk_size(64, (2048,) * 4, 4, *dims, 64) for dims in ((128, 256), (64, 64)))
    assert (wide, narrow) == (64, 32)
    assert choose_chunk_size(8, (2048,), 4, 64, 64, 64) == 8
    assert choose_chunk_size(64, (5, 3), 4, 64, 64, 64) == 5
    assert choose_chunk_size(64, (0,), 4, 64, 64, 64) == 1


@pytest.mark.parametrize("rule", MOMENTUM)
@pytest.mark.parametrize("lengths", [None, (37, 1, 90, 0, 5)], ids=["batch", "pack"])
def test_sequences_of_several_groups_of_chunks_are_exact(rule: str, lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a few chunks are worked on at once; the states between groups are rebuilt."""
    for module in (chunk_torch, vector_torch):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 64)
    check(Case(rule, B=1, T=150, lengths=lengths, HV=2, chunk_size=16), "torch")
