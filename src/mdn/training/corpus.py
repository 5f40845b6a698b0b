"""Where documents come from, and which of them are held out.

A corpus is the Python standard library, local files, or a dataset on the Hub. It yields its documents in a fixed order
(`documents(start)`), a fingerprint of its content, and its size where known. A document is a string; empty ones are
passed on, so that `start` counts what the source counts. `split_documents` adds the side of the split.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from mdn.common.errors import nearest
from mdn.common.files import read_json, write_atomically
from mdn.training.recipe import SOURCES, DataSettings

SUFFIXES = (".txt", ".jsonl", ".parquet")

# Tests are left out because they repeat one another, `encodings` because it is generated tables.
_STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}


class Corpus(Protocol):
    """What the token cache needs to know about a body of text."""

    name: str
    total_bytes: int | None

    def fingerprint(self) -> str: ...

    def documents(self, start: int = 0) -> Iterator[str]: ...


class FileCorpus:
    """Documents of local files: a .txt (or .py) file is one document, a .jsonl line or .parquet row another."""

    def __init__(self, name: str, files: list[Path], text_field: str, cache_dir: Path) -> None:
        self.name = name
        self.files = files
        self.text_field = text_field
        self.cache_dir = cache_dir
        self.total_bytes: int | None = sum(path.stat().st_size for path in files)

    def fingerprint(self) -> str:
        """A hash of the contents in order, not of names or places: a moved corpus keeps its cache."""
        digest = hashlib.sha256(self.text_field.encode())
        memory = _HashMemory(self.cache_dir / "file-hashes.json")
        for path in self.files:
            digest.update(f"{path.suffix}:{memory.hash_of(path)};".encode())
        memory.save()
        return digest.hexdigest()

    def documents(self, start: int = 0) -> Iterator[str]:
        yield from islice((text for path in self.files for text in self._texts(path)), start, None)

    def _texts(self, path: Path) -> Iterator[str]:
        if path.suffix == ".jsonl":
            yield from self._lines(path)
        elif path.suffix == ".parquet":
            yield from self._rows(path)
        else:
            yield path.read_text(encoding="utf-8", errors="replace")

    def _lines(self, path: Path) -> Iterator[str]:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield _text_of(json.loads(line), self.text_field)
                except (json.JSONDecodeError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{path}, line {number}: expected a JSON object with a text field {self.text_field!r} "
                        f"(data.text_field); {type(error).__name__}: {error}"
                    ) from None

    def _rows(self, path: Path) -> Iterator[str]:
        import pyarrow.parquet

        table = pyarrow.parquet.ParquetFile(path)
        if self.text_field not in table.schema_arrow.names:
            raise ValueError(
                f"{path} has no column {self.text_field!r} (data.text_field), only {table.schema_arrow.names}"
            )
        for batch in table.iter_batches(columns=[self.text_field], batch_size=1024):
            for row in batch.to_pylist():
                try:
                    yield _text_of(row, self.text_field)
                except TypeError as error:
                    raise ValueError(f"{path}: {error} (data.text_field)") from None


class HubCorpus:
    """Documents of a Hub dataset, as a stream or downloaded first."""

    def __init__(self, settings: DataSettings, cache_dir: Path) -> None:
        assert settings.dataset is not None
        self.settings = settings
        self.name = settings.dataset
        self.total_bytes: int | None = settings.max_bytes
        self.memory = cache_dir / "hub-revisions.json"

    def fingerprint(self) -> str:
        """The commit of the dataset identifies its content; the last one seen is used when the Hub is unreachable."""
        s = self.settings
        return hashlib.sha256(repr((s.dataset, s.subset, s.split, self._commit(), s.text_field)).encode()).hexdigest()

    def _commit(self) -> str:
        known = read_json(self.memory) if self.memory.is_file() else {}
        key = f"{self.settings.dataset}@{self.settings.revision or 'main'}"
        try:
            from huggingface_hub import HfApi

            commit = HfApi().dataset_info(self.name, revision=self.settings.revision, timeout=20).sha
        except Exception as error:
            if key not in known:
                raise ValueError(
                    f"data.dataset {self.name!r} is not in the cache and the Hub cannot be reached "
                    f"({type(error).__name__})"
                ) from None
            return known[key]
        write_atomically(self.memory, json.dumps({**known, key: commit}).encode())
        return str(commit)

    def documents(self, start: int = 0) -> Iterator[str]:
        try:
            from datasets import load_dataset
        except ImportError:
            raise ValueError(
                "data.source=hub needs the package `datasets`: pip install 'momentum-deltanet[hub]'"
            ) from None
        s = self.settings
        rows: Any = load_dataset(self.name, s.subset, split=s.split, streaming=s.streaming, revision=self._commit())
        if start:
            rows = rows.skip(start)
        for row in rows:
            try:
                yield _text_of(row, s.text_field)
            except (KeyError, TypeError) as error:
                raise ValueError(
                    f"data.dataset {self.name!r}: expected rows with a text field {s.text_field!r} (data.text_field); "
                    f"{type(error).__name__}: {error}"
                ) from None


class _HashMemory:
    """Hashes of files by (path, size, modification time), so that a large corpus is not read at every start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.known: dict[str, str] = read_json(path)
        except (OSError, ValueError):
            self.known = {}
        self.changed = False

    def hash_of(self, path: Path) -> str:
        status = path.stat()
        key = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}"
        if key not in self.known:
            with path.open("rb") as file:
                self.known[key] = hashlib.file_digest(file, "sha256").hexdigest()
            self.changed = True
        return self.known[key]

    def save(self) -> None:
        if self.changed:
            with suppress(OSError):  # a cache that cannot be written is only slower
                write_atomically(self.path, json.dumps(self.known).encode())


