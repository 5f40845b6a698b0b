"""A study: tasks, each with contestants and seeds, run as resumable grids (`mdn.experiments.grid`).

A cell is one training run (task, contestant, learning rate, seed). The learning rate of every contestant is chosen by
its mean score over the tuning seeds (``TUNING_SEED``, ``TUNING_SEED`` + 1, ...), which are not reported: of four rates
the middle two run first, then the neighbour of the better one. The seeds 0, 1, ... run with the best of the three. The
test examples are the same for all seeds, so that the rate is chosen on the examples that are reported.
OUT/NAME/cells has the results of a study.
A cell is deterministic: its seed decides the initial values and the data, and it runs on one thread.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mdn.common.errors import nearest
from mdn.common.source import source_commit
from mdn.experiments.grid import TimeLimit, cell_path, finished, run_grid
from mdn.experiments.mqar import state_numbers
from mdn.experiments.studies.contestants import Contestant, contestant
from mdn.experiments.tiny_training import TinyTraining, labelled_loss, train_tiny
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM

_TRAINING = {
    name: value for name, value in vars(TinyTraining(1, 1.0)).items() if name not in ("steps", "learning_rate")
}
TUNING_SEED = 100  # the first of a task's tuning seeds; reported seeds are below it
TEST_SEED = 1_000_003  # every cell of a task is tested on the same examples
NO_BREAK = "\u00a0"  # between a number and its unit; a plain space in the pages
CORPUS = "corpus bytes"  # the fact about a task that tells one text from another

# Two layers of 64 channels, two heads of 32: the model of every task but the language models.
SMALL_MODEL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 32,
    "expand_v": 1,
    "use_mlp": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclasses.dataclass(frozen=True)
class Metric:
    name: str
    higher_is_better: bool
    worst: float
    """the score of a model whose loss stopped being finite"""
    factor: float = 1.0
    """what the numbers in tables and figures are multiplied by"""
    digits: int = 3
    quantity: str = ""
    """what stands before numbers in a sentence, if it needs a word"""
    unit: str = ""
    """what stands after numbers in a sentence"""

    def better(self, first: float, second: float) -> bool:
        return first > second if self.higher_is_better else first < second

    def shown(self, value: float) -> str:
        return f"{self.factor * value:.{self.digits}f}"

    def in_words(self, *values: float) -> str:
        """Numbers in a sentence: "92.4 against 95.7 %"."""
        words = f"{self.quantity} {' against '.join(map(self.shown, values))}".strip()
        return f"{words}{NO_BREAK}{self.unit}" if self.unit else words


ACCURACY = Metric("accuracy, %", higher_is_better=True, worst=0.0, factor=100.0, digits=1, unit="%")
ERROR = Metric("squared error / signal power", higher_is_better=False, worst=1.0, quantity="error")
BITS = Metric("held-out bits per byte", higher_is_better=False, worst=8.0, unit="bits per byte")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """What is trained and tested. Subclasses say how."""

    name: str
    title: str
    phrase: str = ""
    """the task in a sentence ("on the resonator"), where its name alone does not fit"""
    contestants: tuple[str, ...]
    rates: tuple[float, ...]
    """learning rates to choose from, in order: four, of which three are tried, or fewer, which are all tried"""
    rates_from: Task | None = None
    """another task, whose chosen learning rates are used"""
    seeds: int = 5
    tuning_seeds: int = 1
    """seeds over whose mean score the learning rate is chosen, beginning with ``TUNING_SEED``"""
    seconds: float
    """that a cell of MDN takes on one quiet core, for estimates"""
    steps: int
    model: dict[str, Any]
    tuning_steps: int | None = None
    """a shorter run for the choice of the learning rate; None: as long as the others"""
    checkpoints: tuple[int, ...] = ()
    """numbers of steps after which the model is also tested"""
    metric: ClassVar[Metric] = ACCURACY
    _not_settings: ClassVar[tuple[str, ...]] = (
        "name", "title", "phrase", "contestants", "rates", "rates_from", "seeds", "tuning_seeds", "seconds",
        "tuning_steps", "model",
    )  # fmt: skip

    def settings(self) -> dict[str, Any]:
        """Everything that decides a result, beside the contestant, the learning rate and the seed."""
        own = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return {name: value for name, value in own.items() if name not in self._not_settings} | _TRAINING

    @abstractmethod
    def build(self, fields: dict[str, Any]) -> nn.Module:
        """A model with fresh values, from the fields of its config."""

    @abstractmethod
    def batches(self, seed: int, steps: int) -> Iterator[Any]: ...

    @abstractmethod
    def loss(self, model: Any, batch: Any) -> Tensor: ...

    @abstractmethod
    def test(self, model: Any) -> dict[str, float]:
        """The score of every test, by the test's name."""

    def baselines(self) -> dict[str, dict[str, float]]:
        """Scores that need no training, by name."""
        return {}

    def facts(self) -> dict[str, Any]:
        """What a result depends on and no setting says, for the record."""
        return {}


