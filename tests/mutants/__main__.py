"""Seeds faults into copies of the backends and shows that the conformance suite finds every one of them.

    python tests/mutants                 all mutants, in about half an hour
    python tests/mutants torch eta       those whose description contains all of these words

A mutant is one replacement of text in one file. If the text is not there any more, the code was rewritten: write the
mutant anew, do not delete it. Exit code 0 means that all were killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
OPS = Path("src/mdn/ops")
COMPILER = os.environ.get("CXX", "g++")


class StaleMutant(Exception):
    """The text to be replaced is not in the file exactly once."""


def seed(mutant: Mutant, copy: Path) -> None:
    path = copy / OPS / mutant.file
    text = path.read_text()
    if mutant.old and text.count(mutant.old) != 1:
        raise StaleMutant(f"{OPS / mutant.file} contains {text.count(mutant.old)} times, not once:\n{mutant.old}")
    path.write_text(text.replace(mutant.old, mutant.new) if mutant.old else text)


def build_kernel(copy: Path) -> dict[str, str]:
    """Compiles the copy's native kernel, for any processor and with few optimisations; where it is."""
    folder = copy / "kernel"
    folder.mkdir()
    sources = sorted(map(str, (copy / OPS / "cpu" / "csrc").glob("*.cpp")))
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=fast", "-Wno-psabi"]
    output = ["-o", str(folder / "_kernel_baseline.so"), "-ldl", "-pthread"]
    subprocess.run([COMPILER, *flags, *sources, *output], check=True, capture_output=True, text=True)
    return {"MDN_CPU_LIBRARY_DIR": str(folder)}


def run_suite(mutant: Mutant, copy: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(copy / "src"), str(ROOT / "tests")]),
        "MDN_TEST_BACKENDS": mutant.backend,
        "OMP_NUM_THREADS": "1",
    }
    if mutant.file.endswith((".cpp", ".h")):
        environment |= build_kernel(copy)
    if mutant.backend == "triton":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
    suite = str(ROOT / "tests" / "ops" / "test_conformance.py")
    chosen = ["-k", mutant.tests] if mutant.tests else []
    return subprocess.run([*command, suite, *chosen], cwd=ROOT, env=environment, capture_output=True, text=True)


def verdict(mutant: Mutant) -> str:
    """'killed by TEST', or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        try:
            seed(mutant, copy)
        except StaleMutant as error:
            return f"stale: {error}"
        done = run_suite(mutant, copy)
    if done.returncode == 0:
        return "SURVIVED"
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    if done.returncode != 1 or not failed:
        return f"broken: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return "killed by " + failed[0].removeprefix("FAILED ").split("::")[1].split(" - ")[0]


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if all(word in str(mutant) for word in words)]
    for backend in {mutant.backend for mutant in chosen}:
        file = "cpu/csrc/chunk.h" if backend == "cpu" else "__init__.py"  # the former is compiled, as a mutant would be
        control = verdict(Mutant(backend, "control: no fault", file, "", ""))
        print(
            f"{backend}: without a fault the suite {'passes' if control == 'SURVIVED' else 'FAILS: ' + control}",
            flush=True,
        )
        if control != "SURVIVED":
            return 1
    verdicts = {}
    for number, mutant in enumerate(chosen, 1):
        verdicts[mutant] = verdict(mutant)
        print(f"{number}/{len(chosen)} {mutant}: {verdicts[mutant]}", flush=True)
    alive = [mutant for mutant, outcome in verdicts.items() if not outcome.startswith("killed")]
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants killed")
    return 1 if alive or not chosen else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
