"""What `mdn bench op` compares: our backends, other implementations of the same or a simpler rule, and their inputs.

Every peer is one call of forward + backward on q, k [B, T, H, K], v [B, T, H, V] and gates [B, T, H], in float32; the
kernels for GPUs round q, k and v to bfloat16 first, for which they were made. A peer that cannot run here gives its
reason instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mdn.bench.paper_form import paper_chunk_momentum_delta_rule
from mdn.ops import chunk_momentum_delta_rule, recurrent_momentum_delta_rule
from mdn.ops.backends import why_not

PeerInputs = dict[str, Any]  # tensors by argument name
Forward = Callable[[PeerInputs], Tensor]

OURS = "mdn torch"
NATIVE = "mdn cpu (native)"
TRITON = "mdn triton (bfloat16)"
BACKENDS = {OURS: "torch", NATIVE: "cpu", TRITON: "triton"}
"""our peers, and what they give as ``backend=``"""
PAPER = "paper's form, autograd"
PAPER_SOLVE = "paper's form, autograd, LAPACK solve"
FIRST_ORDER = "transformers GDN (first order)"
FLA = "FLA 0.6 MDN (bfloat16)"
ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True)
class RuleShape:
    batch: int
    time: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def tokens(self) -> int:
        return self.batch * self.time

    def __str__(self) -> str:
        return f"B{self.batch} T{self.time} H{self.heads} K{self.key_dim} V{self.value_dim}"

    def flops(self) -> float:
        """Dense count of forward + backward in chunks of 64 whose states at the start are rebuilt, for any peer."""
        chunk = 64
        pairs = self.tokens / chunk * self.heads
        states = 40 * chunk * self.key_dim * self.value_dim
        return pairs * (states + chunk**2 * (12 * self.value_dim + 16 * self.key_dim))


def make_inputs(
    shape: RuleShape, seed: int = 0, largest_factor: float = 1.0, device: str | torch.device = "cpu"
) -> PeerInputs:
    """The same numbers on every device. Gates inside the layer's bounds, mu falling slower than alpha: there the
    paper's form keeps its digits too."""
    generator = torch.Generator().manual_seed(seed)
    B, T, H = shape.batch, shape.time, shape.heads

    def uniform() -> Tensor:
        return torch.rand(B, T, H, generator=generator)

    eta = 2 * uniform()
    angle = torch.atan(eta * (0.1 + uniform()) * largest_factor)
    log_alpha = 2 * angle.cos().log()
    inputs = {name: torch.randn(B, T, H, shape.key_dim, generator=generator) for name in ("q", "k")}
    inputs["v"] = torch.randn(B, T, H, shape.value_dim, generator=generator)
    gates = {"log_alpha": log_alpha, "log_mu": 0.2 * log_alpha, "beta": angle.sin().square(), "eta": eta}
    return {name: x.to(device).requires_grad_() for name, x in (inputs | gates).items()}


# ------------------------------------------------------------------------------------------------------ the peers


def ours(name: str, x: PeerInputs, **options: Any) -> Tensor:
    """The rule by one of our backends."""
    given = inputs_for(name, x)
    return chunk_momentum_delta_rule(**given, **options, backend=BACKENDS[name], check_gates=False)[0].float()


def inputs_for(name: str, x: PeerInputs) -> PeerInputs:
    """Kernels for GPUs get the vectors that they were made for."""
    return x | {vector: x[vector].bfloat16() for vector in ("q", "k", "v")} if name in (TRITON, FLA) else x


def _paper(library_solve: bool) -> Forward:
    return lambda x: paper_chunk_momentum_delta_rule(**x, library_solve=library_solve).o


def _first_order(x: PeerInputs) -> Tensor:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    plain = inspect.unwrap(torch_chunk_gated_delta_rule)
    return plain(x["q"], x["k"], x["v"], g=x["log_alpha"], beta=x["beta"], use_qk_l2norm_in_kernel=True)[0]


def _fla(x: PeerInputs) -> Tensor:
    from fla.ops.momentum_delta_rule import chunk_momentum_delta_rule as fla_rule

    return fla_rule(**inputs_for(FLA, x))[0].float()


