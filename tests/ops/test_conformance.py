"""Every backend computes every rule as defined: the same cases for all, through the public functions alone.

MDN_TEST_BACKENDS chooses the backends: torch, cpu, and recurrent, the package's own differentiable loops. Triton runs
under its interpreter, which has to be on before Triton is imported: tests/ops/triton/test_conformance.py starts this
file again in a process of its own, and tests/ops/cpu/test_conformance.py does so for the other instruction sets.
"""

from __future__ import annotations

import math
import os
from functools import partial

import pytest
import torch
from torch import Tensor

from conformance import (
    GRADIENT_BAR,
    OUTPUT_BAR,
    Case,
    answer,
    assert_within_budgets,
    backend_form,
    budgets,
    check,
    definition_of,
    error_by_head,
    inputs_of,
    options_of,
    public_function,
)
from definition import (
    AHEAD,
    FIRST_ORDER,
    FIRST_ORDER_GATES,
    HARD_ZERO,
    KEYS,
    MOMENTUM,
    MOMENTUM_GATES,
    RULES,
    SCALAR_MOMENTUM,
    Tensors,
    converted,
    leaves,
    relative_error,
    run_with_gradients,
)

BACKENDS = os.environ.get("MDN_TEST_BACKENDS", "torch,cpu,recurrent").split(",")
INTERPRETED = "triton" in BACKENDS
"""a kernel takes a second or two under the interpreter, so it skips what other cases show as well"""
FAMILIES = {"torch": RULES, "recurrent": RULES, "cpu": (*SCALAR_MOMENTUM, *FIRST_ORDER), "triton": SCALAR_MOMENTUM}
DTYPES = {
    "recurrent": (torch.float64, torch.bfloat16, torch.float16),
    "torch": (torch.float64, torch.bfloat16, torch.float16),
    "cpu": (torch.bfloat16,),
    "triton": (torch.float64, torch.bfloat16, torch.float16),
}
ALL = [(backend, rule) for backend in BACKENDS for rule in FAMILIES[backend]]
SECOND = [(backend, rule) for backend, rule in ALL if rule in MOMENTUM]
FIRST = [(backend, rule) for backend, rule in ALL if rule not in MOMENTUM]

BRIEF = [("triton", "general"), ("triton", "lookahead")]
"""one constant of the compiled code each: tested where they enter, since the interpreter is slow"""
BRIEF_GATES = ("layer", "alpha 1", "both 0", "falling mu", "mixed")

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_rule = pytest.mark.parametrize(("backend", "rule"), [pair for pair in ALL if pair not in BRIEF])


