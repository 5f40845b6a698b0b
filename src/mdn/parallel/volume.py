"""How many bytes a rank receives in one layer, by formula: what context parallelism costs before it is tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mdn.parallel.plan import RANGES_PER_RANK, node_size

STATE_BYTES = 4
"""summaries are float32"""


@dataclass(frozen=True)
class Volume:
    """Bytes that one rank receives in one layer."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def layer_volume(mixer: Any, tokens: int, ranks: int, layout: str = "contiguous", activation_bytes: int = 4) -> Volume:
    """Of a mixer (``mdn.layers.Mixer``) that sees ``tokens`` tokens on each of ``ranks`` ranks, all of one document.

    A recurrent state of ``rows`` x V numbers per head sends E and A once in the forward pass and the gradient of E
    in the backward pass; a convolution sends its last inputs, attention all its keys and values. No A is sent if no
    range has one before and one after it.
    """
    if ranks == 1:
        return Volume(0, 0)
    shapes = {name: state.shape for name, state in mixer.state_shapes().items()}
    near = node_size(ranks, None)
    maps = RANGES_PER_RANK[layout] * (near - 1 + ranks // near - 1)
    matrices = [shape for shape in shapes.values() if len(shape) == 3]  # heads, rows, V
    forward = backward = 0
    if matrices:
        heads, _, value_dim = matrices[0]
        rows = sum(shape[1] for shape in matrices)
        columns_of_A = rows if RANGES_PER_RANK[layout] * ranks > 2 else 0
        forward += maps * STATE_BYTES * heads * rows * (value_dim + columns_of_A)
        backward += maps * STATE_BYTES * heads * rows * value_dim
    for name, shape in shapes.items():
        if name == "conv":
            both = RANGES_PER_RANK[layout] * (ranks - 1) * activation_bytes * shape[0] * shape[1]
        elif mixer.cache_type == "full_attention":  # keys and values of one token
            both = (ranks - 1) * tokens * activation_bytes * shape[0] * shape[1]
        else:
            continue
        forward, backward = forward + both, backward + both
    return Volume(forward, backward)
