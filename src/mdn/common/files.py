"""Files that are complete or absent: atomic writes, one writer at a time, and JSON and YAML read with care."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

from mdn.common.errors import one_line
from mdn.common.spawning import end_if_importing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:  # everywhere else
    msvcrt = None  # type: ignore[assignment]


MOST_ENTRIES, MOST_LEVELS = 100_000, 50  # of a YAML text


def write_atomically(path: Path, content: bytes) -> None:
    """Write `path` in one go: a crash leaves the old content (or no file) or the new one, never a part of it."""
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
    """Make renames inside `path` survive a power cut, where the system can open a directory (Windows cannot)."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if os.name == "nt":
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def share(directory: Path, pattern: str | None = None) -> None:
    """Give `directory` and all below it the modes of newly made files, or only its files that match `pattern`:
    safetensors writes its own as 0600."""
    umask = os.umask(0)  # the only way to read it
    os.umask(umask)
    for path in (directory, *directory.rglob("*")) if pattern is None else directory.glob(pattern):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a ValueError names the file and says what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is not usable: its JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 3e-4 as text; people who write recipes mean the number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)$|^[-+]?(?:[0-9][0-9_]*)\.[0-9_]*$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; a ValueError that begins with `where` if it is not YAML or expands too far."""
    try:
        content = yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply, expected at most {MOST_LEVELS} levels") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that cannot be
        raise ValueError(f"{where} is not valid YAML: {one_line(error)}") from None
    _refuse_bombs(content, where)
    return content


def _refuse_bombs(content: Any, where: str) -> None:
    """A few aliases of aliases expand to billions of entries: refuse them before anything walks through the content."""
    sizes: dict[int, int] = {}

    def size(value: Any, level: int) -> int:
        if not isinstance(value, dict | list):
            return 1
        if level > MOST_LEVELS:  # also where a list contains itself
            raise ValueError(f"{where} is nested too deeply, expected at most {MOST_LEVELS} levels")
        if id(value) not in sizes:
            inside = value.values() if isinstance(value, dict) else value
            sizes[id(value)] = 1 + sum(size(entry, level + 1) for entry in inside)
        return sizes[id(value)]

    if size(content, 1) > MOST_ENTRIES:
        raise ValueError(f"{where} has more than {MOST_ENTRIES:,} entries when its aliases are written out")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    content = parse_yaml(text, f"{path}")
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a mapping of blocks, got {type(content).__name__}")
    return content


# ---- locks: flock where there is one, msvcrt on Windows; both end with their process, however that ends


def _lock(file: IO[str], wait: bool) -> None:
    """Raises BlockingIOError or PermissionError if another process has the lock and `wait` is False."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    elif msvcrt is not None:
        file.seek(0)
        while True:
            try:
                msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                return
            except OSError:  # LK_LOCK gives up after ten seconds
                if not wait:
                    raise BlockingIOError from None


_locks_of_this_process: dict[Path, IO[str]] = {}


def lock_for_life(path: Path) -> bool:
    """Take a lock that this process keeps until it ends, however it ends; False if another process has it."""
    end_if_importing()
    path = path.resolve()
    if path in _locks_of_this_process:
        return True
    file = path.open("a")
    try:
        _lock(file, wait=False)
    except BlockingIOError:
        file.close()
        return False
    _locks_of_this_process[path] = file
    return True


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Only one process at a time is inside; the lock goes away with its process, however that ends."""
    end_if_importing()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:  # closing the file releases the lock
        _lock(file, wait=True)
        yield
