"""One step of vLLM's scheduler as the recurrent layers see it.

A step holds, in this order, the requests that decode one token each and those of whose prompts a part is read. vLLM's
metadata of its Mamba layers says so; what is added are the lengths of those parts as host integers, taken from the copy
that vLLM keeps on the host, so that no layer has to wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata, BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from mdn.layers import TokenLayout
from mdn.ops.boundaries import SequenceBoundaries


@dataclass
class StepMetadata(BaseMambaAttentionMetadata):
    prefill_boundaries: SequenceBoundaries | None = None
    """of the parts of prompts, which are packed behind the decoding tokens"""


class StepMetadataBuilder(BaseMambaAttentionMetadataBuilder[StepMetadata]):
    metadata_cls = StepMetadata
    needs_causal_conv1d_metadata = False

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **kwargs: Any,
    ) -> StepMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build, **kwargs)
        if metadata.num_prefills > 0:
            edges = common_attn_metadata.query_start_loc_cpu[-metadata.num_prefills - 1 :] - metadata.num_decode_tokens
            device = common_attn_metadata.query_start_loc.device
            cu_seqlens = edges.to(device, torch.int64, copy=True, non_blocking=True)
            metadata.prefill_boundaries = SequenceBoundaries(cu_seqlens, tuple(edges.tolist()))
        return metadata


class RecurrentBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "MDN_RECURRENT"

    @staticmethod
    def get_builder_cls() -> type[StepMetadataBuilder]:
        return StepMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


def recurrent_backend() -> Any:
    """The member of vLLM's enumeration that stands for the backend, added at the first call."""
    name = RecurrentBackend.get_name()
    if name not in MambaAttentionBackendEnum.__members__:
        MambaAttentionBackendEnum.register(name, f"{RecurrentBackend.__module__}.{RecurrentBackend.__qualname__}")
    return MambaAttentionBackendEnum[name]


class StepLayouts:
    """Where the tokens of one step lie, made once for all layers (which share values through them, see ``shared``)."""

    def __init__(self) -> None:
        self._decode: TokenLayout | None = None
        self._prefill: TokenLayout | None = None

    def decode(self, rows: int) -> TokenLayout:
        """One token in each of ``rows`` rows."""
        if self._decode is None:
            self._decode = TokenLayout((rows, 1))
        return self._decode

    def prefill(self, boundaries: SequenceBoundaries) -> TokenLayout:
        """One packed row."""
        if self._prefill is None:
            self._prefill = TokenLayout((1, boundaries.total), boundaries)
        return self._prefill
