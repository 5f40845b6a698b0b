"""How the tokens of one model call lie in its tensors: one object, made once, read by every layer.

Either dense (``boundaries is None``): activations are ``[B, T, D]`` and row b is sequence b.
Or packed: activations are ``[1, total, D]`` and sequence n is the slice ``offsets[n]:offsets[n + 1]``. A pack is made
by the caller (``cu_seqlens``, restarting ``position_ids``) or by removing the padding of a batch, in which case
sequence n is row n of that batch and may have no token at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries


class TokenLayout:
    """The layout of one call.

    ``shape`` is (B, T) as the caller gave them, ``past_length`` the columns that the cache already holds, and
    ``key_mask`` (bool ``[B, past + T]``, attention layers only) says which of all columns are tokens.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        boundaries: SequenceBoundaries | None = None,
        *,
        unpadded: bool = False,
        past_length: int = 0,
        key_mask: Tensor | None = None,
        positions: Tensor | None = None,
    ):
        self.shape = shape
        self.boundaries = boundaries
        self.unpadded = unpadded
        self.past_length = past_length
        self.key_mask = key_mask
        self.shared: dict[str, Tensor] = {}  # what a layer leaves for later ones of the same call
        self._positions = positions
        self._rotary: dict[tuple, tuple[Tensor, Tensor]] = {}
        self._extended: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def num_sequences(self) -> int:
        return self.shape[0] if self.boundaries is None else self.boundaries.num_sequences

    # ---------------------------------------------------------------- padded <-> packed

    def enter(self, x: Tensor) -> Tensor:
        """From the caller's ``[B, T, ...]`` to what the layers see."""
        return self.boundaries.unpad(x) if self.unpadded and self.boundaries is not None else x

    def leave(self, x: Tensor) -> Tensor:
        """Back to the caller's ``[B, T, ...]`` (zeros where the mask is zero)."""
        return self.boundaries.pad(x) if self.unpadded and self.boundaries is not None else x

    # ---------------------------------------------------------------- positions

    def positions(self, device: torch.device) -> Tensor:
        """int64 ``[B or 1, T]``: each token's place in its own sequence, the cached part included."""
        if self._positions is None:
            self._positions = self._make_positions(device)
        return self._positions

    def _make_positions(self, device: torch.device) -> Tensor:
        time = self.shape[1]
        if self.key_mask is not None:
            positions = (self.key_mask.cumsum(-1) - 1).clamp_min(0)[:, -time:]
            return self.enter(positions)
        if self.boundaries is not None:
            return self.boundaries.positions.unsqueeze(0)
        return torch.arange(self.past_length, self.past_length + time, device=device).unsqueeze(0)

    def rotary(self, dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin of RoPE's angles, float32 ``[B or 1, T, 1, dim / 2]``; computed once per call."""
        if (dim, theta) not in self._rotary:
            frequency = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
            angle = self.positions(device).unsqueeze(-1).unsqueeze(-1) * frequency
            self._rotary[dim, theta] = angle.cos(), angle.sin()
        return self._rotary[dim, theta]

    # ---------------------------------------------------------------- room for the past in front of every sequence

    def extended_indices(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Indices into a pack in which every sequence has ``width`` extra places in front of it.

        Returns int64 (places of the tokens ``[total]``, of the extra places ``[N * width]``, of each sequence's last
        ``width`` entries ``[N * width]``). A short convolution puts its state into the extra places.
        """
        if width not in self._extended:
            boundaries = self.boundaries
            assert boundaries is not None
            cu_seqlens, sequence_ids = boundaries.cu_seqlens, boundaries.sequence_ids
            device = cu_seqlens.device
            tokens = torch.arange(boundaries.total, device=device) + (sequence_ids + 1) * width
            places = torch.arange(width, device=device)
            numbers = torch.arange(boundaries.num_sequences, device=device)
            front = ((cu_seqlens[:-1] + numbers * width).unsqueeze(-1) + places).reshape(-1)
            last = ((cu_seqlens[1:] + numbers * width).unsqueeze(-1) + places).reshape(-1)
            self._extended[width] = tokens, front, last
        return self._extended[width]
