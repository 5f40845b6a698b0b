"""The models that the studies compare: one name each, the same in every table, file name and figure.

A contestant changes fields of a task's model. Rules of MDN's own layer with the same ``columns`` have equal parameters
up to their gates (2 % at the sizes used here), and so have momentum KDA and KDA. KDA, Mamba2, attention and
DeltaProduct are other layers; their numbers of parameters differ from MDN's by a tenth to a fifth.

A model with momentum holds two matrices per head and a first-order one holds one, so that "MDN (V/2)" has the state of
the first-order rules, and "GDN (2V)" that of MDN. The tables give both counts. Contestants of one study have different
colours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mdn.common.errors import nearest
from mdn.common.plots import COLOURS, MIXER_COLOURS


@dataclass(frozen=True)
class Contestant:
    name: str
    """part of file names"""
    label: str
    fields: dict[str, Any] = field(default_factory=dict)
    """fields of the model's config that differ"""
    columns: float = 1.0
    """value columns of every head, relative to the task's model"""
    colour: str = COLOURS[6]
    cost: float = 1.0
    """processor time of a step relative to MDN's, for estimates"""

    def config_fields(self, model: dict[str, Any]) -> dict[str, Any]:
        """``model`` with this contestant's changes."""
        return model | self.fields | {"expand_v": model["expand_v"] * self.columns}


_FIRST_ORDER = {"use_momentum": False}
_NO_BOUNDS = {"bound_alpha": False, "bound_beta": False}
_GDN = _FIRST_ORDER | {"eta_activation": "one"}
_QHM = {"momentum": "quasi_hyperbolic"}
_FAST = {"mu_init": 10.0}
# Heads of 32 in every task: Mamba2's state is then as large as MDN's two matrices.
_MAMBA2 = {"mixer": "mamba2", "mixer_options": {"state_size": 32, "expand": 2}}

# Beside COLOURS: lighter and darker shades for variants of a model.
_LIGHT_ORANGE, _NAVY, _LILAC, _LIGHT_GREEN = "#F4A582", "#003B6F", "#C3A5E6", "#A0D6A0"
_MAROON, _DARK_GREEN = MIXER_COLOURS["momentum_kda"], MIXER_COLOURS["gated_deltaproduct"]

_ALL = (
    Contestant("mdn", "MDN", colour=COLOURS[1]),
    Contestant("mdn-half", "MDN (V/2)", columns=0.5, colour=_LIGHT_ORANGE),
    # Gated DeltaNet's rule in MDN's layer: the same output gate and output correction, so that only the rule differs.
    Contestant("gdn", "GDN", _GDN | _NO_BOUNDS, colour=COLOURS[0]),
    Contestant("gdn-double", "GDN (2V)", _GDN | _NO_BOUNDS, columns=2.0, colour=_NAVY),
    Contestant("gdn-bounds", "GDN with bounds", _GDN, colour=COLOURS[9]),
    Contestant("mu0", "mu = 0", _FIRST_ORDER, colour=COLOURS[5]),
    # ---- other kinds of momentum and other initial values
    Contestant("qhm", "quasi-hyperbolic", _QHM, colour=COLOURS[8]),
    Contestant("nesterov", "Nesterov", {"momentum": "nesterov"}, colour=COLOURS[2]),
    Contestant("mdn-fast", "MDN (mu 10 x faster)", _FAST, colour=COLOURS[7]),
    Contestant("qhm-fast", "quasi-hyperbolic (mu 10 x faster)", _QHM | _FAST, colour=_LILAC),
    # ---- eigenvalues down to -1
    Contestant("mdn-negative", "MDN (bounds doubled)", {"allow_neg_eigval": True}, colour=COLOURS[7]),
    Contestant("gdn-negative", "GDN (beta up to 2)", _GDN | _NO_BOUNDS | {"allow_neg_eigval": True}, colour=COLOURS[9]),
    # MDN keeps its bounds, doubled, and so does this one: with them no eigenvalue comes near -1.
    Contestant(
        "gdn-bounds-negative", "GDN with bounds (doubled)", _GDN | {"allow_neg_eigval": True}, colour=COLOURS[5]
    ),
    # two steps per token, and so twice the keys and values: more parameters than the others
    Contestant(
        "deltaproduct",
        "DeltaProduct (two steps)",
        {"mixer": "gated_deltaproduct", "allow_neg_eigval": True},
        colour=_DARK_GREEN,
        cost=1.4,
    ),
    # ---- other layers
    Contestant("comba", "Comba", {"mixer": "comba"}, colour=COLOURS[2]),
    Contestant("kda", "KDA", {"mixer": "kda"}, colour=COLOURS[3]),
    Contestant("kda-double", "KDA (2V)", {"mixer": "kda"}, columns=2.0, colour=COLOURS[6], cost=1.2),
    Contestant("momentum-kda", "momentum KDA", {"mixer": "momentum_kda"}, colour=_MAROON, cost=1.8),
    Contestant(
        "momentum-kda-half", "momentum KDA (V/2)", {"mixer": "momentum_kda"}, columns=0.5, colour=_LIGHT_GREEN, cost=1.8
    ),
    Contestant("mamba2", "Mamba2", _MAMBA2, colour=COLOURS[4], cost=1.2),
    Contestant("attention", "attention", {"mixer": "attention"}, colour=COLOURS[6], cost=0.7),
    # ---- further rows of the ablation
    Contestant("no-correction", "no output correction", {"use_output_correction": False}, colour=COLOURS[4]),
    Contestant("no-clamp", "no clamp of log mu", {"min_log_mu": None}, colour=COLOURS[3]),
    Contestant("alpha-unbounded", "alpha_max = 1", {"bound_alpha": False}, colour=_MAROON),
    Contestant("beta-unbounded", "beta_max = 1", {"bound_beta": False}, colour=COLOURS[6]),
    Contestant("eta-sigmoid", "eta = 2 sigmoid", {"eta_activation": "sigmoid"}, colour=_DARK_GREEN),
)
VECTOR_DECAYS = ("kda", "kda-double", "momentum-kda", "momentum-kda-half")
CONTESTANTS = {contestant.name: contestant for contestant in _ALL}


def contestant(name: str) -> Contestant:
    if name not in CONTESTANTS:
        raise ValueError(f"no contestant {name!r}{nearest(name, CONTESTANTS)}; expected one of {list(CONTESTANTS)}")
    return CONTESTANTS[name]
