"""Host side of the chunkwise form: allocates buffers and launches two kernels forward, six backward.

Shapes as in docs/architecture.md. All tensors are seen as [tokens, heads, width] with tokens = B * T; a sequence is a
row of the batch or a member of a pack. Names of the buffers: docs/kernels.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdn.ops.triton.availability import why_unsupported
from mdn.ops.triton.backward_gates import backward_gates_kernel
from mdn.ops.triton.backward_inputs import backward_inputs_kernel
from mdn.ops.triton.backward_scores import backward_scores_kernel
from mdn.ops.triton.backward_states import backward_states_kernel
from mdn.ops.triton.forward_states import forward_states_kernel
from mdn.ops.triton.launcher import launch
from mdn.ops.triton.prepare import prepare_kernel
from mdn.ops.triton.rebuild_states import rebuild_states_kernel
from mdn.ops.triton.tiles import Tile, choose_tile, power_of_two, target_of


@dataclass(frozen=True)
class Problem:
    """Sizes and switches of one call, and the arguments that its kernels share."""

    q: Tensor
    v: Tensor
    boundaries: Any
    options: Any

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.boundaries is None else self.boundaries.num_sequences

    @property
    def chunk_size(self) -> int:
        return self.options.chunk_size

    @property
    def num_chunks(self) -> int:
        """How many chunks there are in all sequences together."""
        if self.boundaries is None:
            return self.q.shape[0] * triton.cdiv(self.q.shape[1], self.chunk_size)
        return self.boundaries.chunk_indices(self.chunk_size).shape[0]

    @property
    def tokens(self) -> int:
        return self.q.shape[0] * self.q.shape[1]

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def plane(self) -> int:
        """Elements between two vectors of a stacked [n, tokens, HV] buffer."""
        return self.tokens * self.v.shape[2]

    def tile(self, kernel: str) -> Tile:
        return choose_tile(kernel, self.q.shape[-1], self.v.shape[-1], self.q.element_size(), target_of(self.q.device))

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.q.device)

    def empty_square(self, dtype: torch.dtype) -> Tensor:
        """A buffer for one [C, C] matrix per chunk and value head, a row beside each token."""
        return self.empty(self.tokens, self.v.shape[2], self.chunk_size, dtype=dtype)

    def empty_scalars(self) -> Tensor:
        """Four numbers per chunk and value head; its rows are `blocks.state_row`."""
        rows = self.tokens // self.chunk_size + self.sequences
        return self.empty(rows, self.v.shape[2], 4, dtype=self.compute_dtype)

    def empty_states(self) -> Tensor:
        """A buffer with S and M [K, V] of every chunk, in the input dtype; its rows are `blocks.state_row`."""
        rows = self.tokens // self.chunk_size + self.sequences
        return self.empty(rows, self.v.shape[2], 2, self.q.shape[-1], self.v.shape[-1], dtype=self.q.dtype)

    def shared_arguments(self) -> dict[str, Any]:
        """Arguments that every kernel takes."""
        packed = self.boundaries is not None
        coefficient_precision, _ = precisions(self.q)
        return {
            "cu_seqlens": self.boundaries.cu_seqlens if packed else None,
            "time": self.q.shape[1],
            "H": self.q.shape[2],
            "HV": self.v.shape[2],
            "K": self.q.shape[-1],
            "C": self.chunk_size,
            "BK": power_of_two(self.q.shape[-1]),
            "PACKED": packed,
            "PRECISION": coefficient_precision,
            "COMPUTE": tl.float64 if self.q.dtype == torch.float64 else tl.float32,
        }

    def chunk_arguments(self) -> dict[str, Any]:
        """Further arguments of the kernels that run once per chunk."""
        packed = self.boundaries is not None
        return {
            "chunk_indices": self.boundaries.chunk_indices(self.chunk_size) if packed else None,
        }

    def norm_arguments(self) -> dict[str, Any]:
        """Further arguments of the kernels that normalise q, k and p."""
        return {
            "scale": self.options.scale,
            "L2NORM": self.options.l2norm,
            "P_TIMES_ALPHA": self.options.p_times_alpha,
        }

    def sequence_arguments(self, tile: Tile) -> dict[str, Any]:
        """Further arguments of the kernels that walk along a sequence."""
        return {
            "sequences": self.sequences,
            "plane": self.plane,
            "V": self.v.shape[-1],
            "BV": tile.value_block,
        }

    def sequence_grid(self, tile: Tile) -> tuple[int, int]:
        return self.sequences * self.v.shape[2], triton.cdiv(self.v.shape[-1], tile.value_block)


def precisions(q: Tensor) -> tuple[str, str]:
    """How to take products of float32 operands: (coefficients and float32 inputs, the product with the inverse).

    The coefficient product and the triangular inverse always have float32 quality. The inverse is applied to values
    that came through 16-bit products, where one TF32 product is enough. ROCm has no tf32x3, but true float32 products.
    """
    if target_of(q.device).startswith("gfx"):
        return "ieee", "ieee"
    return "tf32x3", "tf32" if q.element_size() == 2 else "tf32x3"


def _prepare(problem: Problem, q, k, p, gates, gamma: Tensor | None) -> dict[str, Tensor]:
    """The state-free part of all chunks: inverse, scores, coefficients and decays."""
    heads = problem.v.shape[2]
    buffers = {
        "inverse": problem.empty_square(problem.compute_dtype),
        "scores": problem.empty_square(q.dtype),
        "coefficients": problem.empty(8, problem.tokens, heads, dtype=problem.compute_dtype),
        "decays": problem.empty_scalars(),
    }
    launch(
        prepare_kernel,
        (problem.num_chunks, heads),
        problem.tile("prepare"),
        q=q,
        k=k,
        p=p,
        gamma=gamma,
        **gates,
        **buffers,
        **problem.shared_arguments(),
        **problem.chunk_arguments(),
        **problem.norm_arguments(),
        plane=problem.plane,
        key_dim=q.shape[-1],
    )
    return buffers


def _gates(*gates: Tensor) -> dict[str, Tensor]:
    return dict(zip(("log_alpha", "log_mu", "beta", "eta"), _contiguous(*gates)))


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def forward(
    q, k, v, p, log_alpha, log_mu, beta, eta, initial_state, boundaries, options, save_residual
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(o, final_state, residual): see docs/architecture.md."""
    reason = why_unsupported(q, v, options.chunk_size)
    if reason is not None:
        raise ValueError(reason)
    q, k, v, p, initial_state = _contiguous(q, k, v, p, initial_state)
    gates = _gates(log_alpha, log_mu, beta, eta)
    problem = Problem(q, v, boundaries, options)
    buffers = _prepare(problem, q, k, p, gates, gamma=None)
    o = torch.empty_like(v)
    residual = torch.empty_like(v) if save_residual else None
    heads, key_dim, value_dim = v.shape[2], q.shape[-1], v.shape[-1]
    final_state = problem.empty(2, problem.sequences, heads, key_dim, value_dim, dtype=problem.compute_dtype)
    tile = problem.tile("forward_states")
    launch(
        forward_states_kernel,
        problem.sequence_grid(tile),
        tile,
        q=q,
        k=k,
        p=p,
        v=v,
        initial_state=initial_state,
        **buffers,
        o=o,
        residual=residual,
        final_state=final_state,
        **problem.shared_arguments(),
        **problem.sequence_arguments(tile),
        SOLVE_PRECISION=precisions(q)[1],
    )
    return o, final_state, residual


