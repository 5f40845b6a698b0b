"""Generated sentences of the pages on MQAR and ablations: verdicts follow the intervals, whatever the numbers are."""

import re
from pathlib import Path

import pytest

from mdn.common.results import write_results
from mdn.experiments import page_answers
from mdn.experiments.studies import pages

ROOT = Path(__file__).resolve().parents[2]


def one_line(text):
    return " ".join(text.split())


def chosen(mixer, *seeds):
    accuracy = {"64:8": list(seeds), "128:16": [value - 0.1 for value in seeds]}
    return {"mixer": mixer, "hidden_size": 64, "accuracy": accuracy}


RECIPE = {
    "name": "mqar-tiny",
    "mixers": {"momentum_deltanet": {}, "kda": {}},
    "learning_rates": [1e-2],
    "seeds": [0, 1, 2],
    "hidden_sizes": [64],
    "training": {"steps": 5, "batch_tokens": 64},
}


@pytest.fixture
def data(tmp_path):
    """Plain: KDA level, Comba behind, Mamba2 scattered. Rewriting: KDA ahead."""
    plain = [
        chosen("momentum_deltanet", 0.90, 0.92, 0.91),
        chosen("kda", 0.91, 0.90, 0.93),
        chosen("comba", 0.80, 0.81, 0.79),
        chosen("mamba2", 0.2, 0.9, 0.9),
    ]
    rewriting = [chosen("momentum_deltanet", 0.70, 0.71, 0.69), chosen("kda", 0.80, 0.81, 0.79)]
    rewriting += [chosen("comba", 0.70, 0.70, 0.70), chosen("mamba2", 0.30, 0.31, 0.29)]
    for name, rows in (("quick", plain), ("rewrite", rewriting)):
        write_results(tmp_path / f"mqar_{name}.json", "mqar", {"recipe": RECIPE, "chosen": rows})
    return tmp_path


def test_the_mqar_answer_says_who_is_better_on_which_task(data):
    assert one_line(page_answers.mqar_answer(data)) == (
        "On plain MQAR, MDN (86.0 %) is better than Comba (75.0 %), and does not differ significantly from KDA (86.3 "
        "%), nor from Mamba2 (61.7 %), whose seeds lie far apart. "
        "On MQAR with rewriting, MDN (65.0 %) is better than Mamba2 (25.0 %), is worse than KDA (75.0 %), "
        "and does not differ significantly from Comba (65.0 %)."
    )


def test_the_mqar_segments_are_named_where_mdn_differs(data):
    assert one_line(page_answers.mqar_segments(data)) == (
        "On plain MQAR, MDN is better than Comba on every segment; it does not differ significantly from KDA or Mamba2 "
        "on any segment. On MQAR with rewriting, MDN is worse than KDA on every segment, and better than Mamba2 on "
        "every segment; it does not differ significantly from Comba on any segment."
    )


def test_the_last_shared_segment_is_shown_seed_by_seed(data):
    text = page_answers.mqar_both(data)
    assert "128:16, by seed" in text
    assert "| Mamba2 | 10.0, 80.0, 80.0 | 20.0, 21.0, 19.0 |" in text


def test_the_cost_of_mqar_has_the_time_where_it_is_recorded(data):
    assert "mqar-tiny: 6 models (2 mixers, 1 learning rates, 3 seeds)" in one_line(page_answers.mqar_cost(data))
    assert "not recorded" in page_answers.mqar_cost(data)
    timed = {"recipe": RECIPE, "chosen": [], "processor_minutes": 31.4}
    write_results(data / "mqar_quick.json", "mqar", timed)
    assert "64 tokens each; 31 processor minutes." in one_line(page_answers.mqar_cost(data))


def ablation(name, paper="trains", verdict="stable", *bits):
    seeds = [None] * len(bits)
    entry = {"row": name, "paper reports": paper, "verdict": verdict, "bits per byte": list(bits)}
    return entry | {"diverged at": seeds, "diverged at, paper's arithmetic": [], "minutes": 1.5}


def test_the_ablation_answer_follows_the_intervals_and_the_verdicts(tmp_path):
    def answer(*mu_zero):
        rows = [
            ablation("full", "trains", "stable", 2.8, 2.9, 2.85),
            ablation("mu = 0", "NaN at step 1", "arithmetic: only the log-domain form fails", *mu_zero),
            ablation("no clamp of log mu", "NaN at step 70", "stable", 2.8, 2.9, 2.9),
            ablation("alpha_max = 1", "NaN at step 1", "dynamics: the state grows", 2.7, 2.9, 3.2),
        ]
        content = {"cells": 12, "of": 12, "rows": rows}
        write_results(tmp_path / "ablations.json", "ablations", content)
        return one_line(page_answers.ablation_answer(tmp_path))

    kinds = (
        'Of the divergences that the paper reports, "mu = 0" is one of arithmetic, "alpha_max = 1" is one of dynamics, '
        'and "no clamp of log mu" did not diverge here.'
    )
    assert answer(2.5, 2.52, 2.51) == (
        "With three seeds, mu = 0 (2.510) is better than the model that it is compared with (full: 2.850 bits per "
        f"byte). {kinds}"
    )
    assert answer(2.7, 2.9, 2.8) == (
        "With three seeds no row differs significantly from the full model at 2.850 bits per byte, neither the best, "
        f"mu = 0 (2.800), nor the worst, alpha_max = 1 (2.933), and no hybrid from 8 layers without attention. {kinds}"
    )
    assert "the time of 12 of them is recorded, 6.0 minutes together" in one_line(page_answers.ablation_cost(tmp_path))


def test_every_generated_block_that_belongs_to_no_study_is_on_a_page():
    text = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    found = set(re.findall(r"<!-- study ([\w-]+) (\w+) -->", text))
    assert set(pages.OTHER_BLOCKS) <= found
