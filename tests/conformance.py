"""Cases that every backend of every rule has to pass, and the error budgets that they are held to.

A case is computed three times: by the definition in float64 (exact), by the definition in float32 (what rounding costs
any computation of these inputs), and by the backend under test, through the public functions alone.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mdn.ops
from definition import (
    AHEAD,
    GATES,
    MOMENTUM,
    VECTOR_MOMENTUM,
    Tensors,
    first_order_rule,
    leaves,
    make_inputs,
    momentum_delta_rule,
    offsets_of,
    relative_error,
    run_with_gradients,
)


@dataclass(frozen=True)
class Case:
    """Two or more ragged chunks of grouped heads whose sizes are no multiples of anything."""

    rule: str = "momentum"
    gates: str | None = None
    keys: str = "random"
    B: int = 2
    T: int = 37
    H: int = 1
    HV: int = 2
    K: int = 20
    V: int = 24
    lengths: tuple[int, ...] | None = None
    """of the sequences of a pack; B is 1 and T their sum"""
    with_p: bool = False
    with_state: bool = True
    scale: float | None = None
    l2norm: bool | None = None
    """None: the rule's default"""
    p_times_alpha: bool = True
    dtype: torch.dtype = torch.float32
    gate_dtype: torch.dtype | None = None
    """None: float32, or float64 for float64 vectors"""
    key_noise: float | None = None
    """not None: one key for all tokens, and so much of a random one"""
    chunk_size: int = 16
    seed: int = 0

    @property
    def offsets(self) -> list[int] | None:
        return None if self.lengths is None else offsets_of(self.lengths)


@cache
def inputs_of(case: Case) -> Tensors:
    sizes = {name: getattr(case, name) for name in ("B", "T", "H", "HV", "K", "V", "gates", "keys", "seed")}
    if case.lengths is not None:
        sizes |= {"B": 1, "T": sum(case.lengths), "N": len(case.lengths)}
    made = make_inputs(case.rule, **sizes, with_p=case.with_p, with_state=case.with_state, dtype=case.dtype)
    if case.rule in MOMENTUM and case.l2norm is False:  # keys of length 4 would make the states explode
        made |= {name: 0.2 * made[name] for name in ("q", "k", "p") if name in made}
    if case.key_noise is not None:
        made["k"] = made["k"][:, :1] + case.key_noise * made["k"]
    if case.gate_dtype is not None:
        made |= {name: x.to(case.gate_dtype) for name, x in made.items() if name in GATES}
    return made


def definition_of(case: Case) -> Callable[[Tensors], tuple[Tensor, ...]]:
    def momentum(x: Tensors) -> tuple[Tensor, ...]:
        switches = {"l2norm": case.l2norm is not False, "p_times_alpha": case.p_times_alpha}
        lookahead = case.rule in AHEAD
        return momentum_delta_rule(**x, scale=case.scale, offsets=case.offsets, lookahead=lookahead, **switches)

    def first_order(x: Tensors) -> tuple[Tensor, ...]:
        states = {name: x[name] for name in ("initial_state", "initial_z") if name in x}
        rest = {name: tensor for name, tensor in x.items() if name not in states}
        options = {"scale": case.scale, "offsets": case.offsets, "l2norm": bool(case.l2norm)}
        return tuple(y for y in first_order_rule(case.rule, rest, **states, **options) if y is not None)

    return momentum if case.rule in MOMENTUM else first_order


def public_function(rule: str, form: str) -> Callable[..., Any]:
    """``form`` is chunk, recurrent or step."""
    name = "vector_momentum_delta" if rule in VECTOR_MOMENTUM else "momentum_delta" if rule in MOMENTUM else rule
    if form == "step":
        return getattr(mdn.ops, f"{name}_step")
    return getattr(mdn.ops, f"{form}_{name}_rule" if rule in MOMENTUM else f"{form}_{name}")


