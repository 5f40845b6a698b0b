"""The optional native CPU kernel; everything else about the package is in pyproject.toml.

The kernel (src/mdn/ops/cpu/csrc) is plain C++ with a C interface: no Python or torch headers. It is compiled once per
instruction set into a shared library beside ``mdn/ops/cpu/__init__.py``; at run time the best one for the processor
is loaded.
A variant that does not compile (no compiler, or an old one) is left out, and the install still succeeds.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/mdn/ops/cpu/csrc")
SOURCES = sorted(str(path) for path in FOLDER.glob("*.cpp"))
HEADERS = sorted(str(path) for path in FOLDER.glob("*.h"))
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-g0"]
VARIANTS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    AVX2, AVX512 = ["-mavx2", "-mfma"], ["-mavx512f"]
    VARIANTS |= {"avx2": AVX2, "avx512": AVX2 + AVX512, "avx512vnni": [*AVX2, *AVX512, "-mavx512vnni"]}


def variant(name: str, flags: list[str]) -> Extension:
    return Extension(
        f"mdn.ops.cpu._kernel_{name}",
        sources=SOURCES,
        depends=HEADERS,
        extra_compile_args=FLAGS + flags,
        language="c++",
        optional=True,
    )


class BuildKernel(build_ext):
    """Builds plain shared libraries: no Python version in the file name, no module-init symbol."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols

    def build_extension(self, ext: Extension) -> None:
        # All variants have the same sources, so each needs object files of its own.
        shared = self.build_temp
        self.build_temp = str(Path(shared) / ext.name)
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = shared


setup(ext_modules=[variant(name, flags) for name, flags in VARIANTS.items()], cmdclass={"build_ext": BuildKernel})
