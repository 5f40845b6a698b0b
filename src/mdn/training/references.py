"""What simple methods need for the same held-out text, in bits per byte: the scale on which a model's figure is read.

uniform    8 bits: every byte equally likely
unigram    byte frequencies of the training text (each count plus one), used as a code for the held-out text
xz         `xz -9` on the held-out text alone
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterator

import numpy as np

from mdn.training.dataset import TokenStream
from mdn.training.tokenizer import Encoder

UNIGRAM_BYTES = 5_000_000


def texts_of(stream: TokenStream, encoder: Encoder) -> Iterator[bytes]:
    """The documents of a stream, back from their tokens."""
    for document in stream.documents:
        ids = stream.cache.read(int(document), 0, int(stream.cache.documents["tokens"][document]))
        yield encoder.decode(ids)


def measure_references(training: TokenStream, held_out: TokenStream, encoder: Encoder) -> dict[str, float]:
    """Bits per byte of uniform, unigram and xz codes on the held-out stream."""
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
    xz = 8 * len(lzma.compress(target, preset=9)) / len(target)
    return {"uniform bytes": math.log2(256), "unigram bytes": unigram, "xz -9": xz}
