"""Pools of spawned processes, which import the script of their parent again.

A script without an `if __name__ == "__main__"` guard would begin its work a second time in every worker, and wait
there for a lock that its parent holds while the parent waits for the worker. Such a worker ends instead, and the parent
says why.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

UNGUARDED = 78  # exit code of a worker that met its parent's work at the top level of the script
ADVICE = (
    "worker processes import this script again, and would begin its work again: put what it does under "
    '`if __name__ == "__main__":`'
)


def end_if_importing() -> None:
    """End a worker that arrives here while it imports its parent's script. Called before locks and before pools."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(UNGUARDED)


@contextmanager
def spawned_pool(
    workers: int, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """A pool of spawned workers: forking a process that holds torch's threads is not safe.

    A worker that dies is a RuntimeError in words. What has not begun is cancelled on leaving.
    """
    end_if_importing()
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=initializer, initargs=initargs)
    started: dict[int, Any] = pool._processes  # type: ignore[assignment]  # the pool drops its reference when it ends
    try:
        yield pool
    except BrokenProcessPool:
        pool.shutdown(wait=True, cancel_futures=True)
        raise RuntimeError(_cause([worker.exitcode for worker in started.values()])) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def told_of_missing_guards() -> Iterator[None]:
    """The same care for processes that torch spawns."""
    from torch.multiprocessing.spawn import ProcessExitedException

    end_if_importing()
    try:
        yield
    except ProcessExitedException as error:
        if error.exit_code == UNGUARDED:
            raise RuntimeError(ADVICE) from None
        raise


def _cause(exit_codes: list[int | None]) -> str:
    """Why a pool broke. A broken pool ends its other workers with SIGTERM (-15)."""
    if UNGUARDED in exit_codes:
        return ADVICE
    if -9 in exit_codes:
        return "a worker process was killed (exit code -9), usually because memory ran out: use fewer processes"
    return f"a worker process ended before its work was done (exit codes {exit_codes})"
