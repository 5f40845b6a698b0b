"""One step of vLLM's scheduler as the recurrent layers see it.

A step holds, in this order, the requests that decode one token each and those of whose prompts a part is read. vLLM's
metadata of its Mamba layers describes them. This file adds the lengths of those parts as host integers, taken from the
copy that vLLM keeps on the host, so that no layer has to wait for the device, and computes once what all layers need.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata, BaseMambaAttentionMetadataBuilder

from mdn.layers import TokenLayout
from mdn.ops.boundaries import SequenceBoundaries
from mdn.vllm import RECURRENT_BACKEND


class StepBoundaries(NamedTuple):
    """Of a step that reads parts of prompts."""

    all: SequenceBoundaries
    """of every request: the decoding ones are sequences of one token"""
    prompts: SequenceBoundaries
    """of the parts of prompts alone"""


@dataclass
class StepMetadata(BaseMambaAttentionMetadata):
    """vLLM makes one for each group of layers with pages of their own; ``slots`` are numbers of such pages.

    What is cached here is made from tensors at the first layer, inside the step: a CUDA graph captures it too.
    """

    boundaries: StepBoundaries | None = None
    """None: all requests decode"""

    @cached_property
    def decoding_slots(self) -> Tensor:
        """int64 ``[rows]``; in a CUDA graph also for the rows that pad the batch, which share page 0."""
        assert self.state_indices_tensor_d is not None
        return self.state_indices_tensor_d[:, 0].long()

    @cached_property
    def prompt_slots(self) -> Tensor:
        """int64 ``[num_prefills]``"""
        assert self.state_indices_tensor_p is not None
        return self.state_indices_tensor_p.long()

    @cached_property
    def slots(self) -> Tensor:
        """int64 ``[num_reqs]``: of all requests."""
        return torch.cat([self.decoding_slots, self.prompt_slots])

    @cached_property
    def resumed(self) -> Tensor:
        """bool ``[num_reqs]``: something came before the tokens of this step."""
        assert self.has_initial_states_p is not None
        return torch.cat([torch.ones_like(self.decoding_slots, dtype=torch.bool), self.has_initial_states_p])


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
            edges, decoding = common_attn_metadata.query_start_loc_cpu, metadata.num_decode_tokens
            device = common_attn_metadata.query_start_loc.device
            metadata.boundaries = StepBoundaries(
                _boundaries(edges[: metadata.num_reqs + 1], device),
                _boundaries(edges[metadata.num_decodes : metadata.num_reqs + 1] - decoding, device),
            )
        return metadata


def _boundaries(edges: Tensor, device: torch.device) -> SequenceBoundaries:
    """From a tensor on the host."""
    cu_seqlens = edges.to(device, torch.int64, copy=True, non_blocking=True)
    return SequenceBoundaries(cu_seqlens, tuple(edges.tolist()))


class RecurrentBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return RECURRENT_BACKEND

    @staticmethod
    def get_builder_cls() -> type[StepMetadataBuilder]:
        return StepMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class StepLayouts:
    """Where the tokens of one step lie, made once for all layers (which share values through them, see ``shared``)."""

    def __init__(self) -> None:
        self._made: dict[str, TokenLayout] = {}

    def decode(self, rows: int) -> TokenLayout:
        """One token in each of ``rows`` rows."""
        if "decode" not in self._made:
            self._made["decode"] = TokenLayout((rows, 1))
        return self._made["decode"]

    def all(self, boundaries: SequenceBoundaries) -> TokenLayout:
        """All tokens of the step as one packed row."""
        return self._packed("all", boundaries)

    def prompts(self, boundaries: SequenceBoundaries) -> TokenLayout:
        """Those of the parts of prompts alone."""
        return self._packed("prompts", boundaries)

    def _packed(self, name: str, boundaries: SequenceBoundaries) -> TokenLayout:
        if name not in self._made:
            self._made[name] = TokenLayout((1, boundaries.total), boundaries)
        return self._made[name]
