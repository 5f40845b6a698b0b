"""Different models with equally many parameters: the width of the MLP makes up for what a mixer needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mdn.models import MomentumDeltaNetConfig
from mdn.training.build import count_parameters


def equal_size_configs(
    models: Mapping[str, dict[str, Any]], reference: str, **fields: Any
) -> dict[str, MomentumDeltaNetConfig]:
    """A config per model with the given fields and its own, as large as that of the ``reference`` mixer with its
    `intermediate_size`."""
    width = fields.pop("intermediate_size")
    per_unit = 3 * fields["hidden_size"] * fields["num_hidden_layers"]  # gate, up and down projection

    def config(own: dict[str, Any], mlp: int) -> MomentumDeltaNetConfig:
        return MomentumDeltaNetConfig(**{**fields, **own}, intermediate_size=mlp)

    target = count_parameters(config({"mixer": reference}, width))
    excess = {name: count_parameters(config(own, width)) - target for name, own in models.items()}
    return {name: config(models[name], max(width - round(more / per_unit), 8)) for name, more in excess.items()}


@dataclass(frozen=True)
class ModelSize:
    """Shared by the models of all mixers."""

    hidden_size: int = 256
    layers: int = 2
    heads: int = 4
    vocab_size: int = 1024

    def equal_configs(self, models: Mapping[str, dict[str, Any]], reference: str) -> dict[str, MomentumDeltaNetConfig]:
        """``equal_size_configs`` of this size, for models that generate any token."""
        return equal_size_configs(
            models,
            reference,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_heads=self.heads,
            head_dim=self.hidden_size // self.heads,
            expand_v=1,
            intermediate_size=3 * self.hidden_size,
            bos_token_id=None,
            eos_token_id=None,
        )
