"""What a model's MDN layers computed on a text: gates and keys of every token and head.

    recorded = record_model(model, input_ids)      # one LayerRecord per MDN layer
    recorded = record_layer(layer, hidden_states)  # one layer on its own

Arrays are float64 with time first: gates ``[T, HV]``, keys ``[T, HV, K]`` (L2-normalised, repeated for value heads).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mdn.analysis.eigenvalues import GateSample
from mdn.layers.momentum_deltanet import MomentumDeltaNet
from mdn.ops.l2norm import l2norm


@dataclass(frozen=True)
class LayerRecord:
    layer: int
    gates: GateSample
    keys: np.ndarray


def _array(x: Tensor) -> np.ndarray:
    return x[0].detach().double().cpu().numpy()


@contextmanager
def _recording(layers: list[MomentumDeltaNet]) -> Iterator[list[LayerRecord]]:
    """Hooks on the layers' rule, which receives keys after the convolution and the gates."""
    records: list[LayerRecord] = []

    def hook_of(layer: MomentumDeltaNet) -> Any:
        def hook(module: nn.Module, args: tuple[()], inputs: dict[str, Any], output: Any) -> None:
            gates = inputs["gates"]
            direct = torch.zeros_like(gates.beta) if gates.direct is None else gates.direct
            sample = GateSample(
                *(_array(x) for x in (gates.log_alpha.exp(), gates.beta, gates.log_mu.exp(), gates.eta, direct))
            )
            keys = l2norm(inputs["k"].double()).repeat_interleave(layer.num_v_heads // layer.num_heads, dim=2)
            records.append(LayerRecord(int(layer.layer_idx or 0), sample, _array(keys)))

        return hook

    handles = [layer.rule.register_forward_hook(hook_of(layer), with_kwargs=True) for layer in layers]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def record_model(model: nn.Module, input_ids: Tensor) -> list[LayerRecord]:
    """One forward pass over ``input_ids`` ``[1, T]``."""
    layers = [module for module in model.modules() if isinstance(module, MomentumDeltaNet)]
    if not layers:
        raise ValueError("the model has no momentum_deltanet layer: there are no momentum gates to record")
    if input_ids.shape[0] != 1 or input_ids.shape[1] < 2:
        raise ValueError(f"input_ids must be [1, T] with at least 2 tokens, got {list(input_ids.shape)}")
    with _recording(layers) as records:
        model(input_ids=input_ids.to(next(model.parameters()).device), use_cache=False)
    return records


@torch.no_grad()
def record_layer(layer: MomentumDeltaNet, hidden_states: Tensor) -> LayerRecord:
    """One layer on hidden states ``[1, T, D]``."""
    with _recording([layer]) as records:
        layer(hidden_states)
    return records[0]


def load_model_and_tokens(source: str, text: Path, most: int) -> tuple[Any, Tensor]:
    """A trained model in evaluation mode, and ``[1, T]`` ids of the first ``most`` tokens of a text file."""
    from mdn.common.loading import load_model, load_tokenizer, start_token

    if not text.is_file():
        raise ValueError(f"--text {text} is not a file")
    model, tokenizer = load_model(source, dtype="float32"), load_tokenizer(source)
    content = text.read_text(encoding="utf-8", errors="replace")
    if not content.strip():
        raise ValueError(f"{text} has no text")
    # Eight bytes a token is more than any tokenizer here needs: a whole book is not tokenised for its first page.
    ids = tokenizer(content[: 8 * most + 64], add_special_tokens=False)["input_ids"]
    start = start_token(model, tokenizer)
    beginning = [] if start is None else [start]
    return model, torch.tensor([[*beginning, *ids][:most]], dtype=torch.long)
