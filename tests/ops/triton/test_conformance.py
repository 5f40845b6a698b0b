"""The Triton kernels pass the conformance suite of all backends, under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUITE = Path(__file__).parents[1] / "test_conformance.py"


def test_the_triton_kernels_pass_the_conformance_suite():
    environment = os.environ | {"TRITON_INTERPRET": "1", "MDN_TEST_BACKENDS": "triton", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(SUITE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
