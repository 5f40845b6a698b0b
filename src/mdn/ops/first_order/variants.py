"""Published variants of the gated delta rule that are a choice of arguments of rules that are here already.

Each function returns the arguments, by name, of the function that its docstring mentions, for whole sequences
``[B, T, ...]`` and for one token ``[B, ...]`` alike: every form, backend and gradient of that function serves the
variant too.

    chunk_comba(**gated_delta_rule_2(q, k, v, g, erase, write), output_final_state=True)
    comba_step(**gated_delta_rule_2(q, k, v, g, erase, write), state=S)

Shapes: q, k ``[..., H, K]``, v ``[..., HV, V]``, gates ``[..., HV]``; alpha = exp(g). Vectors are used as they are:
normalise q and k before, where the variant needs unit keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.first_order.inputs import FirstOrderOutput, check_boundaries, check_shape
from mdn.ops.first_order.scalar_rules import chunk_gated_delta_rule
from mdn.ops.shared_checks import check_floating

if TYPE_CHECKING:
    from mdn.parallel import ContextParallelPlan

KACZMARZ_EPS = 1e-6


def kaczmarz(q: Tensor, k: Tensor, v: Tensor, g: Tensor, strength: Tensor) -> dict[str, Tensor]:
    """For ``chunk_gated_delta_rule`` and ``gated_delta_rule_step``: beta = strength / (|k|^2 + eps).

    Kaczmarz linear attention (arXiv 2605.08587). A strength of 1 projects the decayed state onto the states that answer
    k with v, whatever the length of k; strength ``[..., HV]`` in [0, 2] keeps the step from growing.
    """
    squared_norm = _for_value_heads(k, v).to(strength.dtype).square().sum(-1)
    beta = strength / (squared_norm + KACZMARZ_EPS)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}


def preconditioned(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, preconditioner: Tensor
) -> dict[str, Tensor]:
    """For ``chunk_comba`` and ``comba_step``: the error is read with k and written with preconditioner * k.

        S_t = alpha S + beta (d * k) (v - (alpha S)^T k)^T

    Preconditioned DeltaNet and Gated DeltaNet (arXiv 2604.21100), the write side of OSDN (arXiv 2605.13473).
    ``preconditioner`` d ``[..., H, K]`` is computed by the caller, for example from a decayed sum of k * k.
    """
    q, key, written = (_for_value_heads(x, v) for x in (q, k, preconditioner * k))
    return {"q": q, "k": written, "v": v, "p": _decayed(key, g), "g": g, "beta": beta}


def gated_delta_rule_2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, erase: Tensor, write: Tensor) -> dict[str, Tensor]:
    """For ``chunk_comba`` and ``comba_step``: gates per channel for what is erased and what is written.

        S_t = (I - k (erase * k)^T) alpha S + k (write * v)^T

    Gated DeltaNet-2 (arXiv 2605.22791) with one decay per head; erase is ``[..., H, K]``, write ``[..., HV, V]``.
    """
    q, key, erased = (_for_value_heads(x, v) for x in (q, k, erase * k))
    return {"q": q, "k": key, "v": write * v, "p": _decayed(erased, g), "g": g, "beta": torch.ones_like(g)}


def delta_product(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> dict[str, Tensor]:
    """For ``chunk_gated_delta_rule``: n delta steps per token, k ``[B, T, n, H, K]``, v ``[B, T, n, HV, V]`` and beta
    ``[B, T, n, HV]``; the state decays once per token. The sequences become n times as long (multiply ``cu_seqlens`` by
    n), and ``last_of_product`` takes the outputs of the tokens out of those of the steps.

    (Gated) DeltaProduct (arXiv 2502.10297). Its transition is a product of n generalised Householder matrices; with
    beta up to 2 (arXiv 2411.12537) they have negative eigenvalues, and n of them can rotate and permute.
    """
    axes = {"q": "B T H K", "k": "B T n H K", "v": "B T n HV V", "g": "B T HV", "beta": "B T n HV"}
    for (name, letters), x in zip(axes.items(), (q, k, v, g, beta)):
        check_floating(name, x)
        check_shape(name, x, tuple(letters.split()))
    steps = k.shape[2]
    first_only = F.pad(g.unsqueeze(2), (0, 0, 0, steps - 1))  # g = 0: no decay before the other steps
    return {
        "q": q.repeat_interleave(steps, dim=1),
        "k": k.flatten(1, 2),
        "v": v.flatten(1, 2),
        "g": first_only.flatten(1, 2),
        "beta": beta.flatten(1, 2),
    }


def last_of_product(output: FirstOrderOutput, steps: int) -> FirstOrderOutput:
    """What ``chunk_gated_delta_rule`` returns for ``delta_product``, with o ``[B, T, HV, V]`` after every n-th step."""
    return output._replace(o=output.o[:, steps - 1 :: steps])


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    context_parallel: ContextParallelPlan | None = None,
    **options: Any,
) -> FirstOrderOutput:
    """``delta_product`` by ``chunk_gated_delta_rule``: tokens in, o ``[B, T, HV, V]`` of tokens out.

    ``cu_seqlens`` counts tokens; further ``options`` are those of ``chunk_gated_delta_rule``.
    """
    if context_parallel is not None:
        raise ValueError("chunk_gated_delta_product cannot spread a sequence over ranks: give no context_parallel")
    inputs: dict[str, Any] = delta_product(q, k, v, g, beta)
    steps, boundaries = k.shape[2], check_boundaries(cu_seqlens, q)
    boundaries = None if boundaries is None else boundaries.stretched(steps)
    return last_of_product(chunk_gated_delta_rule(**inputs, cu_seqlens=boundaries, **options), steps)


def _for_value_heads(x: Tensor, v: Tensor) -> Tensor:
    """``[..., H, K]`` once per value head: these variants scale keys by what belongs to a value head."""
    return x.repeat_interleave(v.shape[-2] // x.shape[-2], dim=-2)


def _decayed(p: Tensor, g: Tensor) -> Tensor:
    """alpha p: Comba probes the state before its decay, these variants after it."""
    return p * g.exp().unsqueeze(-1).to(p.dtype)