def _attention(x: PeerInputs) -> Tensor:
    q, k, v = (x[name].transpose(1, 2) for name in ("q", "k", "v"))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


FORWARDS: dict[str, Forward] = {
    **{name: partial(ours, name) for name in BACKENDS},
    PAPER: _paper(library_solve=False),
    PAPER_SOLVE: _paper(library_solve=True),
    FIRST_ORDER: _first_order,
    FLA: _fla,
    ATTENTION: _attention,
}


def training_step(name: str, inputs: PeerInputs) -> Callable[[], None]:
    """Forward and backward of a peer, gradients to everything it reads."""
    forward = FORWARDS[name]
    cotangent = torch.randn(inputs["v"].shape, generator=torch.Generator().manual_seed(1)).to(inputs["v"].device)

    def step() -> None:
        torch.autograd.grad(forward(inputs), list(inputs.values()), cotangent, allow_unused=True)

    return step


def runnable_peers(device: str = "cpu") -> tuple[list[str], dict[str, str]]:
    """Names that run on this device, and the reasons of the others."""
    small = make_inputs(RuleShape(1, 64, 1, 16, 16), device=device)
    names, reasons = [], {}
    for name in FORWARDS:
        try:
            training_step(name, small)()
            names.append(name)
        except Exception as error:  # whatever a foreign package raises is the reason to show
            reasons[name] = " ".join(str(error).split())[:160] or type(error).__name__
    for name in (NATIVE, TRITON):
        if name in reasons:
            reasons[name] = why_not(BACKENDS[name], small["q"]) or reasons[name]
    if FLA in reasons and device == "cpu":
        reasons[FLA] = f"needs a GPU (--device cuda) with Triton, or is not installed ({reasons[FLA]})"
    return names, reasons


# ------------------------------------------------------------------------------------------------ correctness gate


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over largest value; infinite when anything is NaN."""
    difference = (actual.double() - expected.double()).abs().max().item()
    return difference / expected.abs().max().item() if difference == difference else float("inf")


def _gradients(forward: Forward, inputs: PeerInputs) -> list[Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    o = forward(leaves)
    cotangent = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), cotangent)]


def check_correct(names: list[str], device: str = "cpu") -> dict[str, float]:
    """Worst relative error of each peer on a small slice; raises RuntimeError if one computes something else.

    Ours and the paper's form are held to the float64 recurrence (outputs to 2e-6 and gradients to 1e-5; 3e-2 for the
    Triton kernels with bfloat16 vectors, 1e-3 for the paper's form, which adds 1e-6 to beta). The first-order peer must
    equal our op without momentum.
    """
    inputs = make_inputs(RuleShape(1, 200, 2, 32, 48), seed=3, device=device)
    exact = {name: x.double() for name, x in inputs.items()}
    expected = _gradients(lambda x: recurrent_momentum_delta_rule(**x)[0], exact)
    errors: dict[str, float] = {}
    for name in names:
        if name in (ATTENTION, FLA):  # another function; bfloat16
            continue
        if name == FIRST_ORDER:
            without = inputs | {"log_mu": torch.full_like(inputs["log_mu"], float("-inf"))}
            ours = chunk_momentum_delta_rule(**without | {"eta": torch.ones_like(inputs["eta"])}, backend="torch")[0]
            errors[name], bar = relative_error(_first_order(inputs), ours), 1e-5
        else:
            found = _gradients(FORWARDS[name], inputs)
            output_bar, bar = {OURS: (2e-6, 1e-5), NATIVE: (2e-6, 1e-5), TRITON: (3e-2, 3e-2)}.get(name, (1e-3, 1e-3))
            every = [relative_error(x, y) for x, y in zip(found, expected)]
            errors[name] = max(every)
            bar = bar if every[0] <= output_bar else 0.0
        if not errors[name] <= bar:
            raise RuntimeError(f"{name} is off by {errors[name]:.1e} from its definition; nothing is reported")
    return errors
