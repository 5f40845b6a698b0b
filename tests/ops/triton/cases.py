"""Runs groups of kernel cases under Triton's interpreter and prints errors against the float64 recurrence as JSON.

    TRITON_INTERPRET=1 python cases.py GROUP

It is a script because the interpreter has to be switched on before Triton is imported anywhere in the process; the
tests start one process per group. Uninitialised memory is filled with NaN, so a kernel that reads what nobody wrote
shows it. Every error is the largest absolute difference divided by the largest absolute value.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from reference import recurrence

import mdn.ops.triton as kernels
from mdn.bench.gpu.interpreter import repair
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum.interface import RuleOptions as Options
from mdn.ops.momentum.interface import RuleTensors, StepState
from mdn.ops.triton.host import intercept_launches, run_launch

GRADIENTS = ("q", "k", "v", "p", "log_alpha", "log_mu", "beta", "eta", "initial_state")
INFINITY = float("inf")


def sprinkle(gates, fraction, value, generator):
    """Put ``value`` at random places."""
    chosen = torch.rand(gates.shape, generator=generator, dtype=torch.float64) < fraction
    return torch.where(chosen, torch.full_like(gates, value), gates)


def make_inputs(batch, time, heads, value_heads, key_dim, value_dim, sequences, given_p=False, state=True):
    """float64 inputs, gates over their whole range: mu and alpha from 1 to a hard 0, beta and eta with zeros."""
    generator = torch.Generator().manual_seed(7)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    gate = lambda: torch.rand(batch, time, value_heads, generator=generator, dtype=torch.float64)  # noqa: E731
    log_mu = sprinkle(sprinkle(-3.0 * gate() ** 2, 0.1, -INFINITY, generator), 0.2, 0.0, generator)
    log_mu = sprinkle(log_mu, 0.1, -25.0, generator)
    log_alpha = sprinkle(sprinkle(-0.2 * gate(), 0.04, -INFINITY, generator), 0.3, 0.0, generator)
    log_alpha = sprinkle(log_alpha, 0.05, -12.0, generator)
    return {
        "q": normal(batch, time, heads, key_dim),
        "k": normal(batch, time, heads, key_dim),
        "v": normal(batch, time, value_heads, value_dim),
        "p": normal(batch, time, heads, key_dim) if given_p else None,
        "log_alpha": log_alpha,
        "log_mu": log_mu,
        "beta": sprinkle(0.5 * gate(), 0.1, 0.0, generator),
        "eta": sprinkle(1.5 * gate(), 0.05, 0.0, generator),
        "initial_state": normal(2, sequences, value_heads, key_dim, value_dim) if state else None,
    }


def relative_error(found, expected):
    if not expected.numel():
        return 0.0
    scale = expected.abs().max().clamp_min(1e-30)
    error = ((found.detach().double() - expected.detach()).abs().max() / scale).item()
    return error if error == error else INFINITY


def exact_results(inputs, lengths, options, cotangents):
    """Outputs and gradients of the float64 recurrence."""
    leaves = {name: None if x is None else x.clone().requires_grad_() for name, x in inputs.items()}
    o, final_state = recurrence(*leaves.values(), lengths, options)
    ((o * cotangents[0]).sum() + (final_state * cotangents[1]).sum()).backward()
    results = {"o": o, "final_state": final_state}
    return results | {"d" + name: leaf.grad for name, leaf in leaves.items() if leaf is not None}


def kernel_results(inputs, boundaries, options, cotangents):
    o, final_state, residual = kernels.forward(RuleTensors(**inputs), boundaries, options, True)
    gradients = kernels.backward(*cotangents, RuleTensors(**inputs), residual, boundaries, options)
    results = {"o": o, "final_state": final_state}
    return results | {"d" + name: x for name, x in zip(GRADIENTS, gradients) if x is not None}


def narrowed(inputs, dtype):
    """The inputs in the dtypes that a caller would use: gates and states stay float32 beside 16-bit inputs."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    is_row = ("q", "k", "p", "v")
    return {name: None if x is None else x.to(dtype if name in is_row else wide) for name, x in inputs.items()}


