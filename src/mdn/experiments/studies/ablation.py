"""The component rows of `mdn ablate` again, with five seeds and a learning rate chosen for every row."""

from __future__ import annotations

from mdn.experiments.ablation import SMALL
from mdn.experiments.studies.language import LanguageTask
from mdn.experiments.studies.study import SMALL_MODEL, Comparison, Study

STUDY = Study(
    "ablation",
    "Which parts of the layer matter to a small byte model when every row has its own learning rate?",
    (
        LanguageTask(
            name="bytes",
            title="0.8 million bytes of the Python standard library",
            contestants=(
                "mdn",
                "mu0",
                "mu0-free",
                "no-correction",
                "no-clamp",
                "alpha-unbounded",
                "beta-unbounded",
                "eta-sigmoid",
            ),
            rates=(2e-3, 5e-3, 1e-2),
            seconds=44,
            steps=400,
            model=SMALL_MODEL | SMALL | {"use_mlp": True, "tie_word_embeddings": False, "initializer_range": 0.02},
        ),
    ),
    (
        Comparison("mdn", "mu0", "equal parameters"),
        Comparison("mdn", "mu0-free", "equal parameters"),
    ),
)
