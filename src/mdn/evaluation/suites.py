"""The paper's evaluations: which task, which metric, which column of which table.

A column names one number of one task. Columns of several suites may need the same task; it runs once.
"""

from __future__ import annotations

from dataclasses import dataclass

PAPER_LENGTH = 4096  # the training context of the paper's models
NEEDLE_LENGTHS = (1024, 2048, 4096, 8192, 16384)
NEEDLE_TASKS = {
    "niah_single_1": "S-NIAH-1",
    "niah_single_2": "S-NIAH-2",
    "niah_single_3": "S-NIAH-3",
    "niah_multikey_1": "MK-NIAH-1",
    "niah_multiquery": "MQ-NIAH",
    "niah_multivalue": "MV-NIAH",
}


@dataclass(frozen=True)
class Job:
    """One task at one input length: what is evaluated, resumed and kept as one file."""

    task: str
    max_length: int | None = None
    """tokens of input and output; None: the model's own maximum"""
    needle_length: int | None = None
    """length of the haystack, for RULER's tasks"""

    @property
    def name(self) -> str:
        return self.task if self.needle_length is None else f"{self.task}-{self.needle_length}"


@dataclass(frozen=True)
class Column:
    """A number of the table. ``shown`` is what the paper writes under the title."""

    group: str
    title: str
    job: Job
    metric: str
    shown: str = "acc ↑"
    percent: bool = True


@dataclass(frozen=True)
class Suite:
    name: str
    columns: tuple[Column, ...]
    average: str | None = None
    """group whose mean closes the table, under this suite's columns"""


def _columns(group: str, length: int, *rows: tuple[str, str, str, str]) -> tuple[Column, ...]:
    return tuple(
        Column(group, title, Job(task, length), metric, shown, percent="ppl" not in shown)
        for title, task, metric, shown in rows
    )


PERPLEXITY = Suite(
    "perplexity",
    _columns(
        "Perplexity",
        PAPER_LENGTH,
        ("Lamb.", "lambada_openai", "perplexity", "ppl ↓"),
        ("Wiki.", "wikitext", "word_perplexity", "ppl ↓"),
    ),
)

COMMONSENSE = Suite(
    "commonsense",
    _columns(
        "Commonsense Reasoning Task",
        PAPER_LENGTH,
        ("Hella.", "hellaswag", "acc_norm", "acc_n ↑"),
        ("Lamb.", "lambada_openai", "acc", "acc ↑"),
        ("ARCe", "arc_easy", "acc", "acc ↑"),
        ("ARCc", "arc_challenge", "acc_norm", "acc_n ↑"),
        ("PIQA", "piqa", "acc", "acc ↑"),
        ("Wino.", "winogrande", "acc", "acc ↑"),
        ("BoolQ", "boolq", "acc", "acc ↑"),
        ("SciQ", "sciq", "acc", "acc ↑"),
    ),
    average="acc ↑",
)

RETRIEVAL = Suite(
    "retrieval",
    _columns(
        "In-context Retrieval Task",
        2048,  # 2000 tokens of input and 48 of output
        ("FDA", "fda", "contains", "acc ↑"),
        ("SWDE", "swde", "contains", "acc ↑"),
        ("SQD.", "squad_completion", "contains", "acc ↑"),
        ("NQ", "based_nq", "contains", "acc ↑"),
        ("TQA.", "based_triviaqa", "contains", "acc ↑"),
        ("Drop", "based_drop", "contains", "acc ↑"),
    ),
    average="acc ↑",
)

_LONGBENCH_GROUPS = {
    "Code": (("LCC", "lcc"), ("RBP", "repobench-p")),
    "Summarization": (("GvR", "gov_report"), ("QMS", "qmsum"), ("MNs", "multi_news")),
    "SingleQA": (("NQA", "narrativeqa"), ("QQA", "qasper"), ("MFQ", "multifieldqa_en")),
    "MultiQA": (("HQA", "hotpotqa"), ("2WM", "2wikimqa"), ("MUS", "musique")),
    "Few-shot": (("TRC", "trec"), ("TQA", "triviaqa"), ("SSM", "samsum")),
}

LONGBENCH = Suite(
    "longbench",
    tuple(
        Column(group, title, Job(f"longbench_{task}", 16384), "score", "↑")
        for group, tasks in _LONGBENCH_GROUPS.items()
        for title, task in tasks
    ),
    average="↑",
)


def needle_suite(lengths: tuple[int, ...] = NEEDLE_LENGTHS) -> Suite:
    """RULER's six tasks; the input length is the haystack's, the 128 new tokens included."""
    columns = tuple(
        Column(title, _short(length), Job(task, length, needle_length=length), str(length), "↑")
        for task, title in NEEDLE_TASKS.items()
        for length in lengths
    )
    return Suite("needle", columns)


def _short(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


SUITES = {suite.name: suite for suite in (PERPLEXITY, COMMONSENSE, RETRIEVAL, LONGBENCH, needle_suite())}
SUITE_NAMES = (*SUITES, "mqar")
