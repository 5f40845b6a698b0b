"""Held-out perplexity and bits per byte.

Every id of the stream after its first is predicted once, in windows of T tokens (a window's first tokens see little
context, so the figures are slightly pessimistic). Bits per byte divides the bits of all ids, document ends included, by
the bytes of the text: what a compressor built on the model would need.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mdn.common.progress import progress
from mdn.training.dataset import PackCollator, TokenStream

PASS_TOKENS = 4096


def _groups(stream: TokenStream, length: int) -> list[list[tuple[int, int]]]:
    """Windows (begin, end) of `length` inputs, several to a pass; their targets cover positions 1.. of the stream."""
    whole = [(begin, begin + length) for begin in range(0, len(stream) - length, length)]
    together = max(PASS_TOKENS // length, 1)
    groups = [whole[i : i + together] for i in range(0, len(whole), together)]
    rest = len(whole) * length
    return [*groups, [(rest, len(stream) - 1)]] if rest < len(stream) - 1 else groups


@torch.no_grad()
def _loss_of(
    model: nn.Module, stream: TokenStream, group: list[tuple[int, int]], collator: PackCollator
) -> torch.Tensor:
    """Sum of the negative log likelihoods of some windows, in nats, float64."""
    rows = []
    for begin, end in group:
        ids, beginnings = stream.read(begin, end + 1)
        rows.append({"ids": ids, "beginnings": beginnings[beginnings < end - begin]})
    batch = collator(rows)
    device = next(model.parameters()).device
    inputs = {key: batch[key].to(device) for key in ("input_ids", "cu_seqlens") if key in batch}
    logits = model(**inputs, use_cache=False).logits.flatten(0, 1).float()
    return F.cross_entropy(logits, batch["shift_labels"].flatten().to(device), reduction="none").double().sum()


def evaluate(
    model: nn.Module,
    stream: TokenStream,
    sequence_length: int,
    reset_at_documents: bool,
    *,
    accelerator: Any = None,
    show: bool = True,
) -> dict[str, float]:
    """`loss` (nats per token), `perplexity`, `bits_per_byte`, and what they were measured on. All ranks take part."""
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
    groups = _groups(stream, sequence_length)
    collator = PackCollator(reset_at_documents)
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    try:
        # Every rank makes the same number of calls (a sharded model needs all of them); extra ones weigh nothing.
        rounds = range(rank, -(-len(groups) // world) * world, world)
        for number in progress(rounds, desc="held-out text", unit="pass", disable=not show, leave=False):
            nats = _loss_of(model, stream, groups[number % len(groups)], collator).cpu()
            total += nats if number < len(groups) else 0.0
    finally:
        model.train(was_training)
    if world > 1:
        device = next(model.parameters()).device
        # Split into two float32 parts: not every backend reduces float64.
        high = total.float()
        parts = torch.stack([high, (total - high.double()).float()]).to(device)
        total = accelerator.reduce(parts, reduction="sum").double().sum().cpu()
    tokens = len(stream) - 1
    loss = total.item() / tokens
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": total.item() / math.log(2) / stream.bytes,
        "tokens": tokens,
        "bytes": stream.bytes,
        "documents": len(stream.documents),
    }
