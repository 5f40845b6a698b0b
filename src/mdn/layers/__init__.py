"""Token mixers and their shared parts: convolution, norms, gates, layout of tokens, access to cached state.

``MIXERS`` maps a name, as in a config's ``mixer`` field, to the class. All mixers share the protocol of
:class:`mdn.layers.mixer.Mixer`, so any of them can stand in the backbone of ``mdn.models``.
"""

from mdn.layers.attention import Attention
from mdn.layers.channel_mixing import ChannelMixing
from mdn.layers.comba import Comba
from mdn.layers.deltanet import DeltaNet
from mdn.layers.gated_deltanet import GatedDeltaNet
from mdn.layers.gates import Gates, GateSettings, StabilityGates
from mdn.layers.gla import GatedLinearAttention
from mdn.layers.kda import KimiDeltaAttention
from mdn.layers.layout import TokenLayout
from mdn.layers.linear_attention import LinearAttention
from mdn.layers.mamba2 import Mamba2
from mdn.layers.mixer import Mixer
from mdn.layers.momentum_deltanet import MomentumDeltaNet
from mdn.layers.norms import GatedRMSNorm, RMSNorm
from mdn.layers.projected_mixer import ProjectedMixer
from mdn.layers.rwkv7 import RWKV7Attention
from mdn.layers.short_conv import ShortConvolution
from mdn.layers.state import LayerState

MIXERS: dict[str, type[Mixer]] = {
    "momentum_deltanet": MomentumDeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "comba": Comba,
    "kda": KimiDeltaAttention,
    "mamba2": Mamba2,
    "attention": Attention,
    "deltanet": DeltaNet,
    "gla": GatedLinearAttention,
    "linear_attention": LinearAttention,
    "rwkv7": RWKV7Attention,
}

__all__ = [
    "MIXERS",
    "Attention",
    "ChannelMixing",
    "Comba",
    "DeltaNet",
    "GateSettings",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GatedRMSNorm",
    "Gates",
    "KimiDeltaAttention",
    "LayerState",
    "LinearAttention",
    "Mamba2",
    "Mixer",
    "MomentumDeltaNet",
    "ProjectedMixer",
    "RMSNorm",
    "RWKV7Attention",
    "ShortConvolution",
    "StabilityGates",
    "TokenLayout",
]
