"""Our kernels, compiled for real targets and executed through the public functions: right results, and no races.

The cases, the definition that they are compared with and the error budgets are those of every backend
(`conformance`, `definition`). `make test` runs a pass with each chunk size, a pack, grouped heads, all options at once,
hostile gates in float32 and the decode step; SLOW has every dtype, chunk size and option for sm_80 and sm_90. Most of
the time is Triton's compiler.
"""

from __future__ import annotations

import pytest
import torch

from conformance import (
    ROUNDINGS_IN_A_ROW,
    Case,
    answer,
    assert_within_budgets,
    backend_form,
    budgets,
    error_by_head,
    inputs_of,
)
from definition import Tensors, leaves, make_inputs, momentum_delta_rule, relative_error, run_with_gradients
from mdn.bench.emulator import EmulatedGPU
from mdn.ops import chunk_momentum_delta_rule, momentum_delta_step
from mdn.ops.triton.tiles import FULL_GPU, assume_heads

pytest.importorskip("triton")
pytestmark = pytest.mark.first

TARGETS = ("sm_80", "sm_90")
FLOAT32_BAR = 1e-5
"""what docs/kernels.md promises of float32 outputs, states and gradients: largest difference over largest value"""

TWO_CHUNKS = Case(B=2, T=70, H=1, HV=1, K=64, V=64, with_state=False, dtype=torch.bfloat16, chunk_size=64)
"""of the sizes of test_mutants.py, so that Triton's cache has the kernels for both"""


def case_of(dtype: torch.dtype, K: int, V: int, chunk_size: int, **options) -> Case:
    """Two chunks and a little more, with hostile gates, of one head."""
    defaults = {"B": 1, "T": 2 * chunk_size + 6, "H": 1, "HV": 1, "gates": "mixed", "with_state": False}
    return Case(dtype=dtype, K=K, V=V, chunk_size=chunk_size, **(defaults | options))


PROBED = {"with_p": True, "with_state": True}
PACK = {"lengths": (0, 1, 90, 64, 0, 5)}
GROUPED = {"H": 1, "HV": 2}
SLOW = (
    case_of(torch.bfloat16, 64, 64, 64, T=260),  # pipelines of three stages come round
    case_of(torch.bfloat16, 64, 48, 16, rule="lookahead", **PROBED),
    case_of(torch.bfloat16, 96, 64, 32, rule="general", **PROBED),
    case_of(torch.bfloat16, 128, 128, 64, with_state=True, **PACK),
    case_of(torch.bfloat16, 128, 256, 64, rule="lookahead", with_p=True, **GROUPED),
    case_of(torch.bfloat16, 128, 512, 64),
    case_of(torch.bfloat16, 256, 64, 64, l2norm=False),
    case_of(torch.bfloat16, 256, 512, 64, T=70),  # the widths of the paper's larger model
    case_of(torch.bfloat16, 256, 64, 32, rule="general", **PACK),
    case_of(torch.float16, 64, 64, 64),
    case_of(torch.float16, 96, 32, 16, rule="lookahead", **PROBED),
    case_of(torch.float16, 128, 64, 32, **GROUPED),
    case_of(torch.float32, 64, 64, 64),
    case_of(torch.float32, 96, 48, 32, rule="lookahead", **PROBED),
    case_of(torch.float32, 128, 32, 16, l2norm=False, with_state=True, **PACK),
    case_of(torch.float32, 256, 16, 64, with_state=True),
)
WIDE = (
    case_of(torch.bfloat16, 64, 64, 64, T=260, with_state=True),
    case_of(torch.bfloat16, 128, 64, 64, with_state=True, **PACK),
    case_of(torch.bfloat16, 128, 96, 32, rule="lookahead", with_p=True, **GROUPED),
    case_of(torch.bfloat16, 256, 64, 64, T=260),
)
"""with the tiles of a batch that fills a GPU; float32 and float16 have the same ones in every batch"""


def name_of(case: Case) -> str:
    options = (case.rule, *(name for name in ("with_p", "with_state", "lengths") if getattr(case, name)))
    return f"{case.dtype}, K={case.K}, V={case.V}, HV={case.HV}, chunk {case.chunk_size}, {' '.join(options)}"


def check_pass(target: str, case: Case) -> EmulatedGPU:
    """Outputs, final state and every gradient against the definition in float64; not a single race."""
    gpu = EmulatedGPU(target, check=True)
    with gpu.emulate():
        actual = run_with_gradients(backend_form(case, "triton"), leaves(inputs_of(case)))
    assert not gpu.races
    if case.dtype == torch.float32:
        assert_within_budgets(case, "triton", actual)
        errors = {name: relative_error(x, answer(case).exact[name]) for name, x in actual.items()}
        assert max(errors.values()) < FLOAT32_BAR, errors
    else:
        assert_within_16_bit_budgets(case, actual)
    return gpu


def assert_within_16_bit_budgets(case: Case, actual: Tensors) -> None:
    """The budgets move inputs at random. In the gradient of a gate, a sum of K V products, such moves cancel by chance,
    and given states are not moved at all; so as many roundings in a row of the result itself are always allowed."""
    least = ROUNDINGS_IN_A_ROW * torch.finfo(case.dtype).eps / 2
    exact, allowed = answer(case).exact, budgets(case, "triton")
    assert actual.keys() == exact.keys()
    errors = {name: error_by_head(case, name, x, exact[name]) for name, x in actual.items()}
    over = {name: error for name, error in errors.items() if not error <= max(least, allowed[name])}
    assert not over, (over, allowed)


