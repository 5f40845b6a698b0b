"""A mixer's backbone between two linear maps: numbers in, one number out per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mdn.experiments.studies.signals import Signals
from mdn.experiments.studies.study import SMALL_MODEL
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetModel

SERIES_MODEL: dict[str, Any] = SMALL_MODEL | {
    "use_mlp": True,
    "intermediate_size": 128,
    "tie_word_embeddings": False,
    "vocab_size": 2,  # no token is ever read
}


class SeriesModel(nn.Module):
    def __init__(self, channels: int, fields: dict[str, Any]) -> None:
        super().__init__()
        config = MomentumDeltaNetConfig(**fields)
        self.into = nn.Linear(channels, config.hidden_size)
        self.backbone = MomentumDeltaNetModel(config)
        self.out = nn.Linear(config.hidden_size, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, T, channels] -> [B, T]"""
        hidden = self.backbone(inputs_embeds=self.into(inputs), use_cache=False).last_hidden_state
        predicted: Tensor = self.out(hidden)
        return predicted.squeeze(2)

    def no_weight_decay_names(self) -> list[str]:
        return [f"backbone.{name}" for name in self.backbone.no_weight_decay_names()]


def weighted_squares(difference: Tensor, weights: Tensor) -> Tensor:
    return (difference.square() * weights).sum()


def squared_error(model: SeriesModel, batch: Signals) -> Tensor:
    return weighted_squares(model(batch.inputs) - batch.targets, batch.weights) / batch.weights.sum()


@torch.no_grad()
def predictions(model: SeriesModel, inputs: Tensor, rows: int = 32) -> Tensor:
    """[B, T], ``rows`` sequences at a time."""
    return torch.cat([model(piece) for piece in inputs.split(rows)])
