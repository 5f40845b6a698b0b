"""Runs groups of kernel cases under Triton's interpreter and prints errors against the float64 recurrence as JSON.

    TRITON_INTERPRET=1 PYTHONPATH=tests python tests/ops/triton/cases.py GROUP ...

What every backend has to compute is in tests/ops/test_conformance.py; here is what the kernels do with keys that come
again, with slots that do not exist, with tokens that are not finite, and in calls without outputs. It is a script
because the interpreter has to be switched on before Triton is imported anywhere in the process. Errors are the largest
absolute difference divided by the largest absolute value.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

import mdn.ops.triton as kernels
from definition import converted, leaves, make_inputs, momentum_delta_rule, relative_error, run_with_gradients
from mdn.bench.gpu.interpreter import repair
from mdn.ops import chunk_momentum_delta_rule, momentum_delta_step
from mdn.ops.momentum.interface import RuleOptions, RuleTensors
from mdn.ops.triton.host import intercept_launches, run_launch
from mdn.ops.triton.tiles import assume_target


def kernel_form(inputs, **options):
    return chunk_momentum_delta_rule(**inputs, **options, output_final_state=True, backend="triton")


def errors_of(results, exact):
    return {name: relative_error(x, exact[name]) for name, x in results.items()}


def equal_keys_and_open_gates():
    """64 tokens of an undamped oscillator: the entries of N grow to 32."""
    inputs = make_inputs(B=1, T=64, H=1, K=16, V=16, gates="open", dtype=torch.float64, seed=7)
    return inputs | {"k": torch.ones_like(inputs["k"])}


def strong_coupling():
    """Equal keys and all gates open: (I + N)^-1 as a product of powers would lose every digit here.

    Errors are divided by those of the float32 recurrence; the names of the cases are the chunk sizes. A rounding error
    may be small by luck, on one processor and not on another: the recurrence sums over K in several orders, and its
    largest error counts.
    """
    inputs = converted(equal_keys_and_open_gates(), torch.float32)

    def results(x, dtype):
        return run_with_gradients(lambda x: momentum_delta_rule(**x), leaves(x, dtype), torch.float32)

    exact = results(inputs, torch.float64)
    unit = errors_of(results(inputs, torch.float32), exact)
    for order in (torch.arange(16).flip(0), torch.randperm(16, generator=torch.Generator())):
        ordered = inputs | {name: inputs[name][..., order] for name in ("q", "k")}
        ordered["initial_state"] = inputs["initial_state"][..., order, :]
        lost = errors_of(results(ordered, torch.float32), results(ordered, torch.float64))
        unit = {name: max(error, lost[name]) for name, error in unit.items()}
    for chunk_size in (16, 32, 64):
        found = run_with_gradients(lambda x, size=chunk_size: kernel_form(x, chunk_size=size), leaves(inputs))
        yield str(chunk_size), {name: error / unit[name] for name, error in errors_of(found, exact).items()}


def rounded_inverse():
    """The same at chunk 64 in float64, but for one rounding of the stored inverse to float32."""
    inputs = equal_keys_and_open_gates()
    exact = run_with_gradients(lambda x: momentum_delta_rule(**x), leaves(inputs))

    def round_inverse(launch):
        run_launch(launch)
        if launch.name == "prepare":
            launch.arguments["inverse"].copy_(launch.arguments["inverse"].float())

    yield "float64", errors_of(run_with_gradients(kernel_form, leaves(inputs)), exact)
    with intercept_launches(round_inverse):
        yield "inverse rounded", errors_of(run_with_gradients(kernel_form, leaves(inputs)), exact)


def chunks_by_substitution(inputs, C):
    """o of one head in the chunk form in float32, with its triangular systems solved by substitution."""
    q, k, v = (torch.nn.functional.normalize(inputs[n][0, :, 0].float(), dim=-1) for n in "qkv")
    v = inputs["v"][0, :, 0].float()
    alpha, mu = (inputs[n][0, :, 0].float().exp() for n in ("log_alpha", "log_mu"))
    beta, eta = (inputs[n][0, :, 0].float() for n in ("beta", "eta"))
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
        outputs.append(q.shape[-1] ** -0.5 * o)
        S = abar * S - b * M + (row_S[:, None] * k[rows]).T @ R
        M = mbar * M - (row_M[:, None] * k[rows]).T @ R
    return torch.cat(outputs)[None, :, None]


def repeated_key():
    """One key for 512 tokens, hardly damped: the largest errors of o at chunk size 16 and 64, and what others lose."""
    sizes = {"B": 1, "T": 512, "H": 1, "K": 64, "V": 16}
    inputs = make_inputs(**sizes, keys="repeated", gates="weakly damped", with_state=False, seed=7)
    exact, _ = momentum_delta_rule(**converted(inputs, torch.float64))
    for chunk_size in (16, 64):
        yield str(chunk_size), {"o": relative_error(kernel_form(inputs, chunk_size=chunk_size)[0], exact)}
    yield "float32 recurrence", {"o": relative_error(momentum_delta_rule(**inputs)[0], exact)}
    yield "substitution", {"o": relative_error(chunks_by_substitution(inputs, 64), exact)}


def absent_slots():
    """Rows whose slot does not exist, as padding of a batch has it, give zeros and change nothing."""
    for indices in ([4, -1, 1], [5, 2, 1 << 30]):
        inputs = make_inputs(B=3, T=1, H=1, HV=2, K=24, V=40)
        pool = torch.randn(2, 5, 2, 24, 40, generator=torch.Generator().manual_seed(3))
        before = pool.clone()
        token = {name: x[:, 0] for name, x in inputs.items() if name != "initial_state"}
        slots = {"state_indices": torch.tensor(indices, dtype=torch.int32), "check_gates": False}
        o = momentum_delta_step(**token, p=None, state=pool, backend="triton", **slots)
        rows = [b for b, slot in enumerate(indices) if 0 <= slot < 5]
        kept = [indices[b] for b in rows]
        state = before[:, kept].double()
        exact = {name: x[rows].double() for name, x in inputs.items() if name != "initial_state"}
        expected_o, expected_state = momentum_delta_rule(**exact, initial_state=state)
        others = [slot for slot in range(5) if slot not in kept]
        yield (
            str(indices),
            {
                "o": relative_error(o[rows], expected_o[:, 0]),
                "state": relative_error(pool[:, kept], expected_state),
                "untouched slots": (pool[:, others] - before[:, others]).abs().max().item(),
                "skipped rows": o[[b for b in range(3) if b not in rows]].abs().sum().item(),
            },
        )


def states_only():
    """A call that needs no outputs has the same final states, bit by bit, also behind a token that is not finite."""
    for kind, damage in (("finite", 0.0), ("with a NaN", float("nan"))):
        inputs = make_inputs(B=1, T=40, H=1, HV=2, K=16, V=24, N=1)
        inputs["v"][0, 20, 1, 3] += damage
        tensors = RuleTensors(**{"p": None} | inputs)
        whole, states = (kernels.forward(tensors, None, RuleOptions(0.25, 16, outputs=x), False) for x in (True, False))
        same = torch.equal(whole.final_state.nan_to_num(7.0), states.final_state.nan_to_num(7.0))
        yield kind, {"states": float(not same), "outputs": states.o.numel()}


def damaged_tokens():
    """A token that is not finite changes no bit of earlier outputs nor of other columns and value heads; from it on all
    is NaN. Tokens 28 and 60 lie where blocks of the inverse are joined."""
    for name, dtype, token, given_p in (
        ("v", torch.float32, 60, False),
        ("log_alpha", torch.float32, 60, False),
        ("k", torch.bfloat16, 28, False),
        ("k", torch.float32, 60, True),
    ):
        inputs = make_inputs(B=1, T=70, H=1, HV=2, K=16, V=24, N=1, dtype=dtype)
        inputs |= {"p": inputs["k"].flip(-1) if given_p else None}
        damaged = inputs | {name: inputs[name].clone()}
        touched = torch.zeros(1, 70, 2, 24, dtype=torch.bool)  # as o [B, T, HV, V]
        # Of v one number, of a gate that of the second value head, of k the vector that both heads share.
        place, reached = {"v": ((1, 3), (1, 3)), "log_alpha": ((1,), (1,)), "k": ((0, 5), ())}[name]
        damaged[name][0, token][place] = float("nan")
        touched[0, token:][:, *reached] = True
        options = RuleOptions(0.25, 64)
        clean, o = (kernels.forward(RuleTensors(**x), None, options, False).o for x in (inputs, damaged))
        case = f"{name}, {dtype}, token {token}, {'with' if given_p else 'without'} p"
        yield case, {"changed": (o != clean)[~touched].sum().item(), "not NaN": (~o.isnan())[touched].sum().item()}


def other_gpus():
    """float32 inputs as for a GPU on which products are cut (sm_90), and one on which chunks are shorter (sm_86)."""
    for target, key_dim in (("sm_90", 128), ("sm_86", 130)):
        inputs = make_inputs(B=1, T=70, H=1, K=key_dim, V=16, dtype=torch.float32)
        exact = run_with_gradients(lambda x: momentum_delta_rule(**x), leaves(inputs, torch.float64), torch.float32)
        with assume_target(target):
            yield target, errors_of(run_with_gradients(kernel_form, leaves(inputs)), exact)


GROUPS = (strong_coupling, rounded_inverse, repeated_key, absent_slots, states_only, damaged_tokens, other_gpus)

if __name__ == "__main__":
    assert kernels.why_unavailable("cpu") is None
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # with this, torch.empty is filled with NaN
    repair()
    print(json.dumps({group.__name__: dict(group()) for group in GROUPS if group.__name__ in sys.argv[1:]}))
