"""Tokens of one row over several processes: outputs, states, losses and gradients equal those of one process."""

from __future__ import annotations

import pytest
import torch

from context_parallel_cases import FAULTS, FLOAT32, QUICK, SLOW
from gloo_ranks import Results, run_cases
from mdn import ops
from mdn.parallel import ContextParallelPlan, context_parallel
from small_models import small_model, tokens

FOUR_RANKS = [name for name in QUICK if not name.startswith(("gla", "rwkv7", "delta_rule", "linear_attn", "comba,"))]


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return run_cases(2, [*QUICK, *FLOAT32, *FAULTS])


@pytest.fixture(scope="module")
def four_ranks() -> Results:
    return run_cases(4, [*FOUR_RANKS, *FLOAT32])


def worst(errors: dict[str, float]) -> float:
    assert "raised" not in errors, errors["raised"]
    return max(errors.values())


@pytest.mark.parametrize("case", QUICK)
def test_two_processes_equal_one_in_float64(case: str, two_ranks: Results) -> None:
    assert worst(two_ranks[case]) < 1e-12


@pytest.mark.parametrize("case", FOUR_RANKS)
def test_four_processes_equal_one_in_float64(case: str, four_ranks: Results) -> None:
    assert worst(four_ranks[case]) < 1e-12


@pytest.mark.parametrize("case", FLOAT32)
def test_two_processes_equal_one_in_float32(case: str, two_ranks: Results) -> None:
    assert worst(two_ranks[case]) < 1e-5


@pytest.mark.parametrize("case", FLOAT32)
def test_four_processes_equal_one_in_float32(case: str, four_ranks: Results) -> None:
    assert worst(four_ranks[case]) < 1e-5


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_notices_a_fault(fault: str, two_ranks: Results) -> None:
    assert worst(two_ranks[fault]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rule_and_model_with_every_kind_of_document(ranks: int) -> None:
    results = run_cases(ranks, list(SLOW), timeout=590)
    assert {case: errors for case, errors in results.items() if worst(errors) >= 1e-12} == {}


# ------------------------------------------------------------------------------------------------- in a single process


def test_a_single_process_needs_no_group() -> None:
    plan = ContextParallelPlan.from_cu_seqlens(torch.tensor([0, 3, 3, 10]))
    model, ids = small_model("hybrid"), tokens(1, 10)
    expected = model(ids, cu_seqlens=plan.documents).logits
    torch.testing.assert_close(model(plan.scatter(ids), context_parallel=plan).logits, expected)
    torch.testing.assert_close(plan.gather(plan.scatter(ids)), ids)


def test_zigzag_gives_every_rank_an_early_and_a_late_range() -> None:
    plan = ContextParallelPlan.from_cu_seqlens(torch.tensor([0, 7]), layout="zigzag")
    assert [(piece.start, piece.end, piece.continues, piece.goes_on) for piece in plan.pieces] == [
        (0, 3, False, True),
        (3, 7, True, False),
    ]


def test_bad_plans_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layout must be one of contiguous, zigzag, got 'ring'"):
        ContextParallelPlan.from_cu_seqlens(torch.tensor([0, 7]), layout="ring")
    with pytest.raises(ValueError, match="at least one token for each of the 2 ranges"):
        ContextParallelPlan.from_cu_seqlens(torch.tensor([0, 1]), layout="zigzag")
    with pytest.raises(ValueError, match="ranks_per_node must divide the 1 ranks, got 2"):
        ContextParallelPlan.from_cu_seqlens(torch.tensor([0, 7]), ranks_per_node=2)


def test_arguments_that_contradict_the_plan_are_refused() -> None:
    plan = ContextParallelPlan.from_cu_seqlens(torch.tensor([0, 7]))
    model = small_model()
    with pytest.raises(ValueError, match=r"this rank's, \[1, 7\] \(plan.scatter\), got \[1, 8\]"):
        model(tokens(1, 8), context_parallel=plan)
    with pytest.raises(ValueError, match="cu_seqlens must not be given beside context_parallel"):
        model(tokens(1, 7), context_parallel=plan, cu_seqlens=torch.tensor([0, 7]))
    with pytest.raises(ValueError, match="position_ids must not be given beside context_parallel"):
        model(tokens(1, 7), context_parallel=plan, position_ids=torch.arange(7).unsqueeze(0))
    with pytest.raises(ValueError, match="x must have 7 tokens in dimension 1"):
        plan.scatter(tokens(1, 8))
    blockwise = small_model(momentum_block_size=4)
    with pytest.raises(ValueError, match="momentum_block_size=4 cannot be combined with context_parallel"):
        blockwise(tokens(1, 7), context_parallel=plan)


def test_a_loop_over_tokens_inside_the_context_is_refused() -> None:
    plan = ContextParallelPlan.from_cu_seqlens(torch.tensor([0, 7]))
    q = torch.randn(1, 7, 2, 4)
    gate = torch.zeros(1, 7, 2)
    with context_parallel(plan), pytest.raises(ValueError, match="use chunk_momentum_delta_rule"):
        ops.recurrent_momentum_delta_rule(q, q, q, gate, gate)
    with context_parallel(plan), pytest.raises(ValueError, match="use chunk_delta_rule"):
        ops.recurrent_delta_rule(q, q, q, gate)
