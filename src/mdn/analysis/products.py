"""The norm of products of steps: how much a disturbance of [S; M] can grow over a window, whatever single steps do.

Every step may keep its eigenvalues in the unit disc and a product of steps still grow. Shapes: gates ``[T, H]``, keys
``[T, H, K]``; the norm is the spectral norm of the 2K x 2K product, S and M in the units of the recurrence. Norms are
log10, and products are rescaled on the way: a float64 overflows beyond 1e308, where growth need not end.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from mdn.analysis.eigenvalues import GateSample

RESCALE_EVERY = 16
SMALLEST = 1e-290
MOST_PRODUCTS = 1024
"""per window length: there are many short windows, and a spread-out sample of them shows the same"""


class _Product:
    """A product of steps for N heads at once, rescaled on the way; ``log_norm`` is the log10 of its norm."""

    def __init__(self, heads: int, size: int):
        self.matrix = torch.eye(2 * size, dtype=torch.float64).expand(heads, -1, -1)
        self.log_scale = np.zeros(heads)

    def advance(self, gates: GateSample, keys: np.ndarray) -> None:
        """Gates ``[W, N]`` and keys ``[W, N, K]`` of W more steps."""
        alpha, beta, mu, eta, direct, key = (
            torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64)).unsqueeze(-1)
            for x in (gates.alpha, gates.beta, gates.mu, gates.eta, gates.direct, keys)
        )
        alpha, beta, mu, eta, direct = (x.unsqueeze(-1) for x in (alpha, beta, mu, eta, direct))
        writes_directly = bool(direct.any())
        fast_weight, momentum = self.matrix.chunk(2, dim=1)
        for t in range(len(keys)):
            probed = torch.bmm((alpha[t] * key[t]).mT, fast_weight)
            momentum = mu[t] * momentum + torch.bmm(eta[t] * key[t], probed)
            fast_weight = alpha[t] * fast_weight - beta[t] * momentum
            if writes_directly:
                fast_weight = fast_weight - torch.bmm(direct[t] * key[t], probed)
            if t % RESCALE_EVERY == RESCALE_EVERY - 1 or t == len(keys) - 1:
                largest = torch.maximum(fast_weight.abs().amax((1, 2)), momentum.abs().amax((1, 2)))
                largest = largest.clamp_min(SMALLEST).view(-1, 1, 1)
                fast_weight, momentum = fast_weight / largest, momentum / largest
                self.log_scale = self.log_scale + largest.flatten().log10().numpy()
        self.matrix = torch.cat([fast_weight, momentum], dim=1)

    @property
    def log_norm(self) -> np.ndarray:
        gram = self.matrix @ self.matrix.mT  # its largest eigenvalue is the square of the norm, and quicker than an SVD
        norm = torch.linalg.eigvalsh(gram)[:, -1].clamp_min(SMALLEST).sqrt()
        return norm.log10().numpy() + self.log_scale


def window_growth(gates: GateSample, keys: np.ndarray, window: int) -> np.ndarray:
    """log10 of the norm of the product over disjoint windows of ``window`` steps, ``[windows, H]``.

    All T // window of them, or an evenly spaced choice so that there are about MOST_PRODUCTS products.
    """
    if not 1 <= window <= len(keys):
        raise ValueError(f"window must lie in 1..{len(keys)}, the number of steps, got {window}")
    every, heads = len(keys) // window, keys.shape[1]
    count = min(every, max(MOST_PRODUCTS // heads, 1))
    chosen = np.linspace(0, every - 1, count).round().astype(int)

    def by_window(x: np.ndarray) -> np.ndarray:
        whole = x[: every * window].astype(np.float64).reshape(every, window, heads, *x.shape[2:])[chosen]
        return whole.swapaxes(0, 1).reshape(window, count * heads, *x.shape[2:])

    product = _Product(count * heads, keys.shape[2])
    product.advance(gates.map(by_window), by_window(keys))
    return product.log_norm.reshape(count, heads)


def running_growth(gates: GateSample, keys: np.ndarray, every: int = 64) -> np.ndarray:
    """log10 norm of the product of steps 1..t for t = every, 2 every, ...: ``[T // every, H]``."""
    if not 1 <= every <= len(keys):
        raise ValueError(f"every must lie in 1..{len(keys)}, the number of steps, got {every}")
    product = _Product(keys.shape[1], keys.shape[2])
    rows = []
    for begin in range(0, len(keys) - every + 1, every):
        piece = slice(begin, begin + every)
        product.advance(gates.map(lambda x, piece=piece: x[piece]), keys[piece])  # type: ignore[misc]
        rows.append(product.log_norm)
    return np.stack(rows)


def growth_summary(gates: GateSample, keys: np.ndarray, windows: list[int]) -> list[dict[str, float]]:
    """Per window: median, 99 % quantile and largest log10 norm, and the share of products that grow at all."""
    rows = []
    for window in windows:
        growth = window_growth(gates, keys, window)
        rows.append(
            {
                "window": window,
                "products": growth.size,
                "median log10 norm": float(np.median(growth)),
                "99 % log10 norm": float(np.quantile(growth, 0.99)),
                "largest log10 norm": float(growth.max()),
                "share above 1": float((growth > 0).mean()),
                "share above 10": float((growth > 1).mean()),
            }
        )
    return rows


def shares_over(growth: np.ndarray) -> dict[str, float]:
    """Shares of heads whose running product ever exceeds 10^6 and float32's largest number (10^38.5)."""
    most = growth.max(axis=0)
    float32_limit = math.log10(float(np.finfo(np.float32).max))
    return {
        "heads": growth.shape[1],
        "largest log10 norm": float(most.max()),
        "share above 1e6": float((most > 6).mean()),
        "share above float32": float((most > float32_limit).mean()),
    }