def backward(
    grad_o,
    grad_final_state,
    q,
    k,
    v,
    p,
    log_alpha,
    log_mu,
    beta,
    eta,
    initial_state,
    residual,
    boundaries,
    options,
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dp, dlog_alpha, dlog_mu, dbeta, deta, dinitial_state): see docs/architecture.md."""
    grad_o, grad_final_state, residual = _contiguous(grad_o.to(v.dtype), grad_final_state, residual)
    q, k, v, p, initial_state = _contiguous(q, k, v, p, initial_state)
    gates = _gates(log_alpha, log_mu, beta, eta)
    problem = Problem(q, v, boundaries, options)
    gamma = problem.empty_square(problem.compute_dtype)
    buffers = _prepare(problem, q, k, p, gates, gamma)
    states = _rebuild_states(problem, k, residual, buffers, initial_state)
    dv, state_gradients, grad_initial_state = _backward_states(
        problem, grad_o, grad_final_state, q, k, p, buffers, initial_state
    )
    rows = {"grad_o": grad_o, "q": q, "k": k, "p": p, "residual": residual, "dv": dv}
    weights, d_gamma = _backward_scores(problem, rows, gates, gamma)
    gradients = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dp": None if p is None else torch.empty_like(p)}
    gradients |= {"d" + name: torch.empty_like(gate) for name, gate in gates.items()}
    sums, overlaps = _backward_inputs(problem, rows, gates, buffers, weights, states, state_gradients, gradients)
    _backward_gates(problem, gates, d_gamma, sums, overlaps, gradients)
    dq, dk, dp, *gate_gradients = gradients.values()
    return dq, dk, dv, dp, *gate_gradients, grad_initial_state


def _rebuild_states(problem: Problem, k, residual, buffers, initial_state) -> Tensor:
    states = problem.empty_states()
    tile = problem.tile("rebuild_states")
    launch(
        rebuild_states_kernel,
        problem.sequence_grid(tile),
        tile,
        k=k,
        residual=residual,
        coefficients=buffers["coefficients"],
        decays=buffers["decays"],
        initial_state=initial_state,
        states=states,
        **problem.shared_arguments(),
        **problem.sequence_arguments(tile),
    )
    return states


def _backward_states(
    problem: Problem, grad_o, grad_final_state, q, k, p, buffers, initial_state
) -> tuple[Tensor, Tensor, Tensor | None]:
    dv = torch.empty_like(grad_o)
    state_gradients = problem.empty_states()
    grad_initial_state = None if initial_state is None else torch.empty_like(initial_state)
    tile = problem.tile("backward_states")
    launch(
        backward_states_kernel,
        problem.sequence_grid(tile),
        tile,
        grad_o=grad_o,
        q=q,
        k=k,
        p=p,
        grad_final_state=grad_final_state,
        **buffers,
        dv=dv,
        state_gradients=state_gradients,
        grad_initial_state=grad_initial_state,
        **problem.shared_arguments(),
        **problem.sequence_arguments(tile),
        SOLVE_PRECISION=precisions(q)[1],
    )
    return dv, state_gradients, grad_initial_state


def _backward_scores(problem: Problem, rows, gates, gamma) -> tuple[dict[str, Tensor], Tensor]:
    """The weights {q_weights, p_weights} and the gradient of Gamma."""
    tile = problem.tile("backward_scores")
    weights = {name: problem.empty_square(problem.q.dtype) for name in ("q_weights", "p_weights")}
    d_gamma = torch.empty_like(gamma)
    launch(
        backward_scores_kernel,
        (problem.num_chunks, problem.v.shape[2]),
        tile,
        **rows,
        log_alpha=gates["log_alpha"],
        eta=gates["eta"],
        gamma=gamma,
        **weights,
        d_gamma=d_gamma,
        **problem.shared_arguments(),
        **problem.chunk_arguments(),
        **problem.norm_arguments(),
        V=problem.v.shape[-1],
        BV=tile.value_block,
    )
    return weights, d_gamma


def _backward_inputs(
    problem: Problem, rows, gates, buffers, weights, states, state_gradients, gradients
) -> tuple[Tensor, Tensor]:
    """Fills the gradients of q, k, p and eta; returns what the gradients of the other gates need."""
    tile = problem.tile("backward_inputs")
    sums = problem.empty(5, problem.tokens, problem.v.shape[2], dtype=problem.compute_dtype)
    overlaps = problem.empty_scalars()
    launch(
        backward_inputs_kernel,
        (problem.num_chunks, problem.q.shape[2]),
        tile,
        **rows,
        log_alpha=gates["log_alpha"],
        eta=gates["eta"],
        coefficients=buffers["coefficients"],
        states=states,
        state_gradients=state_gradients,
        **weights,
        **{name: gradients[name] for name in ("dq", "dk", "dp", "deta")},
        sums=sums,
        overlaps=overlaps,
        plane=problem.plane,
        value_dim=problem.v.shape[-1],
        **problem.shared_arguments(),
        **problem.chunk_arguments(),
        **problem.norm_arguments(),
        V=problem.v.shape[-1],
        BV=tile.value_block,
    )
    return sums, overlaps


def _backward_gates(problem: Problem, gates, d_gamma, sums, overlaps, gradients) -> None:
    """Fills the gradients of log_alpha, log_mu and beta."""
    launch(
        backward_gates_kernel,
        (problem.num_chunks, problem.v.shape[2]),
        problem.tile("backward_gates"),
        **{name: gates[name] for name in ("log_alpha", "log_mu", "beta")},
        d_gamma=d_gamma,
        sums=sums,
        overlaps=overlaps,
        **{name: gradients[name] for name in ("dlog_alpha", "dlog_mu", "dbeta")},
        plane=problem.plane,
        **problem.shared_arguments(),
        **problem.chunk_arguments(),
    )