def test_forward_and_backward_agree_with_the_recurrence():
    check_pass("sm_80", TWO_CHUNKS)


@pytest.mark.parametrize("heads", [None, FULL_GPU], ids=["few programs", "full GPU"])
def test_hopper_multiplies_with_wgmma(heads):
    with assume_heads(heads):
        gpu = check_pass("sm_90", TWO_CHUNKS)
    with_wgmma = {
        name.removesuffix("_kernel")
        for name, variants in gpu.counts.items()
        if any(opcode.startswith("wgmma.mma_async") for counts in variants for opcode in counts.opcodes)
    }
    scans = {"forward_states", "rebuild_states", "backward_states"}
    assert with_wgmma == scans | {"backward_scores", "backward_inputs"}


def test_short_chunks_on_hopper():
    """wgmma takes at least 64 rows: short chunks of narrow heads are multiplied with mma.sync."""
    gpu = check_pass("sm_90", case_of(torch.bfloat16, 32, 32, 16))
    opcodes = {opcode for variants in gpu.counts.values() for counts in variants for opcode in counts.opcodes}
    assert not any(opcode.startswith("wgmma.mma_async") for opcode in opcodes)


def test_all_options_at_once():
    """A direct write, an error read ahead of the step, a probe and an initial state; with chunks of 32 tokens."""
    check_pass("sm_80", case_of(torch.bfloat16, 32, 16, 32, rule="lookahead", T=40, **PROBED))


def test_a_pack_with_empty_and_one_token_sequences():
    check_pass("sm_80", case_of(torch.bfloat16, 32, 32, 16, lengths=(17, 0, 1, 22)))


def test_float32_keeps_its_digits_with_hostile_gates():
    """Decays that are 0, 1, tiny and ordinary, steps of up to 2; value heads share a key head."""
    case = case_of(torch.float32, 32, 32, 16, T=40, **GROUPED)
    gates = inputs_of(case)
    for name in ("log_alpha", "log_mu"):
        assert {0.0, -88.0, -1000.0, -torch.inf} <= set(gates[name].flatten().tolist())
    assert gates["eta"].max() == 2
    check_pass("sm_80", case)


@pytest.mark.parametrize("target", TARGETS)
def test_a_token_that_is_not_finite_leaves_earlier_ones_alone(target):
    outputs, token = {}, 21
    for name in ("nothing", "k", "v"):
        inputs = {other: x.clone() for other, x in inputs_of(TWO_CHUNKS).items()}
        if name in inputs:
            inputs[name][:, token] = torch.nan
        gpu = EmulatedGPU(target, check=True)
        with gpu.emulate():
            outputs[name] = chunk_momentum_delta_rule(**inputs, backend="triton").o
        assert not gpu.races
    for name in ("k", "v"):
        assert torch.equal(outputs[name][:, :token], outputs["nothing"][:, :token])
        assert outputs[name][:, token:].isnan().all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("rule", "heads"), [("momentum", None), ("momentum", FULL_GPU), ("lookahead", None)])
def test_a_decode_step_updates_its_slots_only(target, rule, heads):
    lookahead = rule == "lookahead"
    sizes = {"B": 3, "T": 1, "H": 1, "HV": 2, "K": 32, "V": 48, "gates": "mixed"}
    inputs = make_inputs(rule, **sizes, with_p=lookahead, with_state=False, dtype=torch.bfloat16)
    state, slots = torch.randn(2, 6, 2, 32, 48), torch.tensor([4, 0, 5])
    before, gpu = state.clone(), EmulatedGPU(target, check=True)
    with gpu.emulate(), assume_heads(heads):
        token = {name: x[:, 0] for name, x in inputs.items()}
        o = momentum_delta_step(**token, state=state, state_indices=slots, lookahead=lookahead, backend="triton")
    assert not gpu.races
    exact_o, exact_state = momentum_delta_rule(
        **{name: x.double() for name, x in inputs.items()}, initial_state=before[:, slots].double(), lookahead=lookahead
    )
    assert relative_error(o, exact_o[:, 0]) < torch.finfo(torch.bfloat16).eps  # one rounding, of the result
    assert relative_error(state[:, slots], exact_state) < 1e-6
    assert torch.equal(state[:, [1, 2, 3]], before[:, [1, 2, 3]])


def test_the_slow_cases_have_every_size_and_option():
    dtypes, chunk_sizes = (torch.bfloat16, torch.float16, torch.float32), (16, 32, 64)
    assert {(case.dtype, case.chunk_size) for case in SLOW} == {(d, c) for d in dtypes for c in chunk_sizes}
    assert {case.K for case in SLOW} == {64, 96, 128, 256}
    assert {(128, 512), (256, 512)} <= {(case.K, case.V) for case in SLOW}
    assert {case.rule for case in SLOW} == {"momentum", "general", "lookahead"}
    for option in ("with_p", "with_state", "lengths"):
        assert any(getattr(case, option) for case in SLOW), option
    assert any(case.l2norm is False for case in SLOW)
    assert any(case.HV > case.H for case in SLOW)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", SLOW, ids=name_of)
def test_every_dtype_size_and_option(target, case):
    check_pass(target, case)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", WIDE, ids=name_of)
def test_the_tiles_of_a_full_gpu(target, case):
    with assume_heads(FULL_GPU):
        check_pass(target, case)
