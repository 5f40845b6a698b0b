"""Barriers, waits and fences are removed from our compiled kernels one at a time: each removal must be noticed.

Either a race detector reports it, or the kernel writes something else: bytes that have not arrived, and products that
have not been waited for, are NaN. Any other removal must be redundant: the exhaustive check, which keeps all accesses
to memory and compares them pair by pair (`mdn.bench.emulator.exhaustive`), finds no conflict either. Of registers,
which wgmma.fence orders, nothing is summed up that the exhaustive check could keep: both are the same check.

All launches of a forward and a backward pass and of a decode step are recorded once, those whose tiles are wider in a
batch that fills a GPU twice; a changed kernel then runs alone. The slow tests do the same with a pack.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from mdn.bench.emulator import EmulatedGPU
from mdn.ops import chunk_momentum_delta_rule, momentum_delta_step
from mdn.ops.triton.tiles import FULL_GPU, assume_heads

pytest.importorskip("triton")
pytestmark = pytest.mark.first

SYNCHRONISATION = {
    "CTA barrier": r"^\s*bar\.sync\s.*;$",
    "warp barrier": r"^\s*bar\.warp\.sync\s.*;$",
    "wait for copies": r"^\s*cp\.async\.wait_group\s.*;$",
    "depth of a wait for copies": r"^\s*cp\.async\.wait_group\s.*;$",
    "proxy fence": r"^\s*fence\.proxy\.async.*;$",
    "wait for wgmma": r"^\s*wgmma\.wait_group\.sync\.aligned\s.*;$",
    "fence of registers": r"^\s*wgmma\.fence\.sync\.aligned;$",
}
AMPERE = ("CTA barrier", "warp barrier", "wait for copies", "depth of a wait for copies")
KINDS = {"sm_80": set(AMPERE), "sm_90": set(SYNCHRONISATION)}
KERNELS = (
    *("prepare", "forward_states", "contain"),
    *("prepare, backward", "rebuild_states", "backward_states", "backward_scores", "backward_inputs", "backward_gates"),
    "decode",
)
WIDE = {
    "sm_80": ("rebuild_states, wide", "decode, wide"),
    "sm_90": ("forward_states, wide", "rebuild_states, wide", "backward_states, wide", "decode, wide"),
}
"""the kernels that have other tiles in a batch that fills the GPU"""
PACKED = tuple(f"{name}, pack" for name in KERNELS)
"""of a pack with a given p and two value heads per key head, in chunks of 32 tokens; all others: chunks of 64"""
REDUNDANT = 1 / 3
"""Largest share of the removals from one kernel that nothing notices. Triton repeats fences and waits with nothing
between them, puts barriers before the first and after the last copies of a pipeline, and fences registers that an
earlier fence covers: 22 of 965 on sm_80 and 89 of 1013 on sm_90, at most 10 of 33 in one kernel."""

# ----------------------------------------------------------------------------------------------------- launches


@dataclass
class Recorded:
    """One launch: the compiled kernel, its arguments before, and what became of them."""

    compiled: Any
    grid: tuple[int, ...]
    before: dict[str, Any]
    after: dict[str, Any]

    @property
    def ptx(self) -> str:
        return self.compiled.asm["ptx"]


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """Tensors that share memory do so in the copy, too, and keep their strides."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        storage = storages.setdefault(x.data_ptr() - x.storage_offset() * x.element_size(), x.untyped_storage().clone())
        return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.shape, x.stride())

    return {name: copy(x.detach() if isinstance(x, Tensor) else x) for name, x in arguments.items()}


class Recorder(EmulatedGPU):
    def __init__(self, target: str):
        super().__init__(target, check=True)
        self.launches: dict[str, Recorded] = {}

    def run(self, compiled: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        before = copied(arguments)
        super().run(compiled, grid, arguments)
        name = compiled.metadata.name.removesuffix("_kernel")
        name = f"{name}, backward" if name in self.launches else name
        self.launches[name] = Recorded(compiled, grid, before, copied(arguments))


@cache
def recorded(target: str) -> dict[str, Recorded]:
    """The launches of a small batch, and those with the tiles of a full GPU as far as they differ."""
    launches = record(target, small_batch())
    with assume_heads(FULL_GPU):
        again = record(target, small_batch())
    wide = {f"{name}, wide": launch for name, launch in again.items() if launch.ptx != launches[name].ptx}
    assert tuple(wide) == WIDE[target]
    return launches | wide


@cache
def recorded_pack(target: str) -> dict[str, Recorded]:
    launches = record(target, pack(), chunk_size=32, cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0))
    return {f"{name}, pack": launch for name, launch in launches.items()}


def launch_of(target: str, kernel: str) -> Recorded:
    return (recorded_pack if kernel in PACKED else recorded)(target)[kernel]


def make_inputs(B: int, T: int, H: int, HV: int, names: str) -> dict[str, Tensor]:
    """K = V = 64, in bfloat16."""
    torch.manual_seed(0)
    inputs = {name: torch.randn(B, T, HV if name == "v" else H, 64, dtype=torch.bfloat16) for name in names}
    inputs |= {name: -torch.rand(B, T, HV) for name in ("log_alpha", "log_mu")}
    return inputs | {name: torch.rand(B, T, HV) for name in ("beta", "eta")}


