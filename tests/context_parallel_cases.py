"""What every rank of a context-parallel test computes: errors of its part against one process. See tests/parallel.

A case is a function of no arguments, called on all ranks; it returns relative errors by the name of a quantity.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from conformance import public_function
from definition import FIRST_ORDER, MOMENTUM, Draw, make_inputs
from mdn.layers import MIXERS, make_layout
from mdn.layers.conv import ShortConvolution
from mdn.ops import SequenceBoundaries
from mdn.parallel import ContextParallelPlan, context_parallel, exchange
from mdn.parallel.tensor import split_model, whole_of
from small_models import MODELS, small_model, tokens

Errors = dict[str, float]
DTYPES = {"float64": torch.float64, "float32": torch.float32}
HEADS, VALUE_HEADS, K, V = 2, 4, 4, 6


def patterns(total: int, ranks: int) -> dict[str, list[int]]:
    """Lengths of documents whose ends lie in different ways to the borders of ranks."""
    share = total // ranks
    return {
        "one document": [total],
        "ends at a border": [share, total - share],
        "ends one token before a border": [share - 1, total - share + 1],
        "ends one token after a border": [share + 1, total - share - 1],
        "ranks without an end": [share // 2, total - share // 2 - 3, 3],
        "documents inside ranks": [share // 2, share - share // 2] * ranks + [total - share * ranks],
        "one-token and empty documents": [0, 1, 1, share, 0, 1, total - share - 3, 0],
    }


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected number."""
    difference = (found - expected).detach().abs().max()
    return float(difference / expected.detach().abs().max().clamp_min(1e-6))


def summed(grad: Tensor) -> Tensor:
    total = grad.clone()
    dist.all_reduce(total)
    return total


# ---------------------------------------------------------------------------------------------------------------- ops


