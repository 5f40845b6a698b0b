"""Train and test one cell of an MQAR grid. Only labelled positions go through the head: P of L, not all."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.evaluation.mqar.data import Examples, generate
from mdn.evaluation.mqar.recipe import Cell, MqarRecipe, Segment
from mdn.models import MomentumDeltaNetForCausalLM

TEST_SEED = 1_000_003  # every cell is tested on the same examples
_TEST_TOKENS = 16_384
_LOSSES_KEPT = 40


def make_segment(recipe: MqarRecipe, segment: Segment, number: int, generator: torch.Generator) -> Examples:
    task = recipe.task
    return generate(
        number,
        segment.length,
        segment.pairs,
        vocab_size=task.vocab_size,
        power=task.power,
        rewriting=task.rewriting,
        generator=generator,
    )


def batch_size(recipe: MqarRecipe, segment: Segment) -> int:
    settings = recipe.training
    return settings.batch_size or max(1, int(settings.batch_tokens or 0) // segment.length)


def total_steps(recipe: MqarRecipe) -> int:
    if recipe.training.steps is not None:
        return recipe.training.steps
    batches = sum(math.ceil(segment.examples / batch_size(recipe, segment)) for segment in recipe.train)
    return int(recipe.training.epochs or 0) * batches


def batches(recipe: MqarRecipe, seed: int) -> Iterator[Examples]:
    """The training batches of a seed, each of one segment: epochs over a fixed set, or fresh examples every step."""
    generator = torch.Generator().manual_seed(seed)
    if recipe.training.steps is not None:
        shares = torch.tensor([float(segment.examples) for segment in recipe.train])
        for choice in torch.multinomial(shares, recipe.training.steps, replacement=True, generator=generator).tolist():
            segment = recipe.train[choice]
            yield make_segment(recipe, segment, batch_size(recipe, segment), generator)
        return
    sets = [make_segment(recipe, segment, segment.examples, generator) for segment in recipe.train]
    for _ in range(int(recipe.training.epochs or 0)):
        orders = [torch.randperm(len(examples), generator=generator) for examples in sets]
        pieces = [
            (number, rows)
            for number, (segment, order) in enumerate(zip(recipe.train, orders))
            for rows in order.split(batch_size(recipe, segment))
        ]
        for place in torch.randperm(len(pieces), generator=generator).tolist():
            number, rows = pieces[place]
            yield sets[number].select(rows)


def query_logits(model: MomentumDeltaNetForCausalLM, examples: Examples) -> Tensor:
    """[N, P, V] logits at the queries."""
    hidden = model.model(examples.inputs, use_cache=False).last_hidden_state
    places = examples.queries.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
    return model.lm_head(hidden.gather(1, places))


def accuracy(logits: Tensor, answers: Tensor) -> Tensor:
    """[N]: per example, the share of queries whose likeliest token is the answer."""
    return (logits.argmax(-1) == answers).float().mean(-1)


@torch.no_grad()
def test_accuracy(model: MomentumDeltaNetForCausalLM, recipe: MqarRecipe) -> dict[str, float]:
    """Mean accuracy by segment, "length:pairs"."""
    model.eval()
    found = {}
    for number, segment in enumerate(recipe.test):
        examples = make_segment(recipe, segment, segment.examples, torch.Generator().manual_seed(TEST_SEED + number))
        rows = max(1, _TEST_TOKENS // segment.length)
        pieces = (examples.select(slice(start, start + rows)) for start in range(0, len(examples), rows))
        found[segment.name] = torch.cat([accuracy(query_logits(model, p), p.answers) for p in pieces]).mean().item()
    return found


def make_optimizer(model: MomentumDeltaNetForCausalLM, recipe: MqarRecipe, rate: float) -> torch.optim.AdamW:
    without = set(model.no_weight_decay_names())
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[parameter.ndim > 1 and name not in without].append(parameter)
    settings = recipe.training
    decays = [
        {"params": parameters, "weight_decay": settings.weight_decay if decayed else 0.0}
        for decayed, parameters in groups.items()
        if parameters
    ]
    return torch.optim.AdamW(decays, lr=rate, betas=settings.betas)


def rate_at(step: int, steps: int, warmup: float) -> float:
    """The share of the peak learning rate: a linear rise, then a cosine to zero."""
    rise = round(warmup * steps)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def run_cell(recipe: MqarRecipe, cell: Cell, save_to: Path | None = None) -> dict[str, Any]:
    """Train and test; a loss that is not finite ends the training and counts as accuracy 0 everywhere."""
    begin, worked = time.perf_counter(), time.process_time()
    torch.manual_seed(cell.seed)
    model = MomentumDeltaNetForCausalLM(recipe.config_of(cell)).train()
    optimizer = make_optimizer(model, recipe, cell.learning_rate)
    steps = total_steps(recipe)
    losses: list[tuple[int, float]] = []
    diverged_at = None
    for step, examples in enumerate(batches(recipe, cell.seed)):
        for group in optimizer.param_groups:
            group["lr"] = cell.learning_rate * rate_at(step, steps, recipe.training.warmup)
        loss = F.cross_entropy(query_logits(model, examples).flatten(0, 1), examples.answers.flatten())
        if not torch.isfinite(loss):
            diverged_at = step
            break
        if step % max(1, steps // _LOSSES_KEPT) == 0 or step == steps - 1:
            losses.append((step, round(loss.item(), 4)))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.training.clip)
        optimizer.step()
    trained = time.perf_counter()
    if save_to is not None:
        model.save_pretrained(save_to / cell.name)
    found = test_accuracy(model, recipe) if diverged_at is None else {segment.name: 0.0 for segment in recipe.test}
    return {
        "cell": cell.model_dump(mode="json"),
        "identity": recipe.identity_of(cell),
        "accuracy": found,
        "losses": losses,
        "diverged_at": diverged_at,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_numbers": state_numbers(model),
        "steps": steps,
        "train_seconds": round(trained - begin, 2),
        "test_seconds": round(time.perf_counter() - trained, 2),
        "processor_seconds": round(time.process_time() - worked, 2),
    }


def state_numbers(model: MomentumDeltaNetForCausalLM) -> int:
    """Numbers in the recurrent states of all layers for one sequence (for attention: per token)."""
    shapes = [layer.attn.state_shapes() for layer in model.model.layers]
    return sum(math.prod(shape) for layer in shapes for name, (shape, _) in layer.items() if name != "conv")
