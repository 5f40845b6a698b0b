"""Token mixers and their shared parts: convolution, norms, gates, layout of tokens, access to cached state.

``MIXERS`` maps a name, as in a config's ``mixer`` field, to the class. All mixers share the protocol of
:class:`mdn.layers.mixer.Mixer`, so any of them can stand in the backbone of ``mdn.models``.
"""

from mdn.layers.attention import Attention
from mdn.layers.gates import Gates, GateSettings, StabilityGates
from mdn.layers.layout import TokenLayout
from mdn.layers.mixer import Mixer
from mdn.layers.momentum_deltanet import MomentumDeltaNet
from mdn.layers.norms import GatedRMSNorm, RMSNorm
from mdn.layers.projected_mixer import ProjectedMixer
from mdn.layers.short_conv import ShortConvolution
from mdn.layers.state import LayerState

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "momentum_deltanet": MomentumDeltaNet,
}

__all__ = [
    "MIXERS",
    "Attention",
    "GateSettings",
    "GatedRMSNorm",
    "Gates",
    "LayerState",
    "Mixer",
    "MomentumDeltaNet",
    "ProjectedMixer",
    "RMSNorm",
    "ShortConvolution",
    "StabilityGates",
    "TokenLayout",
]