def options_of(case: Case) -> dict[str, Any]:
    """The options of the public functions, chunk form and step alike."""
    options: dict[str, Any] = {} if case.scale is None else {"scale": case.scale}
    if case.l2norm is not None:
        options["use_qk_l2norm_in_kernel"] = case.l2norm
    if not case.p_times_alpha:
        options["use_p_times_alpha"] = False
    if case.rule in AHEAD:
        options["lookahead"] = True
    return options


def backend_form(case: Case, backend: str, **changes: Any) -> Callable[[Tensors], tuple[Tensor, ...]]:
    """The public chunk function, or the recurrent one, as a function of tensors, with the case's options."""
    form = "recurrent" if backend == "recurrent" else "chunk"
    how = {} if form == "recurrent" else {"chunk_size": case.chunk_size, "backend": backend}

    def compute(tensors: Tensors) -> tuple[Tensor, ...]:
        tensors = dict(tensors)
        state, z = tensors.pop("initial_state", None), tensors.pop("initial_z", None)
        options = options_of(case) | how | changes
        if case.rule == "linear_attn":
            options["normalize"] = z is not None
        if case.offsets is not None:
            options.setdefault("cu_seqlens", torch.tensor(case.offsets))
        initial = state if z is None else (state, z)
        function = public_function(case.rule, form)
        o, final = function(**tensors, initial_state=initial, output_final_state=True, **options)
        return (o, *final) if isinstance(final, tuple) else (o, final)

    return compute


def torch_chunk(inputs: Tensors, **options: Any) -> tuple[Tensor, Tensor]:
    """The momentum rule with its final state, by the torch backend unless told otherwise."""
    return mdn.ops.chunk_momentum_delta_rule(**inputs, output_final_state=True, **({"backend": "torch"} | options))


# ----------------------------------------------------------------------------------------------------- budgets

EPSILON = torch.finfo(torch.float32).eps
# A chunk adds up to 64 products at once where the recurrence adds one token after another, and does so twice: it solves
# for the residual and then reads with it. Rounding errors of n terms grow like the root of n: 2 * sqrt(64).
CHUNK_FORM = 16
# What the documentation promises of float32 for every gate: largest difference over largest value of the whole tensor.
OUTPUT_BAR, GRADIENT_BAR = 2e-6, 1e-5
# Triton multiplies operands of the inputs' own 16 bits. It rounds a few in a row: states, residual, weights.
ROUNDINGS_IN_A_ROW = 6


@dataclass(frozen=True)
class Answer:
    """What the definition says in float64, and how far the same lines in float32 are from it."""

    exact: Tensors
    float32_errors: dict[str, float]


def answer(case: Case) -> Answer:
    return _answer(replace(case, chunk_size=0))


@cache
def _answer(case: Case) -> Answer:
    inputs, definition = inputs_of(case), definition_of(case)
    exact = run_with_gradients(definition, leaves(inputs, torch.float64), case.dtype)
    single = run_with_gradients(definition, leaves(inputs, torch.float32), case.dtype)
    return Answer(exact, {name: error_by_head(case, name, x, exact[name]) for name, x in single.items()})


def by_head(case: Case, name: str, x: Tensor) -> list[Tensor]:
    """x in pieces, each the numbers of one head in one sequence."""
    if "state" in name:
        return list(x.flatten(0, -3).flatten(1))
    if name.endswith("_z"):
        return list(x.flatten(0, -2))
    sequences = x[0].split(case.lengths) if case.lengths is not None else list(x)
    return [piece.flatten() for sequence in sequences for piece in sequence.transpose(0, 1)]


