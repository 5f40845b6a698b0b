"""Token mixers and their shared parts: convolution, norms, gates, layout of tokens, access to cached state.

``MIXERS`` maps a name, as in a config's ``mixer`` field, to the class. All mixers share the protocol of
:class:`mdn.layers.mixer.Mixer`, so any of them fits into the backbone of ``mdn.models``.
"""

from mdn.layers.attention import Attention
from mdn.layers.cache_access import LayerState
from mdn.layers.comba import Comba
from mdn.layers.conv import ShortConvolution
from mdn.layers.deltanet import DeltaNet
from mdn.layers.gated_deltanet import GatedDeltaNet
from mdn.layers.gated_deltaproduct import GatedDeltaProduct
from mdn.layers.gla import GatedLinearAttention
from mdn.layers.kda import KimiDeltaAttention
from mdn.layers.linear_attention import LinearAttention
from mdn.layers.mamba2 import Mamba2
from mdn.layers.mixer import Mixer, ProjectedMixer, StateShape
from mdn.layers.momentum_deltanet import Gates, GateSettings, MomentumDeltaNet, MomentumRule, StabilityGates
from mdn.layers.momentum_kda import MomentumKDA
from mdn.layers.norms import GatedRMSNorm, RMSNorm
from mdn.layers.rwkv7 import ChannelMixing, RWKV7Attention
from mdn.layers.token_layout import TokenLayout, make_layout

MIXERS: dict[str, type[Mixer]] = {
    "momentum_deltanet": MomentumDeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "gated_deltaproduct": GatedDeltaProduct,
    "comba": Comba,
    "kda": KimiDeltaAttention,
    "momentum_kda": MomentumKDA,
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
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "GatedRMSNorm",
    "Gates",
    "KimiDeltaAttention",
    "LayerState",
    "LinearAttention",
    "Mamba2",
    "Mixer",
    "MomentumDeltaNet",
    "MomentumKDA",
    "MomentumRule",
    "ProjectedMixer",
    "RMSNorm",
    "RWKV7Attention",
    "ShortConvolution",
    "StabilityGates",
    "StateShape",
    "TokenLayout",
    "make_layout",
]
