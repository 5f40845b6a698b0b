"""The component rows of `mdn ablate` again, with five seeds and a learning rate chosen for every row."""

from __future__ import annotations

from mdn.experiments.ablation_cells import SMALL
from mdn.experiments.studies.language import LanguageTask
from mdn.experiments.studies.study import (
    EQUAL_PARAMETERS,
    EQUAL_STATE,
    SMALL_MODEL,
    WITHIN_BOUNDS,
    Comparison,
    Study,
)

ROWS = (
    "mu0",
    "gdn",
    "gdn-bounds",
    "mdn-fast",
    "qhm",
    "qhm-fast",
    "nesterov",
    "no-correction",
    "no-clamp",
    "alpha-unbounded",
    "beta-unbounded",
    "eta-sigmoid",
)
STUDY = Study(
    "ablation",
    "Which parts of the layer matter to a small byte model when every row has its own learning rate?",
    (
        LanguageTask(
            name="bytes",
            phrase="the byte models of the ablation",
            title="0.4 million bytes of the Python standard library",
            contestants=("mdn", *ROWS, "mdn-half", "gdn-double"),
            rates=(2e-3, 5e-3, 1e-2, 2e-2),
            seconds=13,
            steps=200,
            model=SMALL_MODEL | SMALL | {"use_mlp": True, "tie_word_embeddings": False, "initializer_range": 0.02},
        ),
    ),
    (*(Comparison("mdn", row, EQUAL_PARAMETERS.what) for row in ROWS), *EQUAL_STATE, WITHIN_BOUNDS[1]),
)