def compare(inputs, options, lengths=None, dtype=torch.float32):
    """Errors of every output and gradient of the kernels; `lengths` makes it a pack."""
    low = narrowed(inputs, dtype)
    exact = {name: None if x is None else x.double() for name, x in low.items()}
    batch, time = inputs["q"].shape[:2]
    boundaries = None if lengths is None else SequenceBoundaries.from_lengths(lengths)
    generator = torch.Generator().manual_seed(8)
    sequences = batch if lengths is None else len(lengths)
    state_shape = (2, sequences, inputs["v"].shape[2], inputs["q"].shape[-1], inputs["v"].shape[-1])
    grad_o = torch.randn(inputs["v"].shape, generator=generator, dtype=torch.float64).to(dtype)
    grad_state = torch.randn(state_shape, generator=generator, dtype=torch.float64).to(low["beta"].dtype)
    found = kernel_results(low, boundaries, options, (grad_o, grad_state))
    cotangents = grad_o.double(), grad_state.double()
    expected = exact_results(exact, lengths or [time] * batch, options, cotangents)
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    return errors, exact, cotangents, expected


def budgeted(inputs, options, dtype):
    """Errors divided by what one more rounding of q, k, v and the cotangent to ``dtype`` does to the exact result.

    The noise is half a unit in the last place, at random: what any computation with such operands has to live with.
    """
    errors, exact, cotangents, expected = compare(inputs, options, dtype=dtype)
    generator = torch.Generator().manual_seed(9)
    unit = torch.finfo(dtype).eps / 2

    def noisy(x):
        return x * (1 + unit * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1))

    shaken = {name: noisy(x) if name in ("q", "k", "v") else x for name, x in exact.items()}
    moved = exact_results(shaken, [exact["q"].shape[1]], options, (noisy(cotangents[0]), cotangents[1]))
    return {name: errors[name] / relative_error(moved[name], expected[name]) for name in errors}


def hostile_gates():
    options = Options(scale=32**-0.5)
    yield "grouped heads, two chunks and a bit", compare(make_inputs(1, 133, 1, 2, 32, 32, 1), options)[0]
    options = Options(scale=0.3, chunk_size=32, p_times_alpha=False)
    yield "given p, shorter than a chunk", compare(make_inputs(2, 21, 1, 1, 32, 16, 2, given_p=True), options)[0]
    options = Options(scale=1.0, chunk_size=16)
    yield "one token", compare(make_inputs(2, 1, 1, 1, 16, 16, 2, given_p=True, state=False), options)[0]


def constant_momentum():
    """One pack whose sequences have log_mu = 0, -0.5, -1, -2, -20 and -inf throughout."""
    values = (0.0, -0.5, -1.0, -2.0, -20.0, -INFINITY)
    inputs = make_inputs(1, 40 * len(values), 1, 1, 16, 16, len(values))
    inputs["log_alpha"] = -0.05 * torch.ones_like(inputs["log_alpha"])
    inputs["log_mu"] = torch.tensor(values, dtype=torch.float64).repeat_interleave(40)[None, :, None]
    yield "constant log_mu", compare(inputs, Options(scale=0.25, chunk_size=64), [40] * len(values))[0]


def several_chunks():
    """Gentle gates, so that what one chunk hands to the next still counts at its end."""
    for name, lengths in (("gentle gates", None), ("gentle gates in a pack", [17, 33])):
        inputs = make_inputs(1, 50, 1, 1, 16, 16, len(lengths or [50]))
        inputs["log_alpha"] = torch.full_like(inputs["log_alpha"], -0.02)
        inputs["log_mu"] = torch.full_like(inputs["log_mu"], -0.1)
        yield name, compare(inputs, Options(scale=0.25, chunk_size=16), lengths)[0]


def packs():
    lengths = [0, 1, 37, 0, 2, 0]
    options = Options(scale=0.2, chunk_size=32)
    yield (
        "empty and one-token sequences, odd K and V",
        compare(make_inputs(1, 40, 1, 2, 24, 40, 6, given_p=True), options, lengths)[0],
    )
    nothing = make_inputs(1, 0, 1, 1, 16, 16, 2)
    state = nothing["initial_state"].float()
    o, final_state, _ = kernels.forward(
        RuleTensors(**narrowed(nothing, torch.float32)), SequenceBoundaries.from_lengths([0, 0]), options, True
    )
    yield "no tokens at all", {"o": float(o.numel()), "final_state": relative_error(final_state, state.double())}