class TokenTask(Task):
    """Tokens in, tokens to predict at labelled positions."""

    @abstractmethod
    def vocab_size(self) -> int: ...

    def build(self, fields: dict[str, Any]) -> nn.Module:
        return MomentumDeltaNetForCausalLM(MomentumDeltaNetConfig(**fields, vocab_size=self.vocab_size()))

    def loss(self, model: Any, batch: Any) -> Tensor:
        return labelled_loss(model, batch)


# --------------------------------------------------------------------------------------------------------------- cells


@dataclasses.dataclass(frozen=True)
class StudyCell:
    task: Task = dataclasses.field(repr=False)
    contestant: Contestant = dataclasses.field(repr=False)
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        task = re.sub(r"[^a-z0-9.]+", "-", self.task.name.lower())
        return f"{task}-{self.contestant.name}-lr{self.learning_rate:g}-seed{self.seed}"

    @property
    def steps(self) -> int:
        tuning = self.seed >= TUNING_SEED and self.task.tuning_steps is not None
        return int(self.task.tuning_steps or 0) if tuning else self.task.steps

    @property
    def expected_seconds(self) -> float:
        return self.task.seconds * self.contestant.cost * self.steps / self.task.steps

    @property
    def fields(self) -> dict[str, Any]:
        return self.contestant.config_fields(self.task.model)

    def settings(self) -> dict[str, Any]:
        own = {"task": self.task.name, "contestant": self.contestant.name, "model": self.fields}
        return own | self.task.settings() | {
            "steps": self.steps, "learning_rate": self.learning_rate, "seed": self.seed
        }  # fmt: skip


def train_study_cell(cell: StudyCell) -> dict[str, Any]:
    """The result of a cell; one whose loss stopped being finite has the worst score everywhere."""
    begin, worked = time.perf_counter(), time.process_time()
    task = cell.task
    torch.manual_seed(cell.seed)
    model = task.build(cell.fields)
    curve: list[dict[str, Any]] = []

    def look(step: int) -> None:
        if step + 1 in task.checkpoints:
            model.eval()
            curve.append({"steps": step + 1, "scores": task.test(model)})
            model.train()

    outcome = train_tiny(
        model,
        task.batches(cell.seed, cell.steps),
        TinyTraining(cell.steps, cell.learning_rate),
        loss_of=task.loss,
        after_step=look,
        label=cell.name,
    )
    scores = task.test(model)
    if outcome.diverged_at is not None:
        scores = dict.fromkeys(scores, task.metric.worst)
    return {
        "scores": scores,
        "baselines": task.baselines(),
        "curve": curve,
        "losses": outcome.losses,
        "diverged_at": outcome.diverged_at,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_numbers": state_numbers(model),
        "seconds": round(time.perf_counter() - begin, 2),
        "processor_seconds": round(time.process_time() - worked, 2),
        "made with": _origin() | task.facts(),
    }


def _origin() -> dict[str, Any]:
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "commit": source_commit()}


# -------------------------------------------------------------------------------------------------------------- studies


class StudySize(NamedTuple):
    """All cells of a study and the processor time that they are expected to take."""

    cells: int
    seconds: float


class Progress(NamedTuple):
    """How much of a study is recorded."""

    cells: int
    of: int
    seconds_left: float
    """processor time that the rest is expected to take"""


class Comparison(NamedTuple):
    """Two contestants whose difference answers the study's question."""

    first: str
    second: str
    what: str
    """what is equal between them, and in brackets how"""

    @property
    def equal(self) -> str:
        return self.what.partition(" (")[0]


