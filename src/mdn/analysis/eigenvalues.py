"""Eigenvalues of one step of the momentum delta rule, in closed form and from the full matrix.

Without input, [S; M] moves by a 2K x 2K matrix A. On the direction of a unit key A is a 2 x 2 block with trace
alpha + mu - alpha beta eta and determinant alpha mu; its two eigenvalues are the *pair*. All others are alpha or mu.
Gates are NumPy arrays of any one shape, the pair is complex ``[..., 2]``.
"""

from __future__ import annotations

import math
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


def pair_eigenvalues(alpha: Any, beta: Any, mu: Any, eta: Any) -> np.ndarray:
    """The two eigenvalues on the key's direction, ``[..., 2]``; the first has the larger modulus, or Im >= 0."""
    alpha, beta, mu, eta = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (alpha, beta, mu, eta)))
    half_trace = (alpha + mu - alpha * beta * eta) / 2
    root = np.sqrt((half_trace**2 - alpha * mu).astype(np.complex128))
    # Adding numbers of the same sign keeps all digits; the other root follows from the product, which is alpha mu.
    large = half_trace + np.where(half_trace < 0, -1, 1) * root
    large = np.where(root.imag > 0, half_trace + root, large)
    with np.errstate(divide="ignore", invalid="ignore"):
        small = np.where(large == 0, 0, alpha * mu / large)
    return np.stack([large, small], axis=-1)


def transition_matrix(alpha: float, beta: float, mu: float, eta: float, key: np.ndarray) -> np.ndarray:
    """A, ``[2K, 2K]``, acting on S above M, by applying one step without input to every unit vector."""
    size = len(key)
    fast_weight, momentum = np.eye(2 * size)[:size], np.eye(2 * size)[size:]
    error = -(alpha * key) @ fast_weight
    momentum = mu * momentum - eta * np.outer(key, error)
    fast_weight = alpha * fast_weight - beta * momentum
    return np.concatenate([fast_weight, momentum])


def spectral_radius(gates: GateSample) -> np.ndarray:
    """Largest modulus of all 2K eigenvalues of a step (K > 1, so that alpha and mu themselves are among them)."""
    pair = np.abs(pair_eigenvalues(gates.alpha, gates.beta, gates.mu, gates.eta)).max(axis=-1)
    return np.maximum(pair, np.maximum(gates.alpha, gates.mu))


def check_closed_form(samples: int, seed: int) -> float:
    """Largest distance of the closed form from ``numpy.linalg.eigvals`` of the full transition, over random steps."""
    rng = np.random.default_rng(seed)
    worst, key_dim = 0.0, 6
    for _ in range(samples):
        alpha, beta, mu = rng.uniform(0, 1, 3)
        eta = rng.uniform(0, 2)
        key = rng.normal(size=key_dim)
        key /= np.linalg.norm(key)
        pair = pair_eigenvalues(alpha, beta, mu, eta)
        expected = np.concatenate([np.full(key_dim - 1, alpha), np.full(key_dim - 1, mu), pair])
        found = np.linalg.eigvals(transition_matrix(alpha, beta, mu, eta, key))
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
    """
    rng = np.random.default_rng(seed)
    zero, one = np.zeros(points), np.ones(points)
    first = GateSample(rng.uniform(0, 1, points), rng.uniform(0, 2, points), zero, one)
    free = GateSample(*(rng.uniform(0, high, points) for high in (1, 1, 1, 2)))
    alpha = rng.uniform(0, 1, points)
    beta = rng.uniform(0, 1, points) * (1 - alpha)
    constrained = GateSample(alpha, beta, rng.uniform(math.exp(-1), 1, points), rng.uniform(0, 2, points))
    layer = inside_layer_bounds(rng, points, math.exp(-2))
    return {"first order": first, "unconstrained momentum": free, "constrained momentum": constrained, "layer": layer}


def inside_layer_bounds(rng: np.random.Generator, points: int, least_mu: float) -> GateSample:
    """alpha <= 1/(1 + x^2) and beta <= x^2/(1 + x^2) with x = eta s, eta in (0, 2), s in (0, 4), mu >= least_mu."""
    eta, s = rng.uniform(0, 2, points), rng.uniform(0, 4, points)
    largest_alpha = 1 / (1 + (eta * s) ** 2)
    alpha, beta = rng.uniform(0, 1, points) * largest_alpha, rng.uniform(0, 1, points) * (1 - largest_alpha)
    return GateSample(alpha, beta, rng.uniform(least_mu, 1, points), eta)


def sample_pair(gates: GateSample) -> np.ndarray:
    return pair_eigenvalues(gates.alpha, gates.beta, gates.mu, gates.eta)


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
