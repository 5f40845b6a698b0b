"""Noisy recall: every key is bound several times, mostly to one value; the right answer is the majority's.

    k3 v  k1 w  k3 u  k3 v  k1 w  ... | k1 . k3 .        the answer for k3 is v: two bindings of three

A memory that overwrites answers with the latest binding; one that averages answers with the most frequent one.
"""

from __future__ import annotations

import torch

from mdn.experiments.tiny_training import LabelledTokens
from mdn.ops.fused import IGNORE_INDEX

BINDINGS, AGREEING = 5, 3
KEYS, VALUES = 31, 16
FIRST_VALUE = KEYS + 1  # token 0 is unused, 1 .. KEYS are keys
VOCAB_SIZE = FIRST_VALUE + VALUES
CONSTANTS = {"bindings": BINDINGS, "agreeing": AGREEING, "keys": KEYS, "values": VALUES}
"""what decides the examples beside the seed: part of the settings of a cell"""


def sequence_length(keys: int) -> int:
    return 2 * keys * (BINDINGS + 1)


def generate_noisy_recall(number: int, keys: int, generator: torch.Generator) -> LabelledTokens:
    """``number`` examples with ``keys`` keys: all bindings in random order, then every key once, in random order.

    Of the BINDINGS bindings of a key AGREEING are to its value, the others to distinct wrong values. A question is
    followed by a random token.
    """
    if not 1 <= keys <= KEYS:
        raise ValueError(f"keys must be between 1 and {KEYS}, got {keys}")
    chosen = 1 + torch.rand(number, KEYS, generator=generator).argsort(dim=1)[:, :keys]
    # The first value is the true one; each of the next ones is bound once.
    values = FIRST_VALUE + torch.rand(number, keys, VALUES, generator=generator).argsort(dim=2)
    wrong = values[:, :, 1 : 1 + BINDINGS - AGREEING]
    bound = torch.cat([values[:, :, :1].expand(-1, -1, AGREEING), wrong], dim=2)
    pairs = torch.stack([chosen.unsqueeze(2).expand_as(bound), bound], dim=3).flatten(1, 2)  # [number, keys * 5, 2]
    order = torch.rand(number, keys * BINDINGS, generator=generator).argsort(dim=1)
    shown = pairs.gather(1, order.unsqueeze(2).expand_as(pairs)).flatten(1)
    asked = torch.rand(number, keys, generator=generator).argsort(dim=1)
    fillers = torch.randint(VOCAB_SIZE, (number, keys), generator=generator)
    questions = torch.stack([chosen.gather(1, asked), fillers], dim=2).flatten(1)
    inputs = torch.cat([shown, questions], dim=1)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    labels[:, shown.shape[1] :: 2] = values[:, :, 0].gather(1, asked)
    return LabelledTokens(inputs, labels)