def op_case(
    rule: str = "momentum",
    documents: str = "one document",
    layout: str = "contiguous",
    dtype: str = "float64",
    tokens_per_rank: int = 21,
    ranks_per_node: int | None = None,
    with_state: bool = True,
) -> Errors:
    """Outputs, states and every gradient of one op; without gradients, where less is computed, outputs and states."""
    ranks = dist.get_world_size()
    lengths = patterns(tokens_per_rank * ranks + ranks - 1, ranks)[documents]
    boundaries = SequenceBoundaries.from_lengths(lengths)
    plan = ContextParallelPlan.from_cu_seqlens(boundaries.cu_seqlens, None, layout, ranks_per_node)
    inputs = make_inputs(rule, 1, sum(lengths), HEADS, VALUE_HEADS, K, V, with_state=False, seed=3)
    inputs = {name: x.to(DTYPES[dtype]) for name, x in inputs.items()}
    draw = Draw(5)
    shape = (len(lengths), VALUE_HEADS, K, V)
    state = draw.normal(*((2, *shape) if rule in MOMENTUM else shape)).to(DTYPES[dtype])
    weights = draw.normal(1, sum(lengths), VALUE_HEADS, V).to(DTYPES[dtype])
    state_weights = draw.normal(*state.shape).to(DTYPES[dtype])
    function = public_function(rule, "chunk")
    options: dict[str, Any] = {"chunk_size": 16, "output_final_state": True}
    if rule == "linear_attn":
        options["normalize"] = False

    def run(inputs: dict[str, Tensor], state: Tensor, **where: Any) -> tuple[Any, dict[str, Tensor], Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        initial = state.clone().requires_grad_()
        return function(**leaves, initial_state=initial if with_state else None, **options, **where), leaves, initial

    whole, leaves, initial = run(inputs, state, cu_seqlens=boundaries)
    ((whole.o * weights).sum() + (whole.final_state * state_weights).sum()).backward()
    local = {name: plan.scatter(x) for name, x in inputs.items()}
    here, parts, own_initial = run(local, state, context_parallel=plan)
    share = (here.final_state * state_weights).sum() / ranks  # every rank has all of it
    ((here.o * plan.scatter(weights)).sum() + share).backward()
    with torch.no_grad():
        plain = function(**local, initial_state=state if with_state else None, **options, context_parallel=plan)
    errors = {
        "o": relative(plan.gather(here.o), whole.o),
        "final_state": relative(here.final_state, whole.final_state),
        "o without gradients": relative(plan.gather(plain.o), whole.o),
        "final_state without gradients": relative(plain.final_state, whole.final_state),
    }
    for name, x in parts.items():
        errors[f"grad {name}"] = relative(plan.gather(x.grad), leaves[name].grad)
    if with_state:
        errors["grad initial_state"] = relative(summed(own_initial.grad), initial.grad)
    return errors


def conv_case(documents: str, layout: str = "contiguous", tokens_per_rank: int = 21) -> Errors:
    """A short convolution with states carried in and out."""
    ranks = dist.get_world_size()
    lengths = patterns(tokens_per_rank * ranks, ranks)[documents]
    boundaries = SequenceBoundaries.from_lengths(lengths)
    plan = ContextParallelPlan.from_cu_seqlens(boundaries.cu_seqlens, None, layout)
    torch.manual_seed(0)
    conv = ShortConvolution(5, 4).double()
    x = torch.randn(1, sum(lengths), 5, dtype=torch.float64)
    state = torch.randn(len(lengths), 5, 3, dtype=torch.float64)
    weights = torch.randn_like(x)
    whole, after = conv(x, make_layout((1, x.shape[1]), cu_seqlens=boundaries), state, return_state=True)
    (grad_whole,) = torch.autograd.grad((whole * weights).sum(), conv.weight)
    here, own_after = conv(plan.scatter(x), state=state, return_state=True, context_parallel=plan)
    (grad_here,) = torch.autograd.grad((here * plan.scatter(weights)).sum(), conv.weight)
    return {
        "y": relative(plan.gather(here), whole),
        "state": relative(own_after, after),
        "grad weight": relative(summed(grad_here), grad_whole),
    }


# -------------------------------------------------------------------------------------------------------------- models


def model_case(
    name: str = "momentum_deltanet",
    documents: str = "one-token and empty documents",
    layout: str = "contiguous",
    dtype: str = "float64",
    tokens_per_rank: int = 13,
    by_context: bool = False,
    shifted: bool = False,
    loss_chunk_size: int | None = 8,
) -> Errors:
    """Loss (logits without ``loss_chunk_size``) and the gradient of every parameter.

    ``shifted`` gives shift_labels instead of labels, and ``by_context`` uses the context manager.
    """
    ranks = dist.get_world_size()
    total = tokens_per_rank * ranks
    lengths = patterns(total, ranks)[documents]
    boundaries = SequenceBoundaries.from_lengths(lengths)
    plan = ContextParallelPlan.from_cu_seqlens(boundaries.cu_seqlens, None, layout)
    model = small_model(name, loss_chunk_size=loss_chunk_size).to(DTYPES[dtype]).train()
    ids = tokens(1, total)
    labels = torch.where(tokens(1, total, seed=2) % 5 == 0, -100, ids)
    kind = "shift_labels" if shifted else "labels"
    whole = model(ids, cu_seqlens=boundaries, **{kind: labels})
    whole.loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    local = {kind: plan.scatter(labels)}
    if by_context:
        with context_parallel(plan):
            here = model(plan.scatter(ids), **local)
    else:
        here = model(plan.scatter(ids), **local, context_parallel=plan)
    here.loss.backward()
    plan.sum_gradients(model)
    errors = {"loss": relative(here.loss, whole.loss)}
    if here.logits is not None:
        errors["logits"] = relative(plan.gather(here.logits), whole.logits)
    for name, parameter in model.named_parameters():
        errors[f"grad {name}"] = relative(parameter.grad, expected[name])
    return errors


def tensor_case(
    name: str = "momentum_deltanet", dtype: str = "float64", context: int = 1, passes: int = 1, **fields: Any
) -> Errors:
    """Heads over ranks, and with ``context`` > 1 tokens too; ``passes`` backward passes accumulate."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (context, ranks // context), mesh_dim_names=("context", "tensor"))
    boundaries = SequenceBoundaries.from_lengths([7, 17])
    plan = ContextParallelPlan.from_cu_seqlens(boundaries.cu_seqlens, mesh["context"])
    model = small_model(name, loss_chunk_size=8, **fields).to(DTYPES[dtype]).train()
    ids = tokens(1, 24)
    whole = model(ids, cu_seqlens=boundaries, labels=ids)
    whole.loss.backward()
    expected = {name: p.grad * passes for name, p in model.named_parameters()}
    model.zero_grad()
    split_model(model, mesh["tensor"])
    where = {"context_parallel": plan} if context > 1 else {"cu_seqlens": boundaries}
    for _ in range(passes):
        here = model(plan.scatter(ids), labels=plan.scatter(ids), **where)
        here.loss.backward()
    errors = {"loss": relative(here.loss, whole.loss)}
    for name, parameter in model.named_parameters():
        grad = whole_of(parameter.grad).clone()
        dist.all_reduce(grad, group=plan.group)
        errors[f"grad {name}"] = relative(grad, expected[name])
    return errors


def saved_case(name: str) -> Errors:
    """A split model writes the same files as a whole one, and a whole model's files load as a split one."""
    model, ids = small_model(name).train(), tokens(1, 12)
    expected = {name: x.clone() for name, x in model.state_dict().items()}
    logits = model(ids).logits
    folder = Path(os.environ["CASE_FOLDER"]) / name
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "whole")
    dist.barrier()
    split = AutoModelForCausalLM.from_pretrained(folder / "whole", tp_plan="auto")
    cut = sum(isinstance(p, DTensor) for p in split.parameters())
    split.save_pretrained(folder / "split")
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(folder / "split")
    with torch.no_grad():
        steps = split.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        plain = again.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    files = [(folder / kind / "config.json").read_text() for kind in ("whole", "split")]
    return {
        "logits": relative(split(ids).logits, logits),
        "files": max(relative(x, expected[name]) for name, x in again.state_dict().items()),
        "config": float(files[0] != files[1]),
        "tokens": relative(steps.float(), plain.float()),
        "nothing was cut": float(cut < 20),
    }


