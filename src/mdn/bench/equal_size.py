"""Models of different mixers with equally many parameters: the width of the MLP makes up for what a mixer needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mdn.models import MomentumDeltaNetConfig
from mdn.training.build import count_parameters


def equal_size_configs(mixers: Iterable[str], reference: str, **fields: Any) -> dict[str, MomentumDeltaNetConfig]:
    """A config per mixer with the given fields, as large as the ``reference`` mixer's with its `intermediate_size`."""
    width = fields.pop("intermediate_size")
    per_unit = 3 * fields["hidden_size"] * fields["num_hidden_layers"]  # gate, up and down projection

    def config(mixer: str, mlp: int) -> MomentumDeltaNetConfig:
        return MomentumDeltaNetConfig(mixer=mixer, intermediate_size=mlp, **fields)

    target = count_parameters(config(reference, width))
    excess = {mixer: count_parameters(config(mixer, width)) - target for mixer in mixers}
    return {mixer: config(mixer, max(width - round(more / per_unit), 8)) for mixer, more in excess.items()}