def float32_recurrence_errors(inputs, options, cotangents, expected):
    """Errors of the recurrence itself in float32: what any float32 computation of these inputs may lose."""
    low = narrowed(inputs, torch.float32)
    found = exact_results(low, [inputs["q"].shape[1]], options, [x.float() for x in cotangents])
    return {name: relative_error(found[name], expected[name]) for name in expected}


def equal_keys_and_open_gates():
    """64 tokens of an undamped oscillator: the entries of N grow to 32."""
    inputs = make_inputs(1, 64, 1, 1, 16, 16, 1)
    inputs["k"] = torch.ones_like(inputs["k"])
    for name, value in (("log_alpha", 0.0), ("log_mu", 0.0), ("beta", 0.5), ("eta", 1.0)):
        inputs[name] = torch.full_like(inputs[name], value)
    return inputs


def strong_coupling():
    """Equal keys and all gates open: (I + N)^-1 as a product of powers would lose every digit here.

    Errors are divided by those of the float32 recurrence; the names of the cases are the chunk sizes.
    """
    inputs = equal_keys_and_open_gates()
    for chunk_size in (16, 32, 64):
        options = Options(scale=0.25, chunk_size=chunk_size)
        errors, _, cotangents, expected = compare(inputs, options)
        unit = float32_recurrence_errors(inputs, options, cotangents, expected)
        yield str(chunk_size), {name: error / unit[name] for name, error in errors.items()}


def rounded_inverse():
    """The same at chunk 64 in float64, but for one rounding of the stored inverse to float32."""
    inputs = equal_keys_and_open_gates()

    def round_inverse(launch):
        run_launch(launch)
        if launch.name == "prepare":
            launch.arguments["inverse"].copy_(launch.arguments["inverse"].float())

    options = Options(scale=0.25)
    yield "float64", compare(inputs, options, dtype=torch.float64)[0]
    with intercept_launches(round_inverse):
        yield "inverse rounded", compare(inputs, options, dtype=torch.float64)[0]


def chunks_by_substitution(inputs, options):
    """o of one head in the chunk form in float32, with its triangular systems solved by substitution."""
    q, k, v = (torch.nn.functional.normalize(inputs[n][0, :, 0].float(), dim=-1) for n in "qkv")
    v = inputs["v"][0, :, 0].float()
    alpha, mu = (inputs[n][0, :, 0].float().exp() for n in ("log_alpha", "log_mu"))
    beta, eta = (inputs[n][0, :, 0].float() for n in ("beta", "eta"))
    C = options.chunk_size
    S = M = torch.zeros(q.shape[-1], v.shape[-1])
    outputs = []
    for first in range(0, len(q), C):
        rows = slice(first, first + C)
        row_S = row_M = torch.zeros(C)
        abar, b, mbar = torch.tensor(1.0), torch.tensor(0.0), torch.tensor(1.0)
        gamma, gamma_before, reads, queries = [], [], [], []
        for i in range(C):
            gamma_before.append(row_S)
            reads.append((abar, b))
            row_M = mu[first + i] * row_M + eta[first + i] * torch.eye(C)[i]
            row_S = alpha[first + i] * row_S + beta[first + i] * row_M
            abar, mbar = alpha[first + i] * abar, mu[first + i] * mbar
            b = alpha[first + i] * b + beta[first + i] * mbar
            gamma.append(row_S)
            queries.append((abar, b))
        p = alpha[rows, None] * k[rows]
        (read_S, read_M), (query_S, query_M) = (torch.tensor(x).T[..., None] for x in (reads, queries))
        erase = (p @ k[rows].T) * torch.stack(gamma_before)
        target = v[rows] - read_S * (p @ S) + read_M * (p @ M)
        R = torch.linalg.solve_triangular(erase, target, upper=False, unitriangular=True)
        o = query_S * (q[rows] @ S) - query_M * (q[rows] @ M) + ((q[rows] @ k[rows].T) * torch.stack(gamma)) @ R
        outputs.append(options.scale * o)
        S = abar * S - b * M + (row_S[:, None] * k[rows]).T @ R
        M = mbar * M - (row_M[:, None] * k[rows]).T @ R
    return torch.cat(outputs)[None, :, None]