@pytest.fixture(autouse=True, scope="module")
def _interpreter():
    """bfloat16 and TF32 as the hardware takes them; and one patch of Triton's language for each launch, not for every
    call of a device function, which is half of the interpreter's time."""
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    from mdn.bench.gpu.interpreter import repair

    repair(emulate_tf32=True)
    patch = interpreter._patch_lang

    def patch_once(function):
        modules = [module for module in (tl, tl.core) if any(x is module for x in function.__globals__.values())]
        patched = modules and not any(tl.core.is_builtin(module.load) for module in modules)
        return interpreter._LangPatchScope() if patched else patch(function)

    interpreter._patch_lang = patch_once


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """torch fills what `empty` returns with NaN: whoever reads what nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def equal(actual: Tensors, expected: Tensors, where=lambda name, x: x) -> None:
    for name, x in expected.items():
        assert torch.equal(where(name, actual[name]), where(name, x)), name


# ------------------------------------------------------------------------------------------- gates, keys and sizes


@pytest.mark.parametrize(
    ("backend", "rule", "gates"),
    [(*pair, gates) for pair in SECOND for gates in (BRIEF_GATES if pair in BRIEF else MOMENTUM_GATES)],
)
def test_the_momentum_rules_are_exact_for_all_gates(backend: str, rule: str, gates: str) -> None:
    sizes = {"B": 8, "T": 20} if gates == "ladder" else {"B": 1}
    check(Case(rule, gates, HV=1, with_p=gates == "mixed", **sizes), backend)


@pytest.mark.parametrize(("backend", "rule"), FIRST)
@pytest.mark.parametrize("gates", FIRST_ORDER_GATES)
def test_the_first_order_rules_are_exact_for_all_gates(backend: str, rule: str, gates: str) -> None:
    check(Case(rule, gates, H=2, HV=4), backend)


@every_backend
@pytest.mark.parametrize("gates", ["layer", "open"])
@pytest.mark.parametrize("keys", KEYS[1:])
def test_keys_that_come_again_cost_no_more_digits_than_they_must(backend: str, keys: str, gates: str) -> None:
    check(Case(gates=gates, keys=keys, B=1, HV=1, T=64 if gates == "open" else 37), backend)


@pytest.mark.parametrize(("backend", "rule"), FIRST)
@pytest.mark.parametrize("keys", KEYS[1:])
def test_keys_that_come_again_in_the_first_order_rules(backend: str, rule: str, keys: str) -> None:
    check(Case(rule, "mild", keys=keys), backend)


@every_backend
@pytest.mark.parametrize("gates", () if INTERPRETED else ("layer", "mixed", "falling mu"))
def test_whole_chunks_of_64_tokens_and_the_head_size_of_the_paper(backend: str, gates: str) -> None:
    check(Case(gates=gates, B=1, T=200, H=1, HV=1, K=128, V=256, chunk_size=64), backend)


@pytest.mark.parametrize(("backend", "rule"), FIRST)
@pytest.mark.parametrize("gates", ["strong", "mixed"])
def test_whole_chunks_of_64_tokens_in_the_first_order_rules(backend: str, rule: str, gates: str) -> None:
    check(Case(rule, gates, B=1, T=200, K=32, V=16, chunk_size=64), backend)


@every_backend
def test_16_bits_at_the_head_size_of_the_paper(backend: str) -> None:
    check(Case(B=1, T=130, HV=1, K=128, V=64, chunk_size=64, dtype=torch.bfloat16), backend)


@every_backend
def test_a_hard_zero_forgets_even_an_enormous_state(backend: str) -> None:
    case = Case(B=1, HV=1, T=18)
    inputs = {name: x.clone() for name, x in inputs_of(case).items()}
    for name in ("log_alpha", "log_mu"):
        inputs[name][:, 0] = HARD_ZERO
    huge = inputs | {"initial_state": torch.full_like(inputs["initial_state"], 1e30)}
    for actual, expected in zip(*(backend_form(case, backend)(x) for x in (huge, inputs))):
        assert torch.equal(actual, expected)


@every_backend
def test_a_state_that_decays_to_nothing_is_exact_on_the_scale_where_it_began(backend: str) -> None:
    """exp(-60) from float32 logs has a relative error of 60 roundings, and exp(-200) is not a float32 at all."""
    case = Case(B=1, HV=1, T=64)
    inputs = inputs_of(case) | {"eta": torch.zeros(1, 64, 1)}
    with torch.no_grad():
        final = backend_form(case, backend)(inputs)[1]
        exact = definition_of(case)(converted(inputs, torch.float64))[1]
    assert exact.abs().max() < 1e-20
    assert (final.double() - exact).abs().max() <= OUTPUT_BAR * inputs["initial_state"].abs().max()


@every_rule
@pytest.mark.parametrize("T", [1, 17] if INTERPRETED else [1, 2, 16, 17])
def test_lengths_around_a_chunk_are_within_budget(backend: str, rule: str, T: int) -> None:
    check(Case(rule, T=T, with_state=T != 16), backend)


@every_backend
@pytest.mark.parametrize(
    "sizes",
    [{"K": 3, "V": 1}, {"K": 17, "V": 130}, {"K": 32, "V": 16, "H": 2, "HV": 6}, {"K": 256, "V": 16, "HV": 1}],
    ids=["tiny", "odd", "grouped", "wide keys"],
)
def test_any_head_sizes_are_within_budget(backend: str, sizes: dict[str, int]) -> None:
    check(Case(**{"B": 1, "T": 21, "with_p": True} | sizes), backend)


@pytest.mark.parametrize(("backend", "rule"), [(backend, rule) for backend, rule in ALL if backend != "recurrent"])
@pytest.mark.parametrize("chunk_size", [32, 64] if INTERPRETED else [4, 32, 64])
def test_the_chunk_size_changes_nothing(backend: str, rule: str, chunk_size: int) -> None:
    check(Case(rule, B=1, T=70, chunk_size=chunk_size), backend)


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend in ("torch", "cpu")])
@pytest.mark.parametrize("chunk_size", [1, 17, 48, 100, 256])
def test_the_momentum_rule_takes_any_chunk_size(backend: str, chunk_size: int) -> None:
    check(Case(B=1, T=270, H=1, HV=1, chunk_size=chunk_size), backend)


@pytest.mark.parametrize(
    ("backend", "rule", "p_times_alpha"),
    [
        (*pair, choice)
        for pair in SECOND
        for choice in (True, False)
        if pair not in BRIEF and (choice or pair[1] not in AHEAD)
    ],
)
@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("with_p", [True, False])
def test_every_way_to_probe_the_state(backend: str, rule: str, with_p: bool, p_times_alpha: bool, l2norm: bool) -> None:
    check(Case(rule, B=1, HV=1, T=20, with_p=with_p, p_times_alpha=p_times_alpha, l2norm=l2norm, scale=0.3), backend)


@pytest.mark.parametrize(("backend", "rule"), FIRST)
def test_scale_and_normalised_vectors_of_the_first_order_rules(backend: str, rule: str) -> None:
    normalised = None if rule in ("linear_attn", "simple_gla", "gla", "rwkv7") else True
    check(Case(rule, l2norm=normalised, scale=0.3, with_state=False), backend)


@pytest.mark.parametrize(
    ("backend", "rule", "dtype"), [(*pair, dtype) for pair in ALL if pair not in BRIEF for dtype in DTYPES[pair[0]]]
)
def test_other_precisions_keep_within_their_own_rounding(backend: str, rule: str, dtype: torch.dtype) -> None:
    check(Case(rule, B=1, dtype=dtype, with_p=rule in MOMENTUM), backend)


@pytest.mark.parametrize(("backend", "rule"), [(backend, rule) for backend, rule in ALL if backend != "triton"])
def test_gates_may_have_16_bits_too(backend: str, rule: str) -> None:
    check(Case(rule, B=1, dtype=torch.bfloat16, gate_dtype=torch.bfloat16), backend)


# ------------------------------------------------------------------------------------ packs, pieces and neighbours


@pytest.mark.parametrize(("backend", "rule"), ALL)
@pytest.mark.parametrize("lengths", [(0, 1, 37, 0, 2, 17, 0), (1, 1, 1), (0, 0)], ids=str)
def test_a_pack_is_each_sequence_alone(backend: str, rule: str, lengths: tuple[int, ...]) -> None:
    check(Case(rule, lengths=lengths, with_p=rule in MOMENTUM), backend)


@every_rule
def test_no_tokens_at_all_pass_the_state_on(backend: str, rule: str) -> None:
    case = Case(rule, T=0)
    inputs = leaves(inputs_of(case))
    results = run_with_gradients(backend_form(case, backend), inputs)
    assert results["o"].shape == (2, 0, 2, 24)
    assert torch.equal(results["final_state"], inputs["initial_state"])
    check(case, backend)


@every_rule
def test_pieces_with_states_passed_on_are_the_whole_with_gradients(backend: str, rule: str) -> None:
    case = Case(rule, "layer" if rule in MOMENTUM else "mild", B=1)
    compute = backend_form(case, backend)

    def pieces(inputs: Tensors) -> tuple[Tensor, ...]:
        states = {name: x for name, x in inputs.items() if name.startswith("initial_")}
        outputs = []
        for start, end in ((0, 1), (1, 1), (1, 19), (19, 37)):
            piece = {name: x[:, start:end] for name, x in inputs.items() if name not in states}
            o, *final = compute(piece | states)
            states = dict(zip(states, final))
            outputs.append(o)
        return torch.cat(outputs, 1), *states.values()

    assert_within_budgets(case, backend, run_with_gradients(pieces, leaves(inputs_of(case))))


@every_rule
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_token_that_is_not_finite_leaves_earlier_ones_alone(backend: str, rule: str, name: str) -> None:
    case = Case(rule, "layer" if rule in MOMENTUM else "mild", B=1, HV=1)
    inputs, compute = inputs_of(case), backend_form(case, backend)
    clean = compute(inputs)[0]
    for t in (5, 21, 36) if backend != "triton" else (21,):
        damaged = inputs | {name: inputs[name].clone()}
        damaged[name][:, t] = float("nan")
        o = compute(damaged)[0]
        assert torch.equal(o[:, :t], clean[:, :t])
        assert o[:, t].isnan().any()


def spoil(inputs: Tensors, part) -> Tensors:
    """Copies with NaN in what ``part`` selects."""
    spoiled = {name: x.clone() for name, x in inputs.items()}
    for name, x in spoiled.items():
        if name in ("q", "k", "v", "r", "initial_state"):
            part(name, x).fill_(float("nan"))
    return spoiled


def is_state(name: str) -> bool:
    return "state" in name or name.endswith("_z")


@every_rule
@pytest.mark.parametrize("neighbour", ["sequence"] if INTERPRETED else ["sequence", "row", "head"])
def test_a_result_does_not_depend_on_its_neighbours_even_if_they_are_nan(
    backend: str, rule: str, neighbour: str
) -> None:
    sizes = {"sequence": {"lengths": (18, 3, 19)}, "row": {"B": 3, "T": 20}, "head": {"B": 1, "H": 3, "HV": 3, "T": 20}}
    case = Case(rule, "layer" if rule in MOMENTUM else "mild", **sizes[neighbour])

    def dimension(name: str, x: Tensor) -> int:
        if not is_state(name):
            return {"sequence": 1, "row": 0, "head": 2}[neighbour]
        sequences = 1 if rule in MOMENTUM else 0
        return (2 if name.endswith("_z") else sequences + 1) if neighbour == "head" else sequences

    def middle(name: str, x: Tensor) -> Tensor:
        long = neighbour == "sequence" and not is_state(name)
        return x.narrow(dimension(name, x), *((18, 3) if long else (1, 1)))

    def others(name: str, x: Tensor) -> Tensor:
        long = neighbour == "sequence" and not is_state(name)
        kept = [*range(18), *range(21, 40)] if long else [0, 2]
        return x.index_select(dimension(name, x), torch.tensor(kept))

    compute, inputs = backend_form(case, backend), inputs_of(case)
    clean, spoiled = (run_with_gradients(compute, leaves(x)) for x in (inputs, spoil(inputs, middle)))
    assert spoiled["o"].isnan().any()
    equal(spoiled, clean, others)


# ---------------------------------------------------------------------------------------------- memory and autograd


def strided(x: Tensor) -> Tensor:
    """The same values with gaps of NaN between them and the first two dimensions swapped in memory."""
    wide = torch.full((x.shape[1], x.shape[0], *x.shape[2:], 2), float("nan"), dtype=x.dtype)
    wide[..., 0] = x.transpose(0, 1)
    return wide[..., 0].transpose(0, 1)


@every_rule
def test_tensors_may_lie_anyhow_in_memory(backend: str, rule: str) -> None:
    case = Case(rule, T=17, with_p=rule in MOMENTUM)
    inputs, compute = inputs_of(case), backend_form(case, backend)
    before = {name: x.clone() for name, x in inputs.items()}
    expected = run_with_gradients(compute, leaves(inputs))
    views = {name: strided(x).requires_grad_() for name, x in inputs.items()}
    assert not any(x.is_contiguous() for x in views.values())
    actual = run_with_gradients(compute, views, around=strided)
    equal(inputs, before)
    if backend == "recurrent":  # plain torch operations, which may add in another order there
        assert_within_budgets(case, backend, actual)
    else:
        equal(actual, expected)


@every_rule
def test_broadcast_tensors_and_gradients(backend: str, rule: str) -> None:
    """Expanded tensors have stride 0, and sum() sends an expanded gradient back."""
    case = Case(rule, T=17)
    inputs = {name: x[:, :1].expand(x.shape) if x.dim() == 4 else x for name, x in inputs_of(case).items()}
    results = []
    for made in (inputs, {name: x.contiguous() for name, x in inputs.items()}):
        tensors = {name: x.detach().requires_grad_() for name, x in made.items()}
        o = backend_form(case, backend)(tensors)[0]
        results.append(torch.autograd.grad(o.sum(), list(tensors.values()), allow_unused=True))
    for name, actual, expected in zip(inputs, *results):
        assert torch.equal(actual, expected), name


@every_rule
@pytest.mark.parametrize("part", ["o", "final_state"])
def test_a_loss_on_one_result_alone_reaches_every_input(backend: str, rule: str, part: str) -> None:
    case = Case(rule, "layer" if rule in MOMENTUM else "mild", B=1, HV=1, T=17)
    compute, inputs = backend_form(case, backend), leaves(inputs_of(case))
    results = dict(zip(("o", "final_state", "final_z"), compute(inputs)))
    grads = torch.autograd.grad(results[part].square().sum(), list(inputs.values()), allow_unused=True)
    exact_inputs = leaves(inputs_of(case), torch.float64)
    expected = dict(zip(("o", "final_state", "final_z"), definition_of(case)(exact_inputs)))
    exact = torch.autograd.grad(
        expected[part].square().sum(), list(exact_inputs.values()), allow_unused=True, materialize_grads=True
    )
    for name, grad, reference in zip(inputs, grads, exact):
        grad = torch.zeros_like(reference) if grad is None else grad
        assert error_by_head(case, f"grad_{name}", grad, reference) <= GRADIENT_BAR, name


@every_rule
def test_each_input_alone_gets_the_gradient_that_it_gets_among_all(backend: str, rule: str) -> None:
    case = Case(rule, B=1, HV=1, T=17, with_p=rule in MOMENTUM)
    compute, inputs = backend_form(case, backend), inputs_of(case)
    everything = run_with_gradients(compute, leaves(inputs))
    for name in inputs if backend != "triton" else ("p", "log_mu", "initial_state"):
        alone = run_with_gradients(lambda x: compute(inputs | x), leaves({name: inputs[name]}))
        assert torch.equal(alone[f"grad_{name}"], everything[f"grad_{name}"]), name


@every_rule
def test_calls_repeat_bit_for_bit(backend: str, rule: str) -> None:
    case = Case(rule, B=1, HV=1, T=17)
    first, second = (run_with_gradients(backend_form(case, backend), leaves(inputs_of(case))) for _ in range(2))
    equal(first, second)


# --------------------------------------------------------------------------------------------------- decode steps


def tokens_of(inputs: Tensors) -> Tensors:
    return {name: x for name, x in inputs.items() if not is_state(name)}


@pytest.mark.parametrize(("backend", "rule"), [(backend, rule) for backend, rule in ALL if backend != "recurrent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slot_dtype", [None, torch.int32, torch.int64], ids=["rows", "int32 slots", "int64 slots"])
def test_decode_steps_are_the_definition_in_place_and_touch_no_other_slot(
    backend: str, rule: str, dtype: torch.dtype, slot_dtype: torch.dtype | None
) -> None:
    case = Case(rule, "mixed", B=3, T=6, H=2, HV=4, dtype=dtype, with_p=rule in MOMENTUM and slot_dtype is not None)
    inputs, slots = inputs_of(case), [4, 0, 3] if slot_dtype else [0, 1, 2]
    axis = 1 if rule in MOMENTUM else 0
    pools = {}
    for name in ("initial_state", "initial_z"):
        if name in inputs:
            state = inputs[name] if name == "initial_state" else inputs[name].squeeze(1)
            shape = list(state.shape)
            shape[axis] = 3 if slot_dtype is None else 6
            wide = torch.full((*shape[:-1], 2 * shape[-1]), float("nan"))
            pool = wide[..., : shape[-1]]  # a view with gaps: the last dimension alone is contiguous
            pool.index_copy_(axis, torch.tensor(slots), state)
            pools[{"initial_state": "state", "initial_z": "z_state"}[name]] = pool
    options = options_of(case) | {"backend": backend}
    if slot_dtype is not None:
        table = torch.tensor([[slot, 1] for slot in slots], dtype=slot_dtype)
        options["state_indices"] = table[:, 0]  # as a scheduler has them: a column, not contiguous
    outputs = []
    for t in range(case.T):
        token = {name: x[:, t] for name, x in tokens_of(inputs).items()}
        outputs.append(
            public_function(rule, "step")(**{"p": None} | token if rule in MOMENTUM else token, **pools, **options)
        )
    assert outputs[0].dtype == dtype
    allowed, exact = budgets(case, backend), answer(case).exact
    final = {"o": torch.stack(outputs, 1), "final_state": pools["state"].index_select(axis, torch.tensor(slots))}
    if "z_state" in pools:
        final["final_z"] = pools["z_state"][slots].unsqueeze(1)
    for name, x in final.items():
        error = error_by_head(case, name, x, exact[name])
        assert error <= allowed[name], f"{name}: {error:.1e} > {allowed[name]:.1e}"
    others = [slot for slot in range(pools["state"].shape[axis]) if slot not in slots]
    assert pools["state"].index_select(axis, torch.tensor(others, dtype=torch.long)).isnan().all()


@pytest.mark.parametrize(("backend", "rule"), [(backend, rule) for backend, rule in SECOND if backend != "recurrent"])
def test_a_step_without_a_momentum_state_is_the_rule_with_mu_zero(backend: str, rule: str) -> None:
    case = Case(rule, "mixed", B=2, T=1, H=2, HV=4)
    inputs = inputs_of(case)
    token = {name: x[:, 0] for name, x in tokens_of(inputs).items()}
    forgetting = token | {"log_mu": torch.full_like(token["log_mu"], -math.inf)}
    step = partial(public_function(rule, "step"), state_indices=torch.tensor([2, 0]), backend=backend)
    S = torch.cat([inputs["initial_state"][0], torch.ones_like(inputs["initial_state"][0, :1])])
    expected_S, found_S = S.clone(), S.clone()
    expected = step(**forgetting, state=(expected_S, torch.zeros_like(S)), **options_of(case))
    found = step(**token, state=(found_S, None), **options_of(case))
    assert relative_error(found, expected) <= 1e-6
    assert relative_error(found_S, expected_S) <= 1e-6
