"""Multi-query associative recall (MQAR) examples, by zoology's rules, and a variant in which keys are bound twice.

    k1 v1 k2 v2 ... kP vP | . . k2 . . . k1 . ...    inputs [N, L];  labels [N, L], the value at every query, else -100

P pairs of distinct keys (1 .. V/2 - 1) and distinct values (V/2 .. V - 1), then slots of two positions. Every key is
queried once, at the first position of a slot; slots are drawn without replacement with weight slot^(a - 1), where slots
count from 1. The answer is not inserted, and every position without a pair or a query holds a random token of the
vocabulary.

With ``rewriting`` all keys are bound to stale values first and then, in another order, to new ones, which are queried.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mdn.ops.fused import IGNORE_INDEX

_BLOCK_ENTRIES = 8_000_000  # random numbers drawn at once: bounds the memory of sampling without replacement


@dataclass(frozen=True)
class Examples:
    """``inputs`` and ``labels`` [N, L]; ``queries`` [N, P] are the labelled positions, key by key, and ``answers``
    [N, P] what belongs there."""

    inputs: Tensor
    labels: Tensor
    queries: Tensor
    answers: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def select(self, rows: Tensor | slice) -> Examples:
        return Examples(self.inputs[rows], self.labels[rows], self.queries[rows], self.answers[rows])


def check_segment(length: int, pairs: int, vocab_size: int, rewriting: bool = False) -> None:
    """Raises if no example of this shape exists."""
    bindings = 2 if rewriting else 1
    if pairs < 1:
        raise ValueError(f"pairs must be at least 1, got {pairs}")
    shortest = 2 * (bindings + 1) * pairs
    if length % 2 or length < shortest:
        raise ValueError(f"length must be even and at least {shortest} for {pairs} pairs, got {length}")
    if vocab_size % 2 or vocab_size // 2 - 1 < bindings * pairs:
        raise ValueError(
            f"vocab_size must be even with at least {bindings * pairs} keys and values in its halves, got {vocab_size}"
        )


def slot_weights(length: int, pairs: int, power: float, rewriting: bool = False) -> Tensor:
    """Probability of every slot for the first query [slots]; later ones are drawn from the slots that are left."""
    slots = (length - (4 if rewriting else 2) * pairs) // 2
    weights = torch.arange(1, slots + 1, dtype=torch.float64) ** (power - 1)
    return weights / weights.sum()


def generate(
    number: int,
    length: int,
    pairs: int,
    *,
    vocab_size: int = 8192,
    power: float = 0.01,
    rewriting: bool = False,
    generator: torch.Generator,
) -> Examples:
    """``number`` examples of ``length`` tokens with ``pairs`` pairs; the same generator state gives the same ones."""
    check_segment(length, pairs, vocab_size, rewriting)
    half, bindings = vocab_size // 2, 2 if rewriting else 1
    keys = 1 + _distinct(number, half - 1, pairs, generator)
    values = half + _distinct(number, half, bindings * pairs, generator)
    inputs = torch.randint(vocab_size, (number, length), generator=generator)
    inputs[:, 0 : 2 * pairs : 2], inputs[:, 1 : 2 * pairs : 2] = keys, values[:, :pairs]
    if rewriting:
        order = torch.rand(number, pairs, generator=generator).argsort(dim=1)
        values = values[:, pairs:]
        inputs[:, 2 * pairs : 4 * pairs : 2] = keys.gather(1, order)
        inputs[:, 2 * pairs + 1 : 4 * pairs : 2] = values.gather(1, order)
    weights = slot_weights(length, pairs, power, rewriting)
    queries = 2 * bindings * pairs + 2 * _weighted_draws(number, weights, pairs, generator)
    inputs.scatter_(1, queries, keys)
    labels = torch.full_like(inputs, IGNORE_INDEX).scatter_(1, queries, values)
    return Examples(inputs, labels, queries, values)


def _distinct(number: int, choices: int, count: int, generator: torch.Generator) -> Tensor:
    """[number, count] integers below ``choices``, distinct in every row, uniformly: the ranks of random numbers."""
    rows = max(1, _BLOCK_ENTRIES // choices)
    parts = [
        torch.rand(min(rows, number - start), choices, generator=generator).topk(count, dim=1).indices
        for start in range(0, number, rows)
    ]
    return torch.cat(parts) if parts else torch.empty(0, count, dtype=torch.long)


def _weighted_draws(number: int, weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[number, count] indices without replacement, in the order drawn. The largest ``log w + Gumbel noise`` come in
    exactly the order of successive draws with probability proportional to w among those that are left."""
    uniform = torch.rand(number, len(weights), generator=generator, dtype=torch.float64).clamp_min(1e-300)
    return (weights.log() - (-uniform.log()).log()).topk(count, dim=1).indices
