"""What a call of the model refuses: tokens and labels of the wrong shape, broken caches, rows that accelerate cut."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from mdn.layers import TokenLayout
from mdn.layers.cache_access import LayerState

IN_USE = "mdn_is_in_use"


def check_tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None, hidden_size: int) -> Tensor:
    """The one that is given, ``input_ids [B, T]`` or ``inputs_embeds [B, T, D]``."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    tokens = input_ids if inputs_embeds is None else inputs_embeds
    name, shape = ("input_ids", "[B, T]") if inputs_embeds is None else ("inputs_embeds", "[B, T, D]")
    if not isinstance(tokens, Tensor):
        raise ValueError(
            f"{name} must be a tensor {shape}, got {type(tokens).__name__}; a tokenizer makes it from text"
        )
    if tokens.dim() != (2 if inputs_embeds is None else 3):
        raise ValueError(f"{name} must have shape {shape}, got {list(tokens.shape)}")
    if inputs_embeds is not None and inputs_embeds.shape[-1] != hidden_size:
        raise ValueError(f"{name} must have shape {shape} with D = {hidden_size}, got {list(tokens.shape)}")
    return tokens


def check_embeds_dtype(inputs_embeds: Tensor, dtype: torch.dtype, packed: bool) -> None:
    """Autocast and ``packed`` weights convert what they multiply, but not float64."""
    converts = packed or torch.is_autocast_enabled(inputs_embeds.device.type)
    if inputs_embeds.dtype == dtype or (
        converts and inputs_embeds.dtype in (torch.float32, torch.bfloat16, torch.float16)
    ):
        return
    raise ValueError(f"inputs_embeds must be {dtype}, as the model is, got {inputs_embeds.dtype}")


def check_labels(name: str, labels: Tensor, layout: TokenLayout) -> None:
    if tuple(labels.shape) != layout.shape:
        raise ValueError(f"{name} must have the tokens' shape {list(layout.shape)}, got {list(labels.shape)}")


def mark_in_use(past_key_values: Any) -> None:
    """Before the layers run. The mark is on the first cache layer, because ``copy.copy(cache)`` has the same layers; an
    attention model's cache may get its layers during the call only, and is marked itself."""
    layers = past_key_values.layers
    setattr(layers[0] if layers else past_key_values, IN_USE, True)


def unmark(past_key_values: Any) -> None:
    """After the layers have run."""
    for place in (past_key_values, *past_key_values.layers[:1]):
        if hasattr(place, IN_USE):
            delattr(place, IN_USE)


def check_finished(past_key_values: Any) -> None:
    """Refuses a cache with the mark of a call that has not removed it: where an error or Ctrl-C came between, some
    layers have seen tokens that others have not. Only a cache without any tokens is as good as new."""
    layers = past_key_values.layers
    if not (hasattr(past_key_values, IN_USE) or (layers and hasattr(layers[0], IN_USE))):
        return
    for layer in layers:
        if layer.get_seq_length() or any(getattr(layer, "has_previous_state", {}).values()):
            raise ValueError(
                "past_key_values cannot be continued: a call that used it was interrupted or has not ended, and some "
                "layers may have seen tokens that others have not; start again from a copy or an empty cache"
            )


def check_batch(past_key_values: Any, layout: TokenLayout) -> None:
    """Before any layer has run, by the states of the first one. Each layer checks its own, too."""
    if past_key_values.layers:
        LayerState(past_key_values, 0, layout).check_batch()


def check_lengths(past_key_values: Any) -> None:
    """All layers must have seen the same columns: ``cache.crop`` shortens attention layers one after the other, up to
    the first recurrent one, which refuses."""
    lengths = [layer.get_seq_length() for layer in past_key_values.layers]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"past_key_values cannot be continued: its layers hold {lengths} columns, because a crop was refused; "
            "start again from a copy or an empty cache"
        )


def refuse_sequence_parallelism(parallelism: Any = None) -> None:
    """accelerate's sequence and context parallelism cut every row over the ranks, where each recurrent state would
    begin anew and attention see its own part only: the loss would look right and the gradients be wrong.

    ``parallelism`` is a ParallelismConfig, by default that of the running Accelerator.
    """
    accelerate_state = sys.modules.get("accelerate.state")
    if parallelism is None and accelerate_state is not None:
        parallelism = accelerate_state.AcceleratorState._shared_state.get("parallelism_config")
    for name in ("sp_size", "cp_size"):
        if getattr(parallelism, name, 1) > 1:
            raise ValueError(
                f"accelerate's ParallelismConfig({name}={getattr(parallelism, name)}) is not supported by this model: "
                "its layers carry a state along the sequence, which would restart on every rank; "
                f"train with {name}=1 and use mdn.parallel.ContextParallelPlan (in a recipe "
                "distributed.context_parallel)"
            )
