"""Runs cases of context_parallel_cases.py on several forked processes that talk through gloo.

    PYTHONPATH=tests python tests/gloo_ranks.py FILE RANKS CASE ...

writes {case: {quantity: largest relative error on any rank}} to FILE; a case that raises has one entry, its text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Results = dict[str, dict[str, Any]]


def run_cases(ranks: int, names: list[str], timeout: float = 500) -> Results:
    """The results of the named cases, from a fresh process: the caller's threads must not be forked."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, __file__, str(file), str(ranks), *names]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        output = subprocess.run(command, env=environment, timeout=timeout, capture_output=True, text=True)
        assert output.returncode == 0, output.stderr[-3000:]
        return json.loads(file.read_text())


def on_every_rank(folder: str, rank: int, ranks: int, names: list[str]) -> None:
    from context_parallel_cases import CASES

    torch.set_num_threads(1)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "CASE_FOLDER": folder}
    os.environ.update(place)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    everything: Results = {}
    for name in names:
        function, arguments = CASES[name]
        try:
            found: dict[str, Any] = function(**arguments)
        except Exception as error:
            found = {"raised": f"{type(error).__name__}: {error}"}
        parts: list[Any] = [None] * ranks
        dist.all_gather_object(parts, found)
        everything[name] = {key: max(part.get(key, "missing on a rank") for part in parts) for key in found}
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(everything))
    dist.barrier()
    dist.destroy_process_group()


def main(file: str, ranks: int, names: list[str]) -> None:
    import context_parallel_cases  # noqa: F401  (imported once, before the fork)

    folder = str(Path(file).parent)
    children = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                on_every_rank(folder, rank, ranks, names)
                code = 0
            finally:
                os._exit(code)
        children.append(process)
    codes = [os.waitpid(process, 0)[1] for process in children]
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
