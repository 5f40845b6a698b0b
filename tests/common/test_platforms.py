"""What other systems do not have: flock, CPU affinity, psutil, directories that can be opened, matplotlib."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mdn.common import files, hardware
from mdn.training.dataset import prepare_data
from training_support import tiny_recipe, write_corpus


def test_without_cpu_affinity_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert hardware.available_cores() == 6


def test_a_large_corpus_is_tokenised_without_cpu_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr("mdn.training.tokens.SMALL_CORPUS", 0)
    assert len(prepare_data(tiny_recipe(tmp_path)).training) > 1000


def test_without_flock_the_locks_of_windows_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: set[int] = set()

    def locking(descriptor: int, mode: int, count: int) -> None:
        inode = os.fstat(descriptor).st_ino
        if inode in held:
            raise OSError(errno.EACCES, "locked")
        held.add(inode)

    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setattr(files, "msvcrt", SimpleNamespace(locking=locking, LK_LOCK=1, LK_NBLCK=2))
    assert files.lock_for_life(tmp_path / "lock")
    files._locks_of_this_process.clear()
    assert not files.lock_for_life(tmp_path / "lock")
    with files.exclusive_lock(tmp_path / "other"):
        assert len(held) == 2


def test_a_directory_that_cannot_be_opened_is_not_synchronised_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(PermissionError):
        files.sync_directory(tmp_path)
    monkeypatch.setattr(files, "os", SimpleNamespace(name="nt", open=refuses, O_RDONLY=0))
    files.sync_directory(tmp_path)


def test_without_psutil_threads_and_memory_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "psutil", None)
    assert hardware.physical_memory() is None
    assert hardware.Threads().adapt(now=True) is None


@pytest.mark.parametrize("module", ["mdn.training.run", "mdn.cli.train", "mdn.evaluation.suites"])
def test_training_is_imported_without_matplotlib_and_fcntl(module: str) -> None:
    script = f"import sys; sys.modules['matplotlib'] = sys.modules['fcntl'] = None; import {module}"
    assert subprocess.run([sys.executable, "-c", script], timeout=300).returncode == 0


def test_a_run_without_matplotlib_ends_with_a_model_and_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mdn.training.run import train

    monkeypatch.setitem(sys.modules, "mdn.common.plots", None)
    write_corpus(tmp_path / "corpus")
    summary = train(tiny_recipe(tmp_path, training={"steps": 1})).summary
    assert summary is not None
    assert any(note.startswith("figures left out: ") for note in summary["notes"])
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
