"""Tokenise once: a memory-mapped cache of token ids, keyed by the corpus' content and the tokenizer.

    <cache>/<key>/shard-00000.bin    ids of consecutive documents, each followed by the end-of-text id (uint16, uint32)
    <cache>/<key>/shard-00000.json   the number of source documents in it, and the SHA-256 of its other files
    <cache>/<key>/shard-00000.npy    one row per document: start, tokens, bytes, digest, held_out; written last
    <cache>/<key>/index.json         the shards and all SHA-256; written last, when the cache is complete

A shard is complete when its .npy exists, so a killed preparation resumes after its last complete shard. Which documents
are held out depends on their content alone, so that copies of one text cannot be on both sides.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np

from mdn.common.files import exclusive_lock, read_json, write_atomically
from mdn.common.hardware import available_cores
from mdn.common.progress import progress
from mdn.common.spawning import spawned_pool
from mdn.training.corpus import Corpus, Document, split_documents
from mdn.training.recipe import DataSettings
from mdn.training.tokenizer import Encoder

DOCUMENT = np.dtype([("start", "<i8"), ("tokens", "<i8"), ("bytes", "<i8"), ("digest", "<u8"), ("held_out", "?")])
FORMAT = 2
SMALL_CORPUS = 4 << 20  # below this many bytes, starting worker processes takes longer than the work


def default_cache_dir(settings: DataSettings) -> Path:
    given = settings.cache_dir or os.environ.get("MDN_CACHE") or "~/.cache/mdn"
    return Path(given).expanduser()


def corpus_key(corpus: Corpus, settings: DataSettings) -> str:
    parts = (FORMAT, corpus.fingerprint(), settings.held_out, settings.max_bytes)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def cache_key(corpus: str, tokenizer: Path) -> str:
    """Hash of the corpus' key and the tokenizer's files."""
    digest = hashlib.sha256(corpus.encode())
    for file in sorted(tokenizer.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:20]


class TokenCache:
    """A complete cache, memory-mapped: `documents` (all, in order) and `read(document, begin, end)`.

    Everything is checked against the SHA-256 in the index: the tables here, the ids of a shard when it is first read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.index = self._read_index()
        self.end_id: int = self.index["end_id"]
        self.vocab_size: int = self.index["vocab_size"]
        names: list[str] = self.index["shards"]
        tables = [np.load(io.BytesIO(self._checked(f"{name}.npy"))) for name in names]
        self.documents = np.concatenate(tables)
        self.shard_of = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        self._shards: list[np.ndarray | None] = [None] * len(names)
        for name in names:
            self._check_size(f"{name}.bin")

    def read(self, document: int, begin: int, end: int) -> np.ndarray:
        """Ids `begin..end` of one document; its last id, at index `tokens`, is the end of text."""
        start = int(self.documents["start"][document])
        return self._shard(int(self.shard_of[document]))[start + begin : start + end]

    def __getstate__(self) -> dict[str, Any]:
        """Without the memory maps, which would travel to a worker process as copies of the whole cache."""
        return self.__dict__ | {"_shards": [None] * len(self._shards)}

    def _shard(self, number: int) -> np.ndarray:
        """The ids of one shard, whose content is checked once in every process that reads it."""
        shard = self._shards[number]
        if shard is None:
            name = f"{self.index['shards'][number]}.bin"
            content = self._checked(name)
            dtype = np.dtype(self.index["dtype"])
            shard = np.memmap(self.directory / name, dtype=dtype, mode="r") if content else np.empty(0, dtype)
            self._shards[number] = shard
        return shard

    def _read_index(self) -> dict[str, Any]:
        try:
            index = read_json(self.directory / "index.json")
            if index.pop("sha256", None) != _digest(index):
                raise ValueError("its content has changed since it was written")
        except ValueError as error:
            raise self._damage("index.json", str(error)) from None
        return index

    def _check_size(self, name: str) -> int:
        expected = self.index["files"][name]["bytes"]
        try:
            actual = (self.directory / name).stat().st_size
        except OSError as error:
            raise self._damage(name, error.strerror or str(error)) from None
        if actual != expected:
            raise self._damage(name, f"it has {actual} bytes instead of {expected}")
        return actual

    def _checked(self, name: str) -> bytes | mmap.mmap:
        """The bytes of a file of the cache, verified."""
        size = self._check_size(name)
        with (self.directory / name).open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        if hashlib.sha256(content).hexdigest() != self.index["files"][name]["sha256"]:
            raise self._damage(name, "its content has changed since it was written")
        return content

    def _damage(self, name: str, reason: str) -> ValueError:
        return ValueError(
            f"token cache {self.directory} is damaged: {name}: {reason}; delete that directory to make the cache again"
        )


