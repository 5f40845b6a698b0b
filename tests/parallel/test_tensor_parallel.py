"""Heads over several processes, through transformers' tensor parallelism: equal to one process."""

from __future__ import annotations

import pytest

from context_parallel_cases import TENSOR, TENSOR_OF_FOUR
from gloo_ranks import Results, run_cases


@pytest.fixture(scope="module")
def results() -> Results:
    return run_cases(2, list(TENSOR)) | run_cases(4, list(TENSOR_OF_FOUR))


@pytest.mark.parametrize("case", [*TENSOR, *TENSOR_OF_FOUR])
def test_shared_heads_equal_one_process(case: str, results: Results) -> None:
    errors = results[case]
    assert "raised" not in errors, errors["raised"]
    tolerance = 1e-5 if "float32" in case or "saved" in case else 1e-12
    assert max(errors.values()) < tolerance
