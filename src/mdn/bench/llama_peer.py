"""llama.cpp as a peer: a random model of LLaMA's shape, as many weights per token as ours, decoded at batch 1.

It comes as a Python wheel (``pip install xllamacpp gguf``), which nothing here depends on.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

WIDTH, HIDDEN, VOCABULARY, HEADS = 1024, 2816, 32000, 16
PER_LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN
FEW, MANY = 4, 36
"""tokens of the two completions whose difference is timed"""


def why_no_llama() -> str | None:
    """None where llama.cpp can be used, else what is missing."""
    for name in ("xllamacpp", "gguf"):
        try:
            importlib.import_module(name)
        except ImportError:
            return f"{name} is not installed (pip install xllamacpp gguf)"
    return None


class LlamaPeer:
    """A model in ``format`` (f32, bf16, q8_0, q4_0) that reads about ``weights`` weights per token."""

    def __init__(self, folder: Path, format: str, weights: int):
        layers = max(1, round((weights - VOCABULARY * WIDTH) / PER_LAYER))
        self.weights = layers * PER_LAYER + VOCABULARY * WIDTH
        self.scale = weights / self.weights
        path = folder / f"{format}.gguf"
        _write(path, format, layers)
        xllamacpp: Any = importlib.import_module("xllamacpp")
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = 256
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = torch.get_num_threads()
        self.server = xllamacpp.Server(parameters)

    def seconds_per_token(self, rounds: int = 4) -> float:
        """The minimum of a few runs, scaled to the requested number of weights."""
        self._complete(FEW)
        return min(self._complete(MANY) for _ in range(rounds)) * self.scale

    def _complete(self, tokens: int) -> float:
        request = {"prompt": [1, 300, 301, 302], "n_predict": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.server.handle_completions({**request, "cache_prompt": False})
        answer = answer if isinstance(answer, dict) else json.loads(answer)
        timings = answer["timings"]
        return float(timings["predicted_ms"]) / 1e3 / float(timings["predicted_n"])


def _write(path: Path, format: str, layers: int) -> None:
    gguf: Any = importlib.import_module("gguf")
    kind = getattr(gguf.GGMLQuantizationType, format.upper())
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(VOCABULARY)
    _add_tokenizer(writer)
    random = np.random.default_rng(0)
    stored: dict[tuple[int, int], Any] = {}

    def add(name: str, rows: int, columns: int) -> None:
        if (rows, columns) not in stored:  # the same random numbers for every matrix of a shape: quick to write
            values = random.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)
            stored[rows, columns] = values if format == "f32" else gguf.quants.quantize(values, kind)
        if format == "f32":
            writer.add_tensor(name, stored[rows, columns])
        else:
            writer.add_tensor(name, stored[rows, columns], raw_dtype=kind)

    ones = np.ones(WIDTH, np.float32)
    add("token_embd.weight", VOCABULARY, WIDTH)
    add("output.weight", VOCABULARY, WIDTH)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(layers):
        block = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{block}{norm}.weight", ones)
        for name in ("q", "k", "v", "output"):
            add(f"{block}attn_{name}.weight", WIDTH, WIDTH)
        for name in ("gate", "up"):
            add(f"{block}ffn_{name}.weight", HIDDEN, WIDTH)
        add(f"{block}ffn_down.weight", WIDTH, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any) -> None:
    """Any one will do: prompts are token numbers."""
    special, letters = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    rest = VOCABULARY - len(special) - len(letters)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(special + letters + [f"t{number}" for number in range(rest)])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * rest)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
