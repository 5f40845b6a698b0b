"""Independent jobs over processes of one thread each: small models gain more from that than from threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from mdn.common import progress
from mdn.common.hardware import available_cores
from mdn.common.spawning import spawned_pool

Result = TypeVar("Result")


def processes_from(requested: int | None) -> int:
    """The value of a ``--processes`` option; one process per core when it is not given."""
    processes = available_cores() if requested is None else requested
    if processes < 1:
        raise ValueError(f"--processes must be at least 1, got {processes}")
    return processes


def completed(job: Callable[..., Result], jobs: Iterable[tuple[Any, ...]], processes: int) -> Iterator[Result]:
    """``job(*arguments)`` of all jobs, as they are done. An exception or Ctrl-C here ends the running ones too."""
    with spawned_pool(processes, _begin_worker) as pool:
        try:
            running: set[Future[Result]] = {pool.submit(job, *arguments) for arguments in jobs}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            raise
        except BaseException:
            for worker in list((pool._processes or {}).values()):
                worker.kill()  # a job that trains would treat SIGTERM as a request to save, and then wait for more work
            raise


def _begin_worker() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    progress.silent = True  # the parent has one bar for all
