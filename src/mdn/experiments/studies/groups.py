"""Word problems of finite groups: elements in, the product of all elements so far out.

Parity and addition modulo n are cyclic groups. S3 and A5 are permutations; A5 is the smallest group that is not
solvable, for which no model of constant depth without a recurrence of enough power is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch
from torch import Tensor

from mdn.experiments.tiny_training import LabelledTokens

Permutation = tuple[int, ...]


def then(first: Permutation, second: Permutation) -> Permutation:
    """What ``first`` followed by ``second`` does to every place."""
    return tuple(second[place] for place in first)


def is_even(permutation: Permutation) -> bool:
    pairs = ((i, j) for i in range(len(permutation)) for j in range(i))
    return sum(permutation[j] > permutation[i] for i, j in pairs) % 2 == 0


def product_table(elements: Sequence[Permutation]) -> Tensor:
    """[n, n]: the number of element i followed by element j. The first element must be the identity."""
    number = {element: place for place, element in enumerate(elements)}
    return torch.tensor([[number[then(first, second)] for second in elements] for first in elements])


def cyclic(order: int) -> list[Permutation]:
    return [tuple((place + shift) % order for place in range(order)) for shift in range(order)]


def symmetric(degree: int) -> list[Permutation]:
    return list(permutations(range(degree)))


def alternating(degree: int) -> list[Permutation]:
    return [element for element in permutations(range(degree)) if is_even(element)]


GROUPS = {"parity": cyclic(2), "mod 5": cyclic(5), "S3": symmetric(3), "A5": alternating(5)}


def word_problem(number: int, length: int, table: Tensor, generator: torch.Generator) -> LabelledTokens:
    """Uniform elements, each a token; the label of a token is the product of the elements up to it."""
    inputs = torch.randint(len(table), (number, length), generator=generator)
    products, product = [], torch.zeros(number, dtype=torch.long)
    for t in range(length):
        product = table[product, inputs[:, t]]
        products.append(product)
    return LabelledTokens(inputs, torch.stack(products, dim=1))
