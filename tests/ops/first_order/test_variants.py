"""Published variants of the gated delta rule against their own recurrences, in float64 and with gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from definition import relative_error, unit
from mdn.ops import chunk_comba, chunk_gated_delta_rule, comba_step, gated_delta_rule_step
from mdn.ops.first_order import variants

B, T, H, HV, K, V, N = 2, 70, 2, 4, 12, 10, 3
SCALE = K**-0.5


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gate(*shape: int, seed: int, most: float = 1.0) -> Tensor:
    return most * torch.sigmoid(draw(*shape, seed=seed))


Q, KEY, VALUE = draw(B, T, H, K, seed=0), draw(B, T, H, K, seed=1), draw(B, T, HV, V, seed=2)
G = -0.2 * gate(B, T, HV, seed=3)


def heads(x: Tensor) -> Tensor:
    """[..., H, K] for every value head."""
    return x.repeat_interleave(HV // H, -2)


def loop(step: Callable[[Tensor, int], Tensor], q: Tensor = Q) -> tuple[Tensor, Tensor]:
    """o of the states that ``step(S, t)`` makes, S [B, HV, K, V], and the last state."""
    S, outputs = torch.zeros(B, HV, K, V, dtype=torch.float64), []
    for t in range(T):
        S = step(S, t)
        outputs.append(SCALE * torch.einsum("bhkv,bhk->bhv", S, heads(q)[:, t]))
    return torch.stack(outputs, 1), S


def outer(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bhk,bhv->bhkv", x, y)


def read(S: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bhkv,bhk->bhv", S, x)


def decayed(S: Tensor, t: int) -> Tensor:
    return G[:, t, :, None, None].exp() * S


def of_kaczmarz(strength: Tensor) -> tuple[Tensor, Tensor]:
    key = heads(KEY)

    def step(S: Tensor, t: int) -> Tensor:
        S, k = decayed(S, t), key[:, t]
        share = strength[:, t] / (k.square().sum(-1) + 1e-6)
        return S + share[..., None, None] * outer(k, VALUE[:, t] - read(S, k))

    return loop(step)


def of_preconditioned(beta: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    key = heads(unit(KEY))

    def step(S: Tensor, t: int) -> Tensor:
        S, k = decayed(S, t), key[:, t]
        return S + beta[:, t, :, None, None] * outer(heads(d)[:, t] * k, VALUE[:, t] - read(S, k))

    return loop(step)


def of_gated_delta_rule_2(erase: Tensor, write: Tensor) -> tuple[Tensor, Tensor]:
    key = heads(unit(KEY))

    def step(S: Tensor, t: int) -> Tensor:
        k = key[:, t]
        transition = torch.eye(K, dtype=torch.float64) - outer(k, heads(erase)[:, t] * k)
        return transition @ decayed(S, t) + outer(k, write[:, t] * VALUE[:, t])

    return loop(step)


VARIANTS = {
    "kaczmarz": (of_kaczmarz, variants.kaczmarz, KEY, (gate(B, T, HV, seed=4, most=2),)),
    "preconditioned": (
        of_preconditioned,
        variants.preconditioned,
        unit(KEY),
        (gate(B, T, HV, seed=5), 0.5 + gate(B, T, H, K, seed=6)),
    ),
    "Gated DeltaNet-2": (
        of_gated_delta_rule_2,
        variants.gated_delta_rule_2,
        unit(KEY),
        (gate(B, T, H, K, seed=7), gate(B, T, HV, V, seed=8)),
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_its_own_recurrence_with_gradients_of_its_gates(name: str) -> None:
    recurrence, arguments, key, gates = VARIANTS[name]
    rule = chunk_gated_delta_rule if name == "kaczmarz" else chunk_comba
    found_gates, expected_gates = ([x.clone().requires_grad_() for x in gates] for _ in range(2))
    found = rule(**arguments(Q, key, VALUE, G, *found_gates), output_final_state=True)
    reference = recurrence(*expected_gates)
    for actual, expected in zip(found, reference):
        assert relative_error(actual, expected) <= 1e-12
    found_grads, expected_grads = (
        torch.autograd.grad(o.square().sum(), given)
        for o, given in ((found.o, found_gates), (reference[0], expected_gates))
    )
    for actual, expected in zip(found_grads, expected_grads):
        assert relative_error(actual, expected) <= 1e-10


@pytest.mark.parametrize("name", VARIANTS)
def test_decode_steps_of_a_variant_are_its_sequence(name: str) -> None:
    recurrence, arguments, key, gates = VARIANTS[name]
    step = gated_delta_rule_step if name == "kaczmarz" else comba_step
    S = torch.zeros(B, HV, K, V, dtype=torch.float64)
    outputs = [step(**arguments(*(x[:, t] for x in (Q, key, VALUE, G, *gates))), state=S) for t in range(T)]
    o, final = recurrence(*gates)
    assert relative_error(torch.stack(outputs, 1), o) <= 1e-12
    assert relative_error(S, final) <= 1e-12


@pytest.mark.parametrize("most", [1.0, 2.0], ids=["positive eigenvalues", "negative eigenvalues"])
def test_delta_product_is_n_householder_steps_per_token(most: float) -> None:
    keys, values = unit(draw(B, T, N, H, K, seed=9)), draw(B, T, N, HV, V, seed=10)
    beta = gate(B, T, N, HV, seed=11, most=most)

    def step(S: Tensor, t: int) -> Tensor:
        S = decayed(S, t)
        for i in range(N):
            k, b = heads(keys[:, t, i]), beta[:, t, i, :, None, None]
            householder = torch.eye(K, dtype=torch.float64) - b * outer(k, k)
            S = householder @ S + b * outer(k, values[:, t, i])
        return S

    arguments = variants.delta_product(Q, keys, values, G, beta)
    found = variants.last_of_product(chunk_gated_delta_rule(**arguments, output_final_state=True), N)
    for actual, expected in zip(found, loop(step)):
        assert relative_error(actual, expected) <= 1e-12


def test_two_householder_steps_rotate_a_plane_by_any_angle() -> None:
    """A reflection has a negative eigenvalue; two of them are a rotation, which no single delta step is."""
    angle = 0.7
    keys = torch.tensor([[1.0, 0.0], [torch.cos(torch.tensor(angle / 2)), torch.sin(torch.tensor(angle / 2))]])
    keys = keys.double().view(1, 1, 2, 1, 2)
    zero = torch.zeros(1, 1, 2, 1, 2, dtype=torch.float64)
    beta, g = torch.full((1, 1, 2, 1), 2.0, dtype=torch.float64), torch.zeros(1, 1, 1, dtype=torch.float64)
    start = torch.eye(2, dtype=torch.float64).view(1, 1, 2, 2)
    arguments = variants.delta_product(zero[:, :, 0], keys, zero, g, beta)
    _, final = chunk_gated_delta_rule(**arguments, initial_state=start, output_final_state=True)
    assert torch.linalg.det(final[0, 0]).item() == pytest.approx(1)
    assert final[0, 0].trace().item() == pytest.approx(2 * torch.cos(torch.tensor(angle)).item(), abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": 1}, "q must be a torch.Tensor, got int"),
        ({"k": KEY}, r"k must have shape \[B, T, n, H, K\], got \[2, 70, 2, 12\]"),
        ({"beta": None}, "beta must be a torch.Tensor, got NoneType"),
        ({"cu_seqlens": [0, 70]}, "cu_seqlens must be a tensor or SequenceBoundaries, got list"),
    ],
)
def test_products_name_what_is_wrong(changes, message):
    given = {"q": Q[:1], "k": KEY[:1, :, None], "v": VALUE[:1, :, None], "g": G[:1], "beta": G[:1, :, None].exp()}
    with pytest.raises(ValueError, match=message):
        variants.chunk_gated_delta_product(**given | changes)
