"""The Triton kernels pass the conformance suite of all backends, under Triton's interpreter."""

from __future__ import annotations

import pytest

from conformance import run_suite


@pytest.mark.first
def test_the_triton_kernels_pass_the_conformance_suite():
    run_suite("triton", TRITON_INTERPRET="1")
