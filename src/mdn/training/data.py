"""From a recipe's `data` and `tokenizer` blocks to token streams: the one call the trainer makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mdn.training.corpus import open_corpus
from mdn.training.dataset import TokenStream, held_out_stream, training_stream
from mdn.training.schema import Recipe
from mdn.training.token_cache import TokenCache, corpus_key, default_cache_dir, prepare_tokens, split_documents
from mdn.training.tokenizer import prepare_tokenizer


@dataclass(frozen=True)
class PreparedData:
    cache: TokenCache
    tokenizer: Path
    training: TokenStream
    held_out: TokenStream


def prepare_data(recipe: Recipe) -> PreparedData:
    """Tokenizer and token cache of the recipe, made now or found; every rank may call this at the same time."""
    cache_dir = default_cache_dir(recipe.data)
    corpus = open_corpus(recipe.data, cache_dir)

    def training_texts() -> Iterator[str]:
        return (document.text for document in split_documents(corpus, recipe.data) if not document.held_out)

    tokenizer = prepare_tokenizer(recipe.tokenizer, corpus_key(corpus, recipe.data), cache_dir, training_texts)
    cache = prepare_tokens(corpus, recipe.data, tokenizer, cache_dir)
    held_out = held_out_stream(cache, recipe.data.held_out_bytes)
    if not held_out.bytes:
        raise ValueError(f"data.held_out={recipe.data.held_out} leaves no held-out text in {corpus.name}")
    return PreparedData(cache, tokenizer, training_stream(cache), held_out)
