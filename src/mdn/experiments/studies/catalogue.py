"""All studies by name, in the order in which `mdn study all` runs them."""

from __future__ import annotations

from mdn.common.errors import nearest
from mdn.experiments.studies import ablation, forecasting, language, oscillation, retrieval, state_tracking
from mdn.experiments.studies.study import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        oscillation.STUDY,
        retrieval.STUDY,
        forecasting.STUDY,
        state_tracking.STUDY,
        ablation.STUDY,
        language.STUDY,
    )
}


def choose_studies(name: str) -> list[Study]:
    if name == "all":
        return list(STUDIES.values())
    if name not in STUDIES:
        raise ValueError(f"no study {name!r}{nearest(name, STUDIES)}; expected all or one of {list(STUDIES)}")
    return [STUDIES[name]]