def _text_of(row: Any, field: str) -> str:
    """The text of a row. Null is an empty document, but a row without the field is a KeyError."""
    text = "" if row[field] is None else row[field]
    if not isinstance(text, str):
        raise TypeError(f"field {field!r} holds {type(text).__name__}, not text")
    return text


def standard_library_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in root.rglob("*.py") if not _STDLIB_LEFT_OUT.intersection(p.relative_to(root).parts[:-1])]
    if not files:
        raise ValueError(f"data.source=stdlib: no Python sources in {root}; use data.source=files")
    return sorted(files)


def local_files(paths: tuple[str, ...]) -> list[Path]:
    """The readable files behind files and folders, folders in sorted order. Others in a folder are reported."""
    found: list[Path] = []
    ignored: list[Path] = []
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.is_file())
            inside = [p for p in files if p.suffix in SUFFIXES]
            ignored += [p for p in files if p.suffix not in SUFFIXES]
            if not inside:
                raise ValueError(f"data.paths: folder {given!r} has no {', '.join(SUFFIXES)} files")
            found += inside
        elif not path.is_file():
            raise ValueError(f"data.paths: no such file or folder: {given!r}")
        elif path.suffix not in SUFFIXES:
            raise ValueError(f"data.paths: {given!r} is not one of {', '.join(SUFFIXES)}")
        else:
            found.append(path)
    if ignored:
        kinds = ", ".join(sorted({p.suffix or "no suffix" for p in ignored}))
        print(
            f"note: data.paths: {len(ignored)} files are not read ({kinds}; first {ignored[0]}): only "
            f"{', '.join(SUFFIXES)} are",
            file=sys.stderr,
        )
    return found


def _standard_library(settings: DataSettings, cache_dir: Path) -> Corpus:
    return FileCorpus("the Python standard library", standard_library_files(), settings.text_field, cache_dir)


def _local_files(settings: DataSettings, cache_dir: Path) -> Corpus:
    files = local_files(settings.paths)
    return FileCorpus(", ".join(settings.paths), files, settings.text_field, cache_dir)


CORPORA: dict[str, Callable[[DataSettings, Path], Corpus]] = {
    "stdlib": _standard_library,
    "files": _local_files,
    "hub": HubCorpus,
}
"""How a corpus is made from its settings and the cache directory, by `data.source`. A plugin adds its own here."""


def open_corpus(settings: DataSettings, cache_dir: Path) -> Corpus:
    if settings.source not in CORPORA:
        close = nearest(settings.source, CORPORA)
        raise ValueError(
            f"data.source {settings.source!r} is unknown{close}; expected {', '.join(CORPORA)}, or one that a module "
            "of `plugins` adds to mdn.training.corpus.CORPORA"
        )
    if settings.options and settings.source in SOURCES:
        raise ValueError(f"data.options is given, but data.source={settings.source} has none")
    return CORPORA[settings.source](settings, cache_dir)


@dataclass(frozen=True)
class Document:
    text: str
    held_out: bool
    digest: int
    size: int  # bytes of UTF-8


def split_documents(corpus: Corpus, settings: DataSettings, start: int = 0) -> Iterator[Document]:
    """The documents from number `start` on, with their side of the split; a corpus of one document is cut in two.

    The first document is always held out, so that no corpus is without held-out text.
    """
    texts = corpus.documents()
    first = next(texts, "")
    second = next(texts, None)
    if second is None:
        yield from list(_cut(first, settings.held_out))[start:]
        return
    first_digest = _document(first, False).digest
    threshold = int(settings.held_out * 2**64)
    for text in corpus.documents(start):
        document = _document(text, False)
        held_out = document.digest < threshold or document.digest == first_digest
        yield Document(text, held_out, document.digest, document.size)


def _document(text: str, held_out: bool) -> Document:
    raw = text.encode("utf-8", errors="replace")
    return Document(text, held_out, int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little"), len(raw))


def _cut(text: str, held_out: float) -> Iterator[Document]:
    """The beginning for training and the end held out, cut after a line where there is one near."""
    middle = int(len(text) * (1 - held_out))
    line_end = text.find("\n", middle, middle + 2000)
    middle = line_end + 1 if line_end >= 0 else middle
    yield _document(text[:middle], False)
    yield _document(text[middle:], True)
