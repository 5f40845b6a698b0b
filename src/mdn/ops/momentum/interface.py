"""The types of the momentum delta rule, from the public functions through checks and dispatch to a backend.

A backend is a module with three functions:

    forward(tensors, boundaries, options, save_residual) -> ForwardResult
    backward(grad_o, grad_final_state, tensors, residual, boundaries, options) -> RuleTensors    gradients
    step_(tensors, state, options) -> o                                                          S and M change in place

``boundaries`` is a ``SequenceBoundaries`` for a pack and None for a batch. ``grad_final_state`` is None for zeros. A
gradient is None where the input is None, and otherwise has the input's shape and dtype. Every backend gives the
residual as an empty tensor when it is not saved.

Shape letters: B batch, T time, H key heads, HV value heads (a multiple of H), K and V head dimensions, N sequences
(B, or the number of packed ones).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries

ACCURATE_CHUNK = 8
"""Largest chunk on a CPU when ``chunk_size`` is 16 or less, which requests accuracy. The weights of the writes grow
with the distance inside a chunk, and so does what cancels between them: with nearly equal keys and weakly damped gates
chunks of 8 lose at most about ten times as much as a float32 recurrence, chunks of 16 twice that."""


class RuleTensors(NamedTuple):
    """The tensors of one call, or their gradients. In a decode step there is no T and no initial state."""

    q: Tensor
    """[B, T, H, K]"""
    k: Tensor
    """[B, T, H, K]"""
    v: Tensor
    """[B, T, HV, V]"""
    p: Tensor | None
    """[B, T, H, K]: what the state is probed with; None means k"""
    log_alpha: Tensor
    """[B, T, HV], as are all gates; of the rule with vector decays [B, T, HV, K], and log_mu may be so too"""
    log_mu: Tensor
    beta: Tensor
    eta: Tensor
    direct: Tensor | None = None
    """weight of a write that reaches S without passing through the momentum; None means zeros"""
    initial_state: Tensor | None = None
    """[2, N, HV, K, V]: S, then M; None means zeros"""

    @property
    def of_tokens(
        self,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Everything but the initial state, which is the last field: q, k, v, p and the gates."""
        return self[:-1]

    @property
    def gates(self) -> dict[str, Tensor]:
        """The gates by name, ``direct`` only if there is one."""
        gates = {"log_alpha": self.log_alpha, "log_mu": self.log_mu, "beta": self.beta, "eta": self.eta}
        return gates if self.direct is None else gates | {"direct": self.direct}

    @property
    def scalar_gates(self) -> dict[str, Tensor]:
        """Those with one number per head and token."""
        return {name: gate for name, gate in self.gates.items() if gate.dim() < self.v.dim()}

    @property
    def vector_gates(self) -> dict[str, Tensor]:
        """Those with one number per key dimension: log_alpha, or both logs, of the rule with vector decays."""
        return {name: gate for name, gate in self.gates.items() if gate.dim() == self.v.dim()}

    @property
    def family(self) -> str:
        """The rule's family in ``mdn.ops.backends``."""
        return "vector momentum" if self.log_alpha.dim() == self.v.dim() else "momentum"

    def state_to_update(self, boundaries: SequenceBoundaries | None) -> Tensor:
        """[2, N, HV, K, V] that may be updated in place: a copy of the initial state, or zeros."""
        q, v, dtype = self.q, self.v, compute_dtype(self.q)
        if self.initial_state is not None:
            return self.initial_state.to(dtype, copy=True, memory_format=torch.contiguous_format)
        sequences = v.shape[0] if boundaries is None else boundaries.num_sequences
        return v.new_zeros(2, sequences, v.shape[-2], q.shape[-1], v.shape[-1], dtype=dtype)


class StepState(NamedTuple):
    """What a decode step updates in place: row b works on slot ``state_indices[b]``, or on slot b without indices."""

    S: Tensor
    """[slots, HV, K, V]"""
    M: Tensor | None
    """[slots, HV, K, V]; None: mu is 0, so nothing of M has to be kept"""
    state_indices: Tensor | None = None
    """int64 [B]"""


class ForwardResult(NamedTuple):
    """What a backend's forward pass returns."""

    o: Tensor
    """[B, T, HV, V], dtype of v"""
    final_state: Tensor
    """[2, N, HV, K, V], compute dtype"""
    residual: Tensor
    """[B, T, HV, V]: the prediction errors, all that backward needs beside the inputs; empty when not saved"""


class MomentumOutput(NamedTuple):
    """What the public functions return."""

    o: Tensor
    """[B, T, HV, V]"""
    final_state: Tensor | None
    """[2, N, HV, K, V], or None when it was not requested"""


@dataclass(frozen=True)
class RuleOptions:
    """The settings of one call that are not tensors."""

    scale: float
    """factor on the read-out, K ** -0.5 unless given"""
    chunk_size: int = 64
    """largest chunk. Changes speed; with repeated keys and weak damping also accuracy: chunk_size <= 16 is the accurate
    setting."""
    l2norm: bool = True
    """L2-normalise q, k and (if given) p"""
    p_times_alpha: bool = True
    """the error is read at the decayed state: p = alpha * p"""
    lookahead: bool = False
    """the error is read at alpha S - beta mu M, where the step would lead without a write; p is not multiplied by alpha
    then"""
    outputs: bool = True
    """False: only the final state is needed (calls without gradients); o may be left out, as an empty tensor"""


def compute_dtype(*vectors: Tensor) -> torch.dtype:
    """Coefficients, decays, solves and states: float64 if one of the vectors is, float32 for everything else."""
    return torch.float64 if any(x.dtype == torch.float64 for x in vectors) else torch.float32
