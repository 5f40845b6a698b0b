"""Eigenvalues of one step of the momentum delta rule, in closed form and from the full matrix.

Without input, [S; M] moves by a 2K x 2K matrix A. On the direction of a unit key A is a 2 x 2 block with trace
alpha (1 - beta eta - direct) + mu and determinant alpha mu (1 - direct), equation (23) of docs/derivation.md; its two
eigenvalues are the *pair*. All others are alpha or mu. The rule of the paper has direct = 0.
Gates are NumPy arrays of any one shape, the pair is complex ``[..., 2]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

GUARANTEED_LOG_MU = -math.log(8)
"""inside the layer's bounds every eigenvalue is in the right half plane exactly when log mu is at least this"""


@dataclass(frozen=True)
class GateSample:
    """Gates of many steps, arrays of one shape."""

    alpha: np.ndarray
    beta: np.ndarray
    mu: np.ndarray
    eta: np.ndarray
    direct: np.ndarray

    @classmethod
    def of_paper(cls, alpha: np.ndarray, beta: np.ndarray, mu: np.ndarray, eta: np.ndarray) -> GateSample:
        """Without a direct write."""
        return cls(alpha, beta, mu, eta, np.zeros_like(alpha))

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> GateSample:
        """The same change of every array."""
        return GateSample(*map(change, (self.alpha, self.beta, self.mu, self.eta, self.direct)))


def pair_eigenvalues(alpha: Any, beta: Any, mu: Any, eta: Any, direct: Any = 0.0) -> np.ndarray:
    """The two eigenvalues on the key's direction, ``[..., 2]``; the first has the larger modulus, or Im >= 0."""
    gates = (np.asarray(x, dtype=np.float64) for x in (alpha, beta, mu, eta, direct))
    alpha, beta, mu, eta, direct = np.broadcast_arrays(*gates)
    half_trace = (alpha + mu - alpha * (beta * eta + direct)) / 2
    determinant = alpha * mu * (1 - direct)
    root = np.sqrt((half_trace**2 - determinant).astype(np.complex128))
    # Adding numbers of the same sign keeps all digits; the other root follows from the product, the determinant.
    large = half_trace + np.where(half_trace < 0, -1, 1) * root
    large = np.where(root.imag > 0, half_trace + root, large)
    with np.errstate(divide="ignore", invalid="ignore"):
        small = np.where(large == 0, 0, determinant / large)
    return np.stack([large, small], axis=-1)


def transition_matrix(
    alpha: float, beta: float, mu: float, eta: float, key: np.ndarray, direct: float = 0.0
) -> np.ndarray:
    """A, ``[2K, 2K]``, acting on S above M, by applying one step without input to every unit vector."""
    size = len(key)
    fast_weight, momentum = np.eye(2 * size)[:size], np.eye(2 * size)[size:]
    write = np.outer(key, -(alpha * key) @ fast_weight)
    momentum = mu * momentum - eta * write
    fast_weight = alpha * fast_weight - beta * momentum + direct * write
    return np.concatenate([fast_weight, momentum])


def spectral_radius(gates: GateSample) -> np.ndarray:
    """Largest modulus of all 2K eigenvalues of a step (K > 1, so that alpha and mu themselves are among them)."""
    pair = np.abs(sample_pair(gates)).max(axis=-1)
    return np.maximum(pair, np.maximum(gates.alpha, gates.mu))


def check_closed_form(samples: int, seed: int) -> float:
    """Largest distance of the closed form from ``numpy.linalg.eigvals`` of the full transition, over random steps."""
    rng = np.random.default_rng(seed)
    worst, key_dim = 0.0, 6
    for _ in range(samples):
        alpha, beta, mu = rng.uniform(0, 1, 3)
        eta, direct = rng.uniform(0, 2, 2)
        key = rng.normal(size=key_dim)
        key /= np.linalg.norm(key)
        pair = pair_eigenvalues(alpha, beta, mu, eta, direct)
        expected = np.concatenate([np.full(key_dim - 1, alpha), np.full(key_dim - 1, mu), pair])
        found = np.linalg.eigvals(transition_matrix(alpha, beta, mu, eta, key, direct))
        worst = max(worst, _matched_distance(expected, found))
    return worst