def small_batch() -> dict[str, Tensor]:
    """Two rows of four chunks of 64 tokens: pipelines of three stages come round. A key of the second row is NaN, so
    that the code for such tokens is executed, too."""
    inputs = make_inputs(2, 200, 1, 1, "qkv")
    inputs["k"][1, 30] = torch.nan
    return inputs


LENGTHS = (0, 1, 130, 32, 0, 5)


def pack() -> dict[str, Tensor]:
    """A pack with a given p and an initial state, two value heads per key head; one sequence has five chunks of 32."""
    inputs = make_inputs(1, sum(LENGTHS), 1, 2, "qkvp")
    inputs["k"][0, 40] = torch.nan
    return inputs | {"initial_state": torch.randn(2, len(LENGTHS), 2, 64, 64)}


def record(target: str, inputs: dict[str, Tensor], **options: Any) -> dict[str, Recorded]:
    """The launches of forward, backward and a decoding step."""
    gpu = Recorder(target)
    with gpu.emulate():
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        o, state = chunk_momentum_delta_rule(**leaves, **options, output_final_state=True, backend="triton")
        torch.autograd.grad([o, state], list(leaves.values()), [torch.randn_like(o), torch.randn_like(state)])
        token = {name: x[:, 0] for name, x in inputs.items() if name != "initial_state"}
        rows, value_heads = token["log_mu"].shape
        momentum_delta_step(**token, state=torch.randn(2, rows, value_heads, 64, 64), backend="triton")
    assert not gpu.races
    assert tuple(gpu.launches) == KERNELS
    return gpu.launches


def run_again(launch: Recorded, target: str, ptx: str | None = None, exhaustive: bool = False):
    """The launch with another text of its kernel: (races, its arguments afterwards)."""
    used: list[str] = []

    def edit(name: str, text: str) -> str:
        used.append(name)
        return text if ptx is None else ptx

    gpu = EmulatedGPU(target, check="exhaustive" if exhaustive else True, edit=edit)
    arguments = copied(launch.before)
    gpu.run(launch.compiled, launch.grid, arguments)
    assert len(used) == 1
    return gpu.races, arguments


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """The same bits in every tensor; NaN is NaN."""
    pairs = [(x, expected[name]) for name, x in found.items() if isinstance(x, Tensor)]
    return all(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


# ----------------------------------------------------------------------------------------------------- removals


@dataclass(frozen=True)
class Removal:
    kernel: str
    what: str
    line: int


def removals(target: str, kernel: str) -> list[Removal]:
    """Every instruction of the kernel that can be removed."""
    lines = enumerate(launch_of(target, kernel).ptx.splitlines())
    patterns = SYNCHRONISATION.items()
    return [Removal(kernel, what, i) for i, line in lines for what, pattern in patterns if re.match(pattern, line)]


def without(ptx: str, removal: Removal) -> str:
    """Removes one line. If the depth is what is wrong, a wait leaves one group of copies more in flight instead."""
    lines = ptx.splitlines()
    changed = ""
    if removal.what == "depth of a wait for copies":
        wait = re.match(r"(\s*cp\.async\.wait_group\s+)(\w+);", lines[removal.line])
        assert wait is not None
        changed = f"{wait[1]}{int(wait[2], 0) + 1};"
    assert changed.strip() != lines[removal.line].strip()
    lines[removal.line] = changed
    return "\n".join(lines)


def noticed(target: str, removal: Removal) -> bool:
    launch = launch_of(target, removal.kernel)
    races, found = run_again(launch, target, without(launch.ptx, removal))
    return bool(races) or not same(found, launch.after)


def check_removals(target: str, tried: list[Removal]) -> None:
    unnoticed = [removal for removal in tried if not noticed(target, removal)]
    for removal in unnoticed:
        launch = launch_of(target, removal.kernel)
        conflicts, _ = run_again(launch, target, without(launch.ptx, removal), exhaustive=True)
        assert not conflicts, removal
    print(f"{target}: {len(tried)} removals, of which redundant: {unnoticed}")
    assert len(unnoticed) <= REDUNDANT * len(tried)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_one_removal_of_every_kind_from_every_kernel_is_noticed(target):
    every = [removal for kernel in KERNELS + WIDE[target] for removal in removals(target, kernel)]
    assert {removal.what for removal in every} == KINDS[target]
    groups: dict[tuple[str, str], list[Removal]] = {}
    for removal in every:
        groups.setdefault((removal.kernel, removal.what), []).append(removal)
    # Not the first and last ones: what begins and ends a pipeline is often redundant.
    check_removals(target, [group[len(group) // 4] for group in groups.values()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "kernel"), [(target, name) for target in WIDE for name in KERNELS + WIDE[target] + PACKED]
)
def test_every_removed_barrier_wait_or_fence_is_noticed_or_redundant(target, kernel):
    check_removals(target, removals(target, kernel))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_exhaustive_check_finds_nothing_in_the_kernels_as_they_are(target):
    for kernel, launch in (recorded(target) | recorded_pack(target)).items():
        conflicts, found = run_again(launch, target, exhaustive=True)
        assert not conflicts, kernel
        assert same(found, launch.after), kernel