EQUAL_PARAMETERS = Comparison("mdn", "gdn", "equal parameters")
EQUAL_STATE = (
    Comparison("mdn", "gdn-double", "equal state (twice the value columns for GDN)"),
    Comparison("mdn-half", "gdn", "equal state (half the value columns for MDN)"),
)
WITHIN_BOUNDS = (
    Comparison("mdn", "mu0", "equal parameters (with and without momentum, both within the bounds)"),
    Comparison("mdn-half", "mu0", "equal state (half the value columns for MDN, both within the bounds)"),
)
"""what momentum adds to MDN's own layer; mu = 0 has half of MDN's state"""
VECTOR_DECAY_COMPARISONS = (
    Comparison("mdn", "kda", "nearly equal parameters (momentum against a decay for every channel)"),
    Comparison("mdn-half", "kda", "equal state (momentum against a decay for every channel)"),
    Comparison("momentum-kda", "kda", "equal parameters (KDA with and without momentum)"),
    Comparison("momentum-kda", "kda-double", "equal state (twice the value columns for KDA)"),
    Comparison("momentum-kda-half", "kda", "equal state (half the value columns for momentum KDA)"),
    Comparison("momentum-kda", "mdn", "equal state (a decay for every channel against one for each head)"),
)


@dataclasses.dataclass(frozen=True)
class Study:
    name: str
    question: str
    tasks: tuple[Task, ...]
    comparisons: tuple[Comparison, ...] = ()

    def shortened(self) -> Study:
        """The same with one seed, two contestants and a few steps: whether it runs, not what it finds."""
        tasks = [
            dataclasses.replace(
                task,
                contestants=task.contestants[:2],
                rates=task.rates[:1],
                seeds=1,
                tuning_seeds=1,
                steps=4,
                checkpoints=(2,) if task.checkpoints else (),
                tuning_steps=None,
                rates_from=None,
            )
            for task in self.tasks
        ]
        return dataclasses.replace(self, tasks=tuple(tasks))

    def with_seeds(self, seeds: int) -> Study:
        return dataclasses.replace(self, tasks=tuple(dataclasses.replace(task, seeds=seeds) for task in self.tasks))

    def only(self, tasks: Sequence[str] = (), contestants: Sequence[str] = ()) -> Study:
        """A part of the study; nothing given means all. Results of a part are results of the whole."""
        named = [entry.name for entry in self.tasks]
        for name in tasks:
            if name not in named:
                raise ValueError(f"{self.name} has no task {name!r}{nearest(name, named)}; expected some of {named}")
        for name in contestants:
            contestant(name)
        kept = [
            dataclasses.replace(
                entry, contestants=tuple(name for name in entry.contestants if not contestants or name in contestants)
            )
            for entry in self.tasks
            if not tasks or entry.name in tasks
        ]
        return dataclasses.replace(self, tasks=tuple(kept))

    def task(self, name: str) -> Task:
        return next(task for task in self.tasks if task.name == name)

    def tuning_cells(self, task: Task, out: Path) -> list[StudyCell]:
        """The cells that decide the learning rates, as far as the recorded ones tell which are needed."""
        tuned = task.rates_from or task
        cells = []
        for name in task.contestants:
            rates = self._three_of_four(tuned, name, out) if len(tuned.rates) == 4 else tuned.rates
            cells += [cell for rate in rates for cell in _tuning_cells(tuned, name, rate)]
        return cells

    def _three_of_four(self, tuned: Task, name: str, out: Path) -> tuple[float, ...]:
        """The middle two rates, and with their results the neighbour of the better one."""
        first, second = tuned.rates[1:3]
        scores = self._tuning_scores(tuned, name, (first, second), out)
        if len(scores) < 2:
            return first, second
        return tuned.rates[:3] if scores[first] > scores[second] else tuned.rates[1:]

    def tuning_means(self, task: Task, name: str, out: Path) -> dict[float, float]:
        """By rate, the mean score of a contestant over the tuning seeds; rates that were not tried are left out."""
        tuned = task.rates_from or task
        return self._tuning_means(tuned, name, tuned.rates, out)

    def _tuning_scores(self, tuned: Task, name: str, rates: Sequence[float], out: Path) -> dict[float, float]:
        """The same, the larger the better."""
        sign = 1 if tuned.metric.higher_is_better else -1
        return {rate: sign * mean for rate, mean in self._tuning_means(tuned, name, rates, out).items()}

    def _tuning_means(self, tuned: Task, name: str, rates: Sequence[float], out: Path) -> dict[float, float]:
        """A rate with a missing seed has no mean."""
        means = {}
        for rate in rates:
            results = finished(_tuning_cells(tuned, name, rate), out / self.name).values()
            if len(results) == tuned.tuning_seeds:
                means[rate] = statistics.fmean(map(mean_score, results))
        return means

    def reported_cells(self, task: Task, out: Path) -> list[StudyCell]:
        """Seed by seed, of the contestants whose learning rate has been chosen."""
        rates = self.chosen_rates(task, out)
        return [
            StudyCell(task, contestant(name), rate, seed) for seed in range(task.seeds) for name, rate in rates.items()
        ]

    def chosen_rates(self, task: Task, out: Path) -> dict[str, float]:
        """By contestant, the learning rate with the best mean score over the tuning seeds, once all have run."""
        tuned = task.rates_from or task
        cells = self.tuning_cells(task, out)
        chosen: dict[str, float] = {}
        for name in task.contestants:
            rates = list(dict.fromkeys(cell.learning_rate for cell in cells if cell.contestant.name == name))
            scores = self._tuning_scores(tuned, name, rates, out)
            if len(scores) == len(rates):
                chosen[name] = max(scores, key=lambda rate: scores[rate])
        return chosen

    def cells_at(self, task: Task, rate: float) -> list[StudyCell]:
        """The reported seeds of every contestant at one learning rate, chosen or not."""
        return [
            StudyCell(task, contestant(name), rate, seed) for seed in range(task.seeds) for name in task.contestants
        ]

    def whole(self) -> StudySize:
        cells, seconds = 0, 0.0
        for task in self.tasks:
            costs = task.seconds * sum(contestant(name).cost for name in task.contestants)
            tuning = 0 if task.rates_from else min(3, len(task.rates)) * task.tuning_seeds
            cells += (tuning + task.seeds) * len(task.contestants)
            seconds += (tuning * (task.tuning_steps or task.steps) / task.steps + task.seeds) * costs
        return StudySize(cells, seconds)

    def progress(self, out: Path) -> Progress:
        """Reads which cells are recorded."""
        cells, seconds = self.whole()
        done = [cell for task in self.tasks for cell in self.reported_cells(task, out)]
        done += [cell for task in self.tasks if task.rates_from is None for cell in self.tuning_cells(task, out)]
        done = [cell for cell in done if cell_path(out / self.name, cell).is_file()]
        left = seconds - sum(cell.expected_seconds for cell in done)
        return Progress(len(done), cells, max(0.0, left))  # not -0.0 after rounding

    def run(self, out: Path, processes: int, limit: TimeLimit | None = None) -> None:
        """Task by task: first the learning rates, then the seeds."""
        job: Callable[[StudyCell], dict[str, Any]] = train_study_cell
        for task in self.tasks:
            label = f"{self.name}, {task.name}"
            for _ in ("the middle rates", "a neighbour of the better"):
                tuning = self.tuning_cells(task, out)
                run_grid(tuning, job, out / self.name, processes, f"{label}: learning rates", limit)
            run_grid(self.reported_cells(task, out), job, out / self.name, processes, f"{label}: seeds", limit)

    def check_rate(self, rate: float) -> None:
        for task in self.tasks:
            rates = (task.rates_from or task).rates
            if rate not in rates:
                raise ValueError(f"{rate:g} is not a learning rate of {task.name!r}; expected one of {list(rates)}")

    def run_at(self, rate: float, out: Path, processes: int, limit: TimeLimit | None = None) -> None:
        """The reported seeds at this learning rate: what a verdict would be with another choice."""
        for task in self.tasks:
            label = f"{self.name}, {task.name}: learning rate {rate:g}"
            run_grid(self.cells_at(task, rate), train_study_cell, out / self.name, processes, label, limit)


def _tuning_cells(tuned: Task, name: str, rate: float) -> list[StudyCell]:
    """One rate of a contestant with every tuning seed."""
    return [StudyCell(tuned, contestant(name), rate, TUNING_SEED + number) for number in range(tuned.tuning_seeds)]


def mean_score(result: dict[str, Any]) -> float:
    return sum(result["scores"].values()) / len(result["scores"])
