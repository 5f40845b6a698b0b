"""Files that are whole or not there: atomic writes, and one writer at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def write_atomically(path: Path, content: bytes) -> None:
    """After this, `path` has the new content; before, the old one or none; a crash leaves nothing in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_kept: dict[Path, IO[str]] = {}


def lock_for_life(path: Path) -> bool:
    """Take a lock that this process keeps until it ends, however it ends; False if another process has it."""
    path = path.resolve()
    if path in _kept:
        return True
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    _kept[path] = file
    return True


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Only one process at a time is inside; the lock goes away with its process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