def repeated_key():
    """One key for 512 tokens, hardly damped: the largest errors of o at chunk size 16 and 64, and what others lose."""
    inputs = make_inputs(1, 512, 1, 1, 64, 16, 1, state=False)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    for name, value in (("log_alpha", -0.01), ("log_mu", -0.01), ("beta", 1.0), ("eta", 2.0)):
        inputs[name] = torch.full_like(inputs[name], value)
    options = Options(scale=0.125)
    low = narrowed(inputs, torch.float32)
    exact = recurrence(*({n: None if x is None else x.double() for n, x in low.items()}).values(), [512], options)[0]
    for chunk_size in (16, 64):
        found = kernels.forward(RuleTensors(**low), None, Options(scale=0.125, chunk_size=chunk_size), False).o
        yield str(chunk_size), {"o": relative_error(found, exact)}
    yield "float32 recurrence", {"o": relative_error(recurrence(*low.values(), [512], options)[0], exact)}
    yield "substitution", {"o": relative_error(chunks_by_substitution(inputs, options), exact)}


def double_precision():
    options = Options(scale=0.3, chunk_size=64)
    yield "float64", compare(make_inputs(1, 80, 1, 2, 16, 24, 1, given_p=True), options, dtype=torch.float64)[0]
    options = Options(scale=0.3, chunk_size=16, l2norm=False)
    inputs = make_inputs(1, 20, 1, 1, 16, 16, 1)
    inputs["k"] = 0.2 * inputs["k"]
    yield "float64 without L2 norm", compare(inputs, options, dtype=torch.float64)[0]


def narrow_operands():
    """bfloat16 and float16 within their budget, with TF32 taken as the tensor cores take it."""
    repair(emulate_tf32=True)
    inputs = make_inputs(1, 130, 1, 1, 128, 64, 1)
    yield "bfloat16", budgeted(inputs, Options(scale=128**-0.5), torch.bfloat16)
    yield "float16", budgeted(make_inputs(1, 70, 1, 1, 32, 32, 1), Options(scale=0.2), torch.float16)


def tf32_emulated():
    repair(emulate_tf32=True)
    yield "float32 through tf32x3", compare(make_inputs(1, 100, 1, 1, 32, 32, 1), Options(scale=0.2))[0]


def decode(p_given, indices, dtype):
    """Three tokens through `step_` with states in slots of a larger, strided buffer; other slots stay as they were."""
    batch, slots = 3, 5
    inputs = narrowed(make_inputs(batch, 3, 1, 2, 24, 40, slots, given_p=p_given), dtype)
    options = Options(scale=0.2)
    buffer = torch.zeros(2, slots, 2, 24, 48)[..., :40]
    buffer.copy_(inputs["initial_state"])
    before = buffer.clone()
    rows = {name: x for name, x in inputs.items() if name != "initial_state"}
    where = list(range(batch)) if indices is None else indices
    table = None if indices is None else torch.tensor(indices, dtype=torch.int32)
    outputs = []
    for t in range(3):
        token = RuleTensors(*(None if x is None else x[:, t] for x in rows.values()))
        outputs.append(kernels.step_(token, StepState(buffer[0], buffer[1], table), options))
    o = torch.stack(outputs, dim=1)
    kept = [b for b in range(batch) if 0 <= where[b] < slots]
    exact = [None if x is None else x[kept].double() for x in rows.values()]
    state = before[:, [where[b] for b in kept]].double()
    o_exact, state_exact = recurrence(*exact, state, [3] * len(kept), options)
    untouched = [slot for slot in range(slots) if slot not in where]
    skipped = [b for b in range(batch) if b not in kept]
    return {
        "o": relative_error(o[kept], o_exact),
        "state": relative_error(buffer[:, [where[b] for b in kept]], state_exact),
        "untouched slots": (buffer[:, untouched] - before[:, untouched]).abs().max().item(),
        "skipped rows": o[skipped].abs().sum().item(),
    }


def decoding():
    yield "no table", decode(False, None, torch.float32)
    yield "slots in any order and a padding row", decode(True, [4, -1, 1], torch.float32)
    yield "a slot that does not exist", decode(False, [5, 2, 1 << 30], torch.float32)


GROUPS = (
    hostile_gates,
    constant_momentum,
    several_chunks,
    packs,
    strong_coupling,
    rounded_inverse,
    repeated_key,
    double_precision,
    narrow_operands,
    tf32_emulated,
    decoding,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # with this, torch.empty is filled with NaN
    repair()
    wanted = sys.argv[1:]
    results = {group.__name__: dict(group()) for group in GROUPS if group.__name__ in wanted}
    print(json.dumps(results))
