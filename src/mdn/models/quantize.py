"""Packed weights for a whole model: every linear layer and the embedding, in one format.

What a model keeps in float32 is small: norms, convolutions, the gates' own parameters.
"""

from __future__ import annotations

from torch import nn

from mdn.layers.linear import Packed, PackedEmbedding, PackedLinear, SharedInput


def pack_modules(model: nn.Module, format: str, fill: bool) -> None:
    """Replaces every ``nn.Linear`` and ``nn.Embedding`` by its packed counterpart, with its weights if ``fill``."""
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if isinstance(module, nn.Linear | nn.Embedding):
                setattr(parent, name, _packed(module, format, fill))
    for parent in model.modules():
        _join_projections(parent)


def _packed(module: nn.Linear | nn.Embedding, format: str, fill: bool) -> Packed:
    outputs, inputs = module.weight.shape
    device = module.weight.device
    packed: Packed
    if isinstance(module, nn.Linear):
        packed = PackedLinear(outputs, inputs, format, module.bias is not None, device)
        if module.bias is not None and packed.bias is not None and fill:
            packed.bias.data.copy_(module.bias.detach())
    else:
        packed = PackedEmbedding(outputs, inputs, format, device)
    if fill:
        packed.fill(module.weight)
    return packed


def _join_projections(parent: nn.Module) -> None:
    """One matrix for the kernel of all projections that ``parent`` says read the same vector."""
    maps = (_first_map(getattr(parent, name, None)) for name in getattr(parent, "reads_same_input", ()))
    members = [module for module in maps if isinstance(module, PackedLinear)]
    if len(members) > 1:
        SharedInput(members)


def _first_map(module: nn.Module | None) -> nn.Module | None:
    """The map that reads the input: of a low-rank one the first half."""
    return module[0] if isinstance(module, nn.Sequential) else module