def _matched_distance(expected: np.ndarray, found: np.ndarray) -> float:
    """Match each expected value with the nearest that is left; the largest distance."""
    left = list(found)
    worst = 0.0
    for value in expected:
        distances = np.abs(np.array(left) - value)
        nearest = int(distances.argmin())
        worst = max(worst, float(distances[nearest]))
        left.pop(nearest)
    return worst


# ---------------------------------------------------------------------------------------------------------- regions


def sampled_regions(points: int = 4000, seed: int = 0) -> dict[str, GateSample]:
    """Gates drawn evenly from the three cases of the paper's spectral figure, and from the layer's own bounds.

    first order: mu = 0, alpha in (0, 1), beta in (0, 2). unconstrained: alpha, beta, mu in (0, 1), eta in (0, 2).
    constrained: the same with beta < 1 - alpha and mu >= 1/e. layer: alpha <= cos^2, beta <= sin^2, mu >= exp(-2).
    quasi-hyperbolic: the layer's, with a share of beta eta from 0 to 1 written directly.
    """
    rng = np.random.default_rng(seed)
    zero, one = np.zeros(points), np.ones(points)
    first = GateSample.of_paper(rng.uniform(0, 1, points), rng.uniform(0, 2, points), zero, one)
    free = GateSample.of_paper(*(rng.uniform(0, high, points) for high in (1, 1, 1, 2)))
    alpha = rng.uniform(0, 1, points)
    beta = rng.uniform(0, 1, points) * (1 - alpha)
    constrained = GateSample.of_paper(alpha, beta, rng.uniform(math.exp(-1), 1, points), rng.uniform(0, 2, points))
    layer = inside_layer_bounds(rng, points, math.exp(-2))
    split = _split(inside_layer_bounds(rng, points, math.exp(-2)), rng.uniform(0, 1, points))
    return {
        "first order": first,
        "unconstrained momentum": free,
        "constrained momentum": constrained,
        "layer": layer,
        "quasi-hyperbolic": split,
    }


def inside_layer_bounds(rng: np.random.Generator, points: int, least_mu: float) -> GateSample:
    """alpha <= 1/(1 + x^2) and beta <= x^2/(1 + x^2) with x = eta s, eta in (0, 2), s in (0, 4), mu >= least_mu."""
    eta, s = rng.uniform(0, 2, points), rng.uniform(0, 4, points)
    largest_alpha = 1 / (1 + (eta * s) ** 2)
    alpha, beta = rng.uniform(0, 1, points) * largest_alpha, rng.uniform(0, 1, points) * (1 - largest_alpha)
    return GateSample.of_paper(alpha, beta, rng.uniform(least_mu, 1, points), eta)


def _split(gates: GateSample, nu: np.ndarray) -> GateSample:
    """Quasi-hyperbolic momentum: the share nu of beta goes through the momentum, the rest is written directly."""
    direct = (1 - nu) * gates.beta * gates.eta
    return GateSample(gates.alpha, nu * gates.beta, gates.mu, gates.eta, direct)


def sample_pair(gates: GateSample) -> np.ndarray:
    return pair_eigenvalues(gates.alpha, gates.beta, gates.mu, gates.eta, gates.direct)


def region_eigenvalues(name: str, gates: GateSample) -> np.ndarray:
    """The eigenvalues that the figure shows: the pair; for a first-order rule its one eigenvalue alpha (1 - beta)."""
    pair = sample_pair(gates)
    return (gates.alpha * (1 - gates.beta)).astype(np.complex128) if name == "first order" else pair.reshape(-1)


def quadrant_shares(eigenvalues: np.ndarray) -> dict[str, float]:
    """Shares of the eigenvalues that are real (by sign) or lie in each quadrant; they add up to 1."""
    values = eigenvalues.reshape(-1)
    if not values.size:
        raise ValueError("eigenvalues is empty, expected at least one")
    real = np.abs(values.imag) <= 1e-12
    right, above = values.real >= 0, values.imag > 0
    masks = {
        "positive real": real & right,
        "negative real": real & ~right,
        "1st quadrant": ~real & right & above,
        "2nd quadrant": ~real & ~right & above,
        "3rd quadrant": ~real & ~right & ~above,
        "4th quadrant": ~real & right & ~above,
    }
    return {name: float(mask.mean()) for name, mask in masks.items()}
