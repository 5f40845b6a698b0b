"""Gates that FLA's functions can make from raw projections: log-decays and writing strengths."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.ops.shared_checks import check_floating


class RawGates(NamedTuple):
    """Which gates a function of FLA is given raw, and what makes gates of them; its arguments, under FLA's names."""

    use_gate_in_kernel: bool
    A_log: Tensor | None
    dt_bias: Tensor | None
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    lower_bound: float | None = None


def log_decay_from(
    raw: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None = None,
    vector: bool = False,
) -> Tensor:
    """-exp(A_log) softplus(raw + dt_bias), or lower_bound sigmoid(exp(A_log) (raw + dt_bias)), in float32 or more.

    raw is ``[..., HV]``, or ``[..., HV, K]`` if ``vector``; A_log is ``[HV]`` and dt_bias has an entry for each of
    raw's.
    """
    per_token = raw.shape[-2 if vector else -1 :]
    _check_entries("A_log", A_log, per_token[:1])
    _check_entries("dt_bias", dt_bias, per_token)
    if lower_bound is not None and not (isinstance(lower_bound, int | float) and -math.inf < lower_bound <= 0):
        raise ValueError(f"lower_bound must be a finite number <= 0 or None, got {lower_bound!r}")
    raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
    if A_log is None and lower_bound is None:
        raise ValueError("A_log must be given with use_gate_in_kernel=True, unless lower_bound is")
    if dt_bias is not None:
        raw = raw + dt_bias.to(raw.dtype).reshape(per_token)
    rate = 1.0 if A_log is None else A_log.to(raw.dtype).exp().reshape(-1, *([1] * vector))
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * raw)
    return -rate * F.softplus(raw)


def _check_entries(name: str, x: Tensor | None, shape: torch.Size) -> None:
    if x is None:
        return
    check_floating(name, x)
    if x.numel() != shape.numel():
        raise ValueError(f"{name} must have {shape.numel()} entries, {list(shape)}, got shape {list(x.shape)}")


def writing_strength(beta: Tensor | None, sigmoid: bool, allow_neg_eigval: bool) -> Tensor | None:
    """beta itself, or sigmoid(beta), or 2 sigmoid(beta)."""
    if allow_neg_eigval and not sigmoid:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True")
    if beta is None or not sigmoid:
        return beta
    beta = beta.to(torch.promote_types(beta.dtype, torch.float32)).sigmoid()
    return 2 * beta if allow_neg_eigval else beta
