"""The token streams of a recipe, and packed training sequences.

Documents are concatenated and cut into rows of T tokens, in an order fixed by the seed.

The stream of a split is  end d1 d1 d1 end d2 d2 end ...  The end-of-text id is the last target of a document and the
first input of the next, so a document's first token is predicted from `end` alone. With `reset_at_documents` a pack
restarts its state at every `end`.

Row number i of the run (counted over all ranks and epochs) is always the same text, so neither a resume nor another
number of ranks changes the order.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from mdn.common.loading import import_plugins
from mdn.training.corpus import open_corpus
from mdn.training.recipe import Recipe
from mdn.training.tokenizer import prepare_tokenizer
from mdn.training.tokens import TokenCache, corpus_key, default_cache_dir, prepare_tokens, split_documents


class TokenStream:
    """The chosen documents of a cache as one long array of ids, read through the memory map."""

    def __init__(self, cache: TokenCache, documents: np.ndarray) -> None:
        self.cache = cache
        self.documents = documents
        lengths = cache.documents["tokens"][documents] + 1
        # starts[d] is where document d starts in the stream; position 0 is the `end` before the first document.
        self.starts = np.concatenate([[1], 1 + np.cumsum(lengths)])
        self.bytes = int(cache.documents["bytes"][documents].sum())

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids of positions `begin..end`, and the offsets in them at which a document's `end` marker begins it."""
        ids = np.empty(end - begin, dtype=np.int64)
        if begin == 0:
            ids[0] = self.cache.end_id
        first = max(int(np.searchsorted(self.starts, max(begin, 1), side="right")) - 1, 0)
        position, number = max(begin, 1), first
        while position < end:
            start, stop = int(self.starts[number]), min(int(self.starts[number + 1]), end)
            piece = self.cache.read(int(self.documents[number]), position - start, stop - start)
            ids[position - begin : stop - begin] = piece
            position, number = stop, number + 1
        beginnings = self.starts[:-1] - 1
        inside = beginnings[np.searchsorted(beginnings, begin) : np.searchsorted(beginnings, end)]
        return ids, inside - begin


def training_stream(cache: TokenCache) -> TokenStream:
    return TokenStream(cache, np.flatnonzero(~cache.documents["held_out"]))


def held_out_stream(cache: TokenCache, max_bytes: int | None) -> TokenStream:
    """Held-out documents in the order of their digests (a fair sample of the corpus), up to `max_bytes` of text."""
    documents = np.flatnonzero(cache.documents["held_out"])
    documents = documents[np.argsort(cache.documents["digest"][documents], kind="stable")]
    if max_bytes is not None:
        before = np.cumsum(cache.documents["bytes"][documents]) - cache.documents["bytes"][documents]
        documents = documents[before < max_bytes]
    return TokenStream(cache, documents)


class PackedSequences(Dataset):
    """Row i of the run: epoch and position follow from i alone. `length` rows in total."""

    def __init__(self, stream: TokenStream, sequence_length: int, length: int, seed: int) -> None:
        self.stream = stream
        self.sequence_length = sequence_length
        self.length = length
        self.seed = seed
        self.rows = (len(stream) - 1) // sequence_length
        if self.rows == 0:
            raise ValueError(
                f"data: the training text has {len(stream)} tokens, but one sequence needs "
                f"training.sequence_length={sequence_length}"
            )
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        epoch, place = divmod(int(index), self.rows)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
            self._epoch = epoch
        begin = int(self._order[place]) * self.sequence_length
        ids, beginnings = self.stream.read(begin, begin + self.sequence_length + 1)
        return {"ids": ids, "beginnings": beginnings[beginnings < self.sequence_length]}


class PackCollator:
    """Rows of T + 1 ids -> a batch `[b, T]`, or one pack `[1, b * T]` with `cu_seqlens` when documents reset the state.

    `shift_labels` holds the next id of every position, so the model has nothing to shift and no target is lost.
    """

    def __init__(self, reset_at_documents: bool) -> None:
        self.reset_at_documents = reset_at_documents

    def __call__(self, rows: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
        ids = torch.from_numpy(np.stack([row["ids"] for row in rows]))
        inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        if not self.reset_at_documents:
            return {"input_ids": inputs, "shift_labels": targets}
        length = inputs.shape[1]
        cuts = {inputs.numel()}
        for number, row in enumerate(rows):
            cuts.update([number * length, *(row["beginnings"] + number * length).tolist()])
        inputs, targets = inputs.view(1, -1), targets.view(1, -1)
        boundaries = torch.tensor(sorted(cuts), dtype=torch.int64)
        return {"input_ids": inputs, "shift_labels": targets, "cu_seqlens": boundaries}


@dataclass(frozen=True)
class PreparedData:
    cache: TokenCache
    tokenizer: Path
    training: TokenStream
    held_out: TokenStream


def prepare_data(recipe: Recipe) -> PreparedData:
    """Tokenizer and token cache of the recipe, made now or found; every rank may call this at the same time."""
    cache_dir = default_cache_dir(recipe.data)
    import_plugins(recipe.plugins)
    try:
        return _prepare(recipe, cache_dir)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR):
            raise
        raise OSError(
            f"the cache {cache_dir} cannot be written ({error.strerror}: {error.filename}); set MDN_CACHE or "
            "data.cache_dir to a directory that can"
        ) from None


def _prepare(recipe: Recipe, cache_dir: Path) -> PreparedData:
    corpus = open_corpus(recipe.data, cache_dir)
    key = corpus_key(corpus, recipe.data)

    def training_texts() -> Iterator[str]:
        return (document.text for document in split_documents(corpus, recipe.data) if not document.held_out)

    tokenizer = prepare_tokenizer(recipe.tokenizer, key, cache_dir, training_texts)
    cache = prepare_tokens(corpus, key, recipe.data, tokenizer, cache_dir)
    held_out = held_out_stream(cache, recipe.data.held_out_bytes)
    if not held_out.bytes:
        raise ValueError(f"data.held_out={recipe.data.held_out} leaves no held-out text in {corpus.name}")
    return PreparedData(cache, tokenizer, training_stream(cache), held_out)