def error_by_head(case: Case, name: str, actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value of the same sequence and head, so that none hides behind another.

    A head a thousand times smaller than the largest one counts on that scale: it may have decayed to nothing, and
    exp(-60) from a float32 logarithm is wrong by sixty roundings whoever computes it. The gradient of a gate is a sum
    of K V products that may cancel in a sequence of few tokens, so there it is a third of the largest.
    """
    assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)} is not {tuple(expected.shape)}"
    smallest_share = 1 / 3 if name.removeprefix("grad_") in GATES else 1e-3
    least = smallest_share * expected.abs().max().item() if expected.numel() else 0.0
    worst = 0.0
    for found, reference in zip(by_head(case, name, actual.double()), by_head(case, name, expected.double())):
        difference = (found - reference).abs().max().item() if reference.numel() else 0.0
        if difference != 0:
            scale = max(least, reference.abs().max().item())
            worst = max(worst, difference / scale if difference == difference and scale else math.inf)
    return worst


def budgets(case: Case, backend: str) -> dict[str, float]:
    """The largest error allowed for every result and gradient."""
    # With open gates and a repeated key nothing is damped: a chunk sums C terms that cancel, with weights up to C / 2.
    allowance = CHUNK_FORM * (case.chunk_size / 16) ** 2 if case.gates == "open" else CHUNK_FORM
    floats = {name: allowance * max(error, EPSILON) for name, error in answer(case).float32_errors.items()}
    if case.dtype == torch.float64:  # as many roundings, each smaller; the definition itself makes some of them
        return {name: 4 * budget * torch.finfo(torch.float64).eps / EPSILON for name, budget in floats.items()}
    if case.dtype == torch.float32:
        return floats
    if backend == "triton":
        return {name: ROUNDINGS_IN_A_ROW * error for name, error in narrow_errors(case).items()}
    # Everything inside is float32: a result with 16 bits is rounded once, at the end.
    dtypes = {"o": case.dtype} | {f"grad_{name}": x.dtype for name, x in inputs_of(case).items()}
    narrow = {name: torch.finfo(dtype).eps / 2 for name, dtype in dtypes.items() if dtype != torch.float32}
    return {name: budget + narrow.get(name, 0.0) for name, budget in floats.items()}


def narrow_errors(case: Case) -> dict[str, float]:
    """What one more rounding of the vectors and of the gradient of o to 16 bits does to the exact answer."""
    generator, half = torch.Generator().manual_seed(9), torch.finfo(case.dtype).eps / 2

    def shaken(x: Tensor) -> Tensor:
        return x * (1 + half * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1))

    inputs = inputs_of(case)
    moved = {name: shaken(x.double()) if x.dtype == case.dtype else x.double() for name, x in inputs.items()}
    results = run_with_gradients(definition_of(case), leaves(moved), case.dtype, around=shaken)
    exact = answer(case).exact
    return {name: error_by_head(case, name, x, exact[name]) for name, x in results.items()}


def assert_within_budgets(case: Case, backend: str, actual: Tensors) -> None:
    exact, allowed = answer(case).exact, budgets(case, backend)
    assert actual.keys() == exact.keys()
    errors = {name: error_by_head(case, name, x, exact[name]) for name, x in actual.items()}
    over = {name: f"{error:.1e} > {allowed[name]:.1e}" for name, error in errors.items() if not error <= allowed[name]}
    assert not over, over
    if case.dtype == torch.float32 and case.gates != "open":
        for name, x in actual.items():
            bar = max(GRADIENT_BAR if name.startswith("grad_") else OUTPUT_BAR, answer(case).float32_errors[name])
            assert relative_error(x, exact[name]) <= bar, f"{name}: {relative_error(x, exact[name]):.1e} > {bar}"


def check(case: Case, backend: str, **options: Any) -> None:
    """Outputs, final states and all gradients of the public function are those of the definition, within budget."""
    inputs = leaves(inputs_of(case))
    actual = run_with_gradients(backend_form(case, backend, **options), inputs)
    assert actual["o"].dtype == case.dtype
    for name, x in inputs.items():
        assert actual[f"grad_{name}"].dtype == x.dtype, name
    assert_within_budgets(case, backend, actual)


def run_suite(backend: str, *arguments: str, **environment: str) -> None:
    """tests/ops/test_conformance.py for one backend in a process of its own, with these environment variables."""
    suite = Path(__file__).parent / "ops" / "test_conformance.py"
    variables = os.environ | {"MDN_TEST_BACKENDS": backend, "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(suite)]
    done = subprocess.run([*command, *arguments], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
