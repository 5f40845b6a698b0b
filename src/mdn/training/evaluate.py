"""How good a model is: held-out perplexity and bits per byte, what simple methods need for the same text, a sample.

Every id of the stream after its first is predicted once, in windows of T tokens (a window's first tokens see little
context, so the figures are slightly pessimistic). Bits per byte divides the bits of all ids, document ends included, by
the bytes of the text: what a compressor built on the model would need.

References, the scale on which that figure is read, in bits per byte of the same text:

uniform    8 bits: every byte equally likely
unigram    byte frequencies of the training text (each count plus one), used as a code for the held-out text
xz         `xz -9` on the held-out text alone
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from mdn.common.loading import load, prompt_ids
from mdn.common.progress import progress
from mdn.training.dataset import PackCollator, TokenStream
from mdn.training.mesh import RankMesh
from mdn.training.recipe import SampleSettings
from mdn.training.tokenizer import Encoder

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
    model: nn.Module,
    stream: TokenStream,
    group: list[tuple[int, int]],
    collator: PackCollator,
    mesh: RankMesh | None,
) -> torch.Tensor:
    """Sum of the negative log likelihoods of some windows (of this rank's tokens in them), in nats, float64."""
    rows = []
    for begin, end in group:
        ids, beginnings = stream.read(begin, end + 1)
        rows.append({"ids": ids, "beginnings": beginnings[beginnings < end - begin]})
    batch = collator(rows)
    device = next(model.parameters()).device
    batch = {key: value.to(device) for key, value in batch.items()}
    labels, weight = batch.pop("shift_labels"), 1.0
    if mesh is not None:
        batch, labels, weight = mesh.local(batch | {"shift_labels": labels})
    logits = model(**batch, use_cache=False).logits.flatten(0, 1).float()
    return weight * F.cross_entropy(logits, labels.flatten(), reduction="none").double().sum()


def evaluate(
    model: nn.Module,
    stream: TokenStream,
    sequence_length: int,
    reset_at_documents: bool,
    *,
    accelerator: Any = None,
    mesh: RankMesh | None = None,
    show: bool = True,
) -> dict[str, float]:
    """`loss` (nats per token), `perplexity`, `bits_per_byte`, and what they were measured on. All ranks take part."""
    rank, world = (0, 1) if mesh is None else (mesh.data_rank, mesh.shape.data)
    groups = _groups(stream, sequence_length)
    collator = PackCollator(reset_at_documents)
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    try:
        # Every rank makes the same number of calls (a sharded model needs all of them); extra ones weigh nothing.
        rounds = range(rank, -(-len(groups) // world) * world, world)
        for number in progress(rounds, desc="held-out text", unit="pass", disable=not show, leave=False):
            nats = _loss_of(model, stream, groups[number % len(groups)], collator, mesh).cpu()
            total += nats if number < len(groups) else 0.0
    finally:
        model.train(was_training)
    if accelerator is not None and accelerator.num_processes > 1:
        device = next(model.parameters()).device
        # Split into two float32 parts: not every backend reduces float64.
        high = total.float()
        parts = torch.stack([high, (total - high.double()).float()]).to(device)
        copies = 1 if mesh is None else mesh.shape.tensor  # ranks that computed the same sum
        total = accelerator.reduce(parts, reduction="sum").double().sum().cpu() / copies
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


UNIGRAM_BYTES = 5_000_000


def texts_of(stream: TokenStream, encoder: Encoder) -> Iterator[bytes]:
    """The documents of a stream, back from their tokens."""
    for document in stream.documents:
        ids = stream.cache.read(int(document), 0, int(stream.cache.documents["tokens"][document]))
        yield encoder.decode(ids)


def measure_references(
    training: TokenStream, held_out: TokenStream, encoder: Encoder, notes: list[str]
) -> dict[str, float]:
    """Bits per byte of uniform, unigram and xz codes on the held-out stream; `notes` gets what had to be left out."""
    counts = np.ones(256)
    seen = 0
    for text in texts_of(training, encoder):
        counts += np.bincount(np.frombuffer(text, dtype=np.uint8), minlength=256)
        seen += len(text)
        if seen > UNIGRAM_BYTES:
            break
    target = b"".join(texts_of(held_out, encoder))
    bits = -np.log2(counts / counts.sum())
    unigram = float(bits[np.frombuffer(target, dtype=np.uint8)].mean())
    references = {"uniform bytes": math.log2(256), "unigram bytes": unigram}
    try:
        references["xz -9"] = 8 * len(lzma.compress(target, preset=9)) / len(target)
    except MemoryError:
        notes.append("xz -9 reference left out: it needs about 700 MB of memory")
    return references


def complete(directory: Path, settings: SampleSettings) -> str:
    """The prompt and its continuation."""
    model, tokenizer = load(directory, device="cpu")
    ids = torch.tensor([prompt_ids(model, tokenizer, settings.prompt)])
    torch.manual_seed(0)  # the same model always gives the same sample
    choice = {"do_sample": True, "temperature": settings.temperature} if settings.temperature else {"do_sample": False}
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=settings.max_new_tokens, pad_token_id=0, **choice
    )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