# -------------------------------------------------------------------------------------------------------------- faults


@contextmanager
def fault(kind: str) -> Iterator[None]:
    """A mistake that the cases above must notice."""
    plan = ContextParallelPlan
    if kind == "a dropped A":
        exchanged = plan.exchange
        patch = mock.patch.object(plan, "exchange", lambda self, E, A: exchanged(self, E, 0 * A))
    elif kind == "a dropped halo":
        history = plan.history
        patch = mock.patch.object(plan, "history", lambda self, x, *rest: 0 * history(self, x, *rest))
    else:
        gather = exchange.all_gather
        patch = mock.patch.object(exchange, "all_gather", lambda x, group: gather(x, group).flip(0))
    with patch:
        yield


def faulty(kind: str, **arguments: Any) -> Errors:
    with fault(kind):
        return model_case(documents="one document", layout="zigzag", **arguments)


# --------------------------------------------------------------------------------------------------------------- cases

DOCUMENTS = tuple(patterns(40, 2))
LAYOUTS = ("contiguous", "zigzag")
FAULTS = ("a dropped A", "a dropped halo", "a swapped order of ranks")
SHORT = {"documents": "one document", "tokens_per_rank": 2}
"""ranges shorter than the convolution"""
Case = tuple[Callable[..., Errors], dict[str, Any]]


