"""The one training loop for small models: batches in, a trained model and its losses out.

    outcome = train_tiny(model, batches, TinyTraining(steps=500, learning_rate=5e-3))

A batch has ``inputs`` and ``labels`` ``[B, T]``; only labelled positions pass through the head (P of T, not all). An
experiment whose batches are something else passes its own ``loss_of(model, batch)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.common.progress import progress
from mdn.ops.fused import IGNORE_INDEX

_LOSSES_KEPT = 40


class Labelled(Protocol):
    """``labels`` are the expected tokens, IGNORE_INDEX where nothing is scored."""

    @property
    def inputs(self) -> Tensor: ...

    @property
    def labels(self) -> Tensor: ...


class LabelledTokens(NamedTuple):
    inputs: Tensor  # [B, T]
    labels: Tensor  # [B, T]


@dataclass(frozen=True)
class TinyTraining:
    """AdamW with a linear warm-up and a cosine to zero."""

    steps: int
    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.1
    """for matrices; scales of gates, biases and norms have none"""
    warmup: float = 0.1
    """share of the steps with a rising learning rate"""
    clip: float = 1.0
    """largest norm of the gradient"""

    def rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, ...: a linear rise, then a cosine to zero."""
        rise = round(self.warmup * self.steps)
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        share = (step - rise) / max(1, self.steps - rise)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * share))


class TinyOutcome(NamedTuple):
    losses: list[tuple[int, float]]
    """(step, loss), about forty of them"""
    diverged_at: int | None
    """the step whose loss was not finite; training ended there"""


def labelled_logits(model: Any, batch: Labelled) -> tuple[Tensor, Tensor]:
    """Logits ``[n, V]`` at the n labelled positions, row by row, and their labels ``[n]``."""
    asked = batch.labels != IGNORE_INDEX
    hidden = model.model(batch.inputs, use_cache=False).last_hidden_state[asked]
    return model.lm_head(hidden), batch.labels[asked]


def labelled_loss(model: Any, batch: Labelled) -> Tensor:
    return F.cross_entropy(*labelled_logits(model, batch))


@torch.no_grad()
def labelled_accuracy(model: Any, batches: Iterable[Labelled]) -> float:
    """The share of labelled positions whose likeliest token is the label."""
    right = total = 0
    for batch in batches:
        logits, labels = labelled_logits(model, batch)
        right += int((logits.argmax(-1) == labels).sum())
        total += len(labels)
    return right / total


def train_tiny(
    model: nn.Module,
    batches: Iterable[Any],
    training: TinyTraining,
    *,
    loss_of: Callable[[Any, Any], Tensor] = labelled_loss,
    after_step: Callable[[int], None] | None = None,
    label: str = "",
) -> TinyOutcome:
    """Trains ``model`` in place, one step per batch, and leaves it in evaluation mode.

    ``after_step(step)`` may look at the model between two steps; it leaves it in training mode.
    """
    model.train()
    optimizer = make_optimizer(model, training)
    losses: list[tuple[int, float]] = []
    diverged_at = None
    bar = progress(batches, total=training.steps, desc=label, unit="step", leave=False)
    for step, batch in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = training.rate_at(step)
        loss = loss_of(model, batch)
        if not torch.isfinite(loss):
            diverged_at = step
            break
        if step % max(1, training.steps // _LOSSES_KEPT) == 0 or step == training.steps - 1:
            losses.append((step, round(loss.item(), 4)))
            bar.set_postfix_str(f"loss {losses[-1][1]:.3f}", refresh=False)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        if after_step is not None:
            after_step(step)
    bar.close()
    model.eval()
    return TinyOutcome(losses, diverged_at)


def make_optimizer(model: nn.Module, training: TinyTraining) -> torch.optim.AdamW:
    without = set(getattr(model, "no_weight_decay_names", list)())
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[parameter.ndim > 1 and name not in without].append(parameter)
    decays = [
        {"params": parameters, "weight_decay": training.weight_decay if decayed else 0.0}
        for decayed, parameters in groups.items()
        if parameters
    ]
    return torch.optim.AdamW(decays, lr=training.learning_rate, betas=training.betas, fused=True)
