"""The checks of the self-test that need a GPU, small, under the interpreter and without one (run by test_selftest.py).

A graph is a stand-in that keeps the launches of its capture without running them, and runs them in a replay.
"""

from __future__ import annotations

import contextlib
import json
import os
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch

import mdn.ops
from mdn.bench.gpu.interpreter import repair
from mdn.ops.triton import selftest
from mdn.ops.triton.host import intercept_launches, run_launch

CPU = torch.device("cpu")
SMALL = selftest.Case("small", torch.bfloat16, 20, 1, 2, 16, 16, chunk_size=16, batch=2)
captured: list[int] = []
"""launches in each graph so far"""


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self):
        self.launches = []

    def replay(self):
        for launch in self.launches:
            run_launch(launch)


@contextlib.contextmanager
def capture(graph):
    """Stands in for `torch.cuda.graph`."""
    with intercept_launches(graph.launches.append):
        yield
        captured.append(len(graph.launches))


def repeats():
    """The result of the check; with a bit that differs in the second call; with a NaN in every call."""
    rule, calls = mdn.ops.chunk_momentum_delta_rule, []

    def another_bit(*args, **options):
        calls.append(options)
        o, state = rule(*args, **options)
        return o, torch.nextafter(state, state + 1) if len(calls) == 2 else state

    def not_a_number(*args, **options):
        o, state = rule(*args, **options)
        return o * torch.nan, state

    found = {"as it is": selftest.run_repeats(CPU, SMALL, repeats=1)}
    for name, broken in (("a bit differs", another_bit), ("NaN", not_a_number)):
        with mock.patch.object(mdn.ops, "chunk_momentum_delta_rule", broken):
            found[name] = str(selftest.run_repeats(CPU, SMALL, repeats=1))
    return found


def graph():
    """The result of the check, and that of a graph which has nothing in it."""
    with mock.patch.object(torch.cuda, "CUDAGraph", Graph), mock.patch.object(torch.cuda, "graph", capture):
        found = {"as it is": selftest.run_graph(CPU)}
        with mock.patch.object(Graph, "replay", return_value=None):
            found["nothing replayed"] = selftest.run_graph(CPU)
    return found | {"launches": captured}


if __name__ == "__main__":
    repair()
    print(json.dumps({"repeats": repeats(), "graph": graph()}))