def quick_cases() -> Iterator[tuple[str, Case]]:
    for layout in LAYOUTS:
        for documents in DOCUMENTS:
            yield f"momentum, {documents}, {layout}", (op_case, {"documents": documents, "layout": layout})
        for rule in ("general", "vector", *FIRST_ORDER):
            yield f"{rule}, {layout}", (op_case, {"rule": rule, "documents": DOCUMENTS[4], "layout": layout})
        yield f"momentum, two levels, {layout}", (op_case, {"layout": layout, "ranks_per_node": 1})
        yield f"momentum, short ranges, {layout}", (op_case, {**SHORT, "layout": layout})
        yield f"convolution, {layout}", (conv_case, {"documents": DOCUMENTS[-1], "layout": layout})
        yield f"convolution, short ranges, {layout}", (conv_case, {**SHORT, "layout": layout})
        for name in ("momentum_deltanet", "gated_deltanet", "comba", "hybrid"):
            yield f"{name} model, {layout}", (model_case, {"name": name, "layout": layout})
    yield "momentum, no states", (op_case, {"with_state": False})
    yield "model, short ranges", (model_case, SHORT)
    yield "model, shift_labels by context", (model_case, {"shifted": True, "by_context": True})


def slow_cases() -> Iterator[tuple[str, Case]]:
    for documents in DOCUMENTS:
        for rule in FIRST_ORDER:
            yield f"{rule}, {documents}", (op_case, {"rule": rule, "documents": documents})
        for layout in LAYOUTS:
            yield f"convolution, {documents}, {layout}", (conv_case, {"documents": documents, "layout": layout})
            mixers = [name for name in MODELS if name != "gated_deltaproduct"]  # it refuses a plan
            for name in mixers if documents == DOCUMENTS[-1] else ("momentum_deltanet", "hybrid"):
                arguments = {"name": name, "documents": documents, "layout": layout}
                yield f"{name} model, {documents}, {layout}", (model_case, arguments)


def float32_cases() -> Iterator[tuple[str, Case]]:
    for rule in ("momentum", "general", "vector", *FIRST_ORDER):
        yield f"{rule}, float32", (op_case, {"rule": rule, "dtype": "float32"})
    for name in ("momentum_deltanet", "gated_deltanet", "hybrid"):
        arguments = {"name": name, "dtype": "float32", "loss_chunk_size": None}
        yield f"{name} model, float32", (model_case, arguments)


def tensor_cases() -> Iterator[tuple[str, Case]]:
    mixers = [name for name, mixer in MIXERS.items() if mixer.tensor_plan]
    for name in (*mixers, "hybrid", "no convolution", "grouped value heads"):
        yield f"{name}, tensor 2", (tensor_case, {"name": name})
    yield "low-rank gate, tensor 2", (tensor_case, {"use_lora_gate": True, "lora_gate_rank": 4})
    yield "momentum_deltanet, tensor 2, float32", (tensor_case, {"dtype": "float32"})
    yield "momentum_deltanet, tensor 2, two passes", (tensor_case, {"passes": 2})
    for name in ("hybrid", "momentum_deltanet", "kda"):
        yield f"{name}, saved and loaded, tensor 2", (saved_case, {"name": name})


TENSOR = dict(tensor_cases())
TENSOR_OF_FOUR = {
    "momentum_deltanet, context 2 x tensor 2": (tensor_case, {"context": 2}),
    "hybrid, context 2 x tensor 2": (tensor_case, {"name": "hybrid", "context": 2}),
    "momentum_deltanet, tensor 4": (tensor_case, {}),
}
QUICK, SLOW, FLOAT32 = dict(quick_cases()), dict(slow_cases()), dict(float32_cases())
WRONG = {kind: (faulty, {"kind": kind}) for kind in FAULTS}
CASES: dict[str, Case] = {**QUICK, **SLOW, **FLOAT32, **WRONG, **TENSOR, **TENSOR_OF_FOUR}