def _digest(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def prepare_tokens(corpus: Corpus, key: str, settings: DataSettings, tokenizer: Path, cache_dir: Path) -> TokenCache:
    """The token cache of this corpus and tokenizer; completed now if necessary, by one process at a time.

    `key` is the corpus' `corpus_key`. A complete cache is only read, so it may be on a read-only disk.
    """
    directory = cache_dir / f"tokens-{cache_key(key, tokenizer)}"
    if not (directory / "index.json").is_file():
        with exclusive_lock(cache_dir / f"{directory.name}.lock"):
            if not (directory / "index.json").is_file():
                directory.mkdir(parents=True, exist_ok=True)
                _write_shards(corpus, settings, tokenizer, directory)
    return TokenCache(directory)


def _shard_bytes(corpus: Corpus) -> int:
    """Few enough files for a large corpus, enough shards to keep every worker busy on a small one."""
    return (1 << 20) if corpus.total_bytes is not None and corpus.total_bytes < (256 << 20) else (64 << 20)


def _write_shards(corpus: Corpus, settings: DataSettings, tokenizer: Path, directory: Path) -> None:
    names = _whole_shards(directory)
    consumed = sum(read_json(directory / f"{name}.json")["consumed"] for name in names)
    total = min(filter(None, (corpus.total_bytes, settings.max_bytes)), default=None)
    done = sum(int(np.load(directory / f"{name}.npy")["bytes"].sum()) for name in names)
    encoder = Encoder(tokenizer)
    title = f"tokenise {corpus.name}"[:40]
    with progress(total=total, initial=done, unit="B", unit_scale=True, desc=title) as bar:
        batches = _batches(split_documents(corpus, settings, consumed), _shard_bytes(corpus), settings.max_bytes, done)
        for name, size in _encode_all(batches, len(names), tokenizer, directory, _workers(corpus, settings)):
            names.append(name)
            bar.update(size)
    if not names:
        raise ValueError(f"data: {corpus.name} holds no text")
    facts = [read_json(directory / f"{name}.json")["files"] for name in names]
    index = {
        "format": FORMAT,
        "shards": names,
        "dtype": encoder.dtype.str,
        "end_id": encoder.end_id,
        "vocab_size": encoder.vocab_size,
        "corpus": corpus.name,
        "files": {file: of_file for files in facts for file, of_file in files.items()},
    }
    write_atomically(directory / "index.json", json.dumps(index | {"sha256": _digest(index)}, indent=1).encode())


def _workers(corpus: Corpus, settings: DataSettings) -> int:
    if corpus.total_bytes is not None and corpus.total_bytes < SMALL_CORPUS:
        return 1
    return settings.workers or min(available_cores(), 16)


def _whole_shards(directory: Path) -> list[str]:
    """Names of the complete shards, from number 0 up to the first gap."""
    names: list[str] = []
    while (directory / f"shard-{len(names):05d}.npy").is_file():
        names.append(f"shard-{len(names):05d}")
    return names


def _batches(
    documents: Iterator[Document], shard_bytes: int, max_bytes: int | None, done: int
) -> Iterator[tuple[list[Document], int]]:
    """Groups of consecutive documents, each with the number of source documents it covers (empty ones count)."""
    batch: list[Document] = []
    size = consumed = 0
    for document in documents:
        if max_bytes is not None and done >= max_bytes:
            break
        consumed += 1
        if document.size:
            batch.append(document)
            size += document.size
            done += document.size
        if size >= shard_bytes:
            yield batch, consumed
            batch, size, consumed = [], 0, 0
    if batch:
        yield batch, consumed


def _encode_all(
    batches: Iterator[tuple[list[Document], int]], first: int, tokenizer: Path, directory: Path, workers: int
) -> Iterator[tuple[str, int]]:
    """Encode and write every batch, in parallel but counted in order."""
    numbered = ((f"shard-{first + i:05d}", batch, consumed) for i, (batch, consumed) in enumerate(batches))
    if workers == 1:
        _start_worker(tokenizer)
        for name, batch, consumed in numbered:
            yield name, _encode_shard(directory, name, batch, consumed)
        return
    with spawned_pool(workers, _start_process, (tokenizer,)) as pool:
        waiting: deque[tuple[str, Future[int]]] = deque()
        for name, batch, consumed in numbered:
            waiting.append((name, pool.submit(_encode_shard, directory, name, batch, consumed)))
            if len(waiting) > 2 * workers:  # bounds the text held in memory
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()


_encoder: Encoder | None = None


def _start_worker(tokenizer: Path) -> None:
    global _encoder
    _encoder = Encoder(tokenizer)


def _start_process(tokenizer: Path) -> None:
    """A worker leaves Ctrl-C to its parent and does not outlive it, even when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    _start_worker(tokenizer)


def _encode_shard(directory: Path, name: str, batch: list[Document], consumed: int) -> int:
    """Write one shard: ids, then how many source documents it consumed, then the table that completes it."""
    assert _encoder is not None
    end = np.array([_encoder.end_id], dtype=_encoder.dtype)
    encoded = _encoder.encode([document.text for document in batch])
    table = np.empty(len(batch), DOCUMENT)
    table["tokens"] = [len(ids) for ids in encoded]
    table["start"] = np.cumsum(table["tokens"] + 1) - (table["tokens"] + 1)
    table["bytes"] = [document.size for document in batch]
    table["digest"] = [document.digest for document in batch]
    table["held_out"] = [document.held_out for document in batch]
    buffer = io.BytesIO()
    np.save(buffer, table)
    contents = {
        f"{name}.bin": np.concatenate([part for ids in encoded for part in (ids, end)]).tobytes(),
        f"{name}.npy": buffer.getvalue(),
    }
    files = {
        file: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for file, content in contents.items()
    }
    write_atomically(directory / f"{name}.bin", contents[f"{name}.bin"])
    write_atomically(directory / f"{name}.json", json.dumps({"consumed": consumed, "files": files}).encode())
    write_atomically(directory / f"{name}.npy", contents[f"{name}.npy"])
    return int(table["bytes"].sum())
