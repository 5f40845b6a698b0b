"""Different models with equally many parameters: the width of the MLP makes up for what a mixer needs."""

from __future__ import annotations

from collections.abc import Mapping
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
