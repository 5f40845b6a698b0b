"""docs/derivation.md as printed: equations (2) to (25) and (31) to (38) in float64, against autograd through the
recurrences (1) and (31).

One chunk, one head, plain matrices. Nothing here imports the library.
"""

from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

C, K, V, SCALE, EPS = 7, 5, 4, 0.37, 1e-6


@dataclass
class Chunk:
    """Raw inputs of one chunk; q and k are normalised by the rule, p = alpha k, with look-ahead p = k."""

    q: Tensor  # [C, K]
    k: Tensor  # [C, K]
    v: Tensor  # [C, V]
    log_alpha: Tensor  # [C]
    log_mu: Tensor  # [C]
    beta: Tensor  # [C]
    eta: Tensor  # [C]
    direct: Tensor  # [C]
    S0: Tensor  # [K, V]
    M0: Tensor  # [K, V]

    @classmethod
    def random(cls, zero_gates: bool, general: bool = False) -> "Chunk":
        torch.manual_seed(0)
        normal = [torch.randn(*shape, dtype=torch.float64) for shape in ((C, K), (C, K), (C, V), (K, V), (K, V))]
        gates = torch.rand(4, C, dtype=torch.float64)
        log_alpha, log_mu, beta, eta = -3 * gates[0], -gates[1], gates[2], 2 * gates[3]
        if zero_gates:
            log_alpha[2] = log_mu[4] = -torch.inf
            beta[1] = eta[5] = 0
        direct = torch.rand(C, dtype=torch.float64) if general else torch.zeros(C, dtype=torch.float64)
        return cls(*normal[:3], log_alpha, log_mu, beta, eta, direct, *normal[3:])

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


def unit(x: Tensor) -> tuple[Tensor, Tensor]:
    norm = (x.square().sum(-1, keepdim=True) + EPS).rsqrt()
    return x * norm, norm


def recurrence(x: Chunk, lookahead: bool) -> tuple[Tensor, Tensor, Tensor]:  # (1), with (22) and the direct write
    q, k = unit(x.q)[0], unit(x.k)[0]
    S, M, outputs = x.S0, x.M0, []
    for t in range(C):
        alpha, mu = x.log_alpha[t].exp(), x.log_mu[t].exp()
        state_at_probe = alpha * S - x.beta[t] * mu * M if lookahead else alpha * S
        r = x.v[t] - state_at_probe.T @ k[t]
        M = mu * M - x.eta[t] * torch.outer(k[t], r)
        S = alpha * S - x.beta[t] * M + x.direct[t] * torch.outer(k[t], r)
        outputs.append(SCALE * S.T @ q[t])
    return torch.stack(outputs), S, M


def decay(log_gate: Tensor) -> Tensor:  # (3)
    return torch.stack(
        [
            torch.stack([log_gate[j:i].sum().exp() if i >= j else log_gate.new_zeros(()) for j in range(C + 1)])
            for i in range(C + 1)
        ]
    )


class Forward:
    """Equations (3) to (8), with (20). ``probe_rows`` are the rows that P reads: i - 1, or i with look-ahead (22)."""

    def __init__(self, x: Chunk, lookahead: bool = False):
        (self.q, self.q_norm), (self.k, self.k_norm) = unit(x.q), unit(x.k)
        self.lookahead, self.probe_rows = lookahead, slice(1, None) if lookahead else slice(0, -1)
        self.p = self.k if lookahead else x.log_alpha.exp().unsqueeze(-1) * self.k
        self.decay_alpha, self.decay_mu = decay(x.log_alpha), decay(x.log_mu)
        one, zero = x.beta.new_ones(1), x.beta.new_zeros(1)
        self.eta_row, self.beta_column = torch.cat([one, x.eta]), torch.cat([zero, x.beta]).unsqueeze(-1)
        self.gamma_M = self.decay_mu * self.eta_row  # (4)
        self.scaled = self.beta_column * self.gamma_M + torch.cat([zero, x.direct]).diag()  # (20)
        self.gamma_S = self.decay_alpha @ self.scaled  # (5)
        self.abar, self.b, self.mbar = self.decay_alpha[:, :1], self.gamma_S[:, :1], self.gamma_M[:, :1]
        self.pk, self.qk = self.p @ self.k.T, self.q @ self.k.T
        self.erase = (self.pk * self.gamma_S[self.probe_rows, 1:]).tril(-1)  # (6)
        target = x.v - self.abar[self.probe_rows] * (self.p @ x.S0) + self.b[self.probe_rows] * (self.p @ x.M0)
        self.solve = torch.eye(C, dtype=torch.float64) + self.erase
        self.R = torch.linalg.solve(self.solve, target)
        self.attend = self.qk * self.gamma_S[1:, 1:]  # (7)
        self.O = SCALE * (self.abar[1:] * (self.q @ x.S0) - self.b[1:] * (self.q @ x.M0) + self.attend @ self.R)
        self.write_S, self.write_M = self.gamma_S[-1, 1:, None], self.gamma_M[-1, 1:, None]  # (8)
        self.S = self.abar[-1] * x.S0 - self.b[-1] * x.M0 + self.k.T @ (self.write_S * self.R)
        self.M = self.mbar[-1] * x.M0 - self.k.T @ (self.write_M * self.R)


def backward(x: Chunk, f: Forward, grad_o: Tensor, grad_S: Tensor, grad_M: Tensor) -> list[Tensor]:
    """Equations (9) to (18), with (21); gradients in the order of ``Chunk``'s fields."""
    before = f.probe_rows
    grad_O = SCALE * grad_o
    k_grad_S, k_grad_M = f.k @ grad_S, f.k @ grad_M
    grad_R = f.attend.T @ grad_O + f.write_S * k_grad_S - f.write_M * k_grad_M  # (9)
    grad_target = torch.linalg.solve(f.solve.T, grad_R)  # (10)
    abar_q, b_q, abar_p, b_p = f.abar[1:] * f.q, f.b[1:] * f.q, f.abar[before] * f.p, f.b[before] * f.p
    grad_S0 = f.abar[-1] * grad_S + abar_q.T @ grad_O - abar_p.T @ grad_target  # (11)
    grad_M0 = f.mbar[-1] * grad_M - f.b[-1] * grad_S - b_q.T @ grad_O + b_p.T @ grad_target
    grad_attend, grad_erase = (grad_O @ f.R.T).tril(), -(grad_target @ f.R.T).tril(-1)  # (12)
    grad_qk, grad_pk = grad_attend * f.gamma_S[1:, 1:], grad_erase * f.gamma_S[before, 1:]  # (13)
    grad_gamma_S, grad_gamma_M = torch.zeros_like(f.gamma_S), torch.zeros_like(f.gamma_M)
    grad_gamma_S[1:, 1:] += grad_attend * f.qk
    grad_gamma_S[before, 1:] += grad_erase * f.pk
    grad_gamma_S[-1, 1:] += (f.R * k_grad_S).sum(-1)
    grad_gamma_M[-1, 1:] -= (f.R * k_grad_M).sum(-1)
    grad_q = grad_qk @ f.k + f.abar[1:] * (grad_O @ x.S0.T) - f.b[1:] * (grad_O @ x.M0.T)  # (14)
    grad_p = grad_pk @ f.k - f.abar[before] * (grad_target @ x.S0.T) + f.b[before] * (grad_target @ x.M0.T)
    grad_k = grad_qk.T @ f.q + grad_pk.T @ f.p
    grad_k += f.write_S * (f.R @ grad_S.T) - f.write_M * (f.R @ grad_M.T)
    grad_decay_alpha = torch.zeros_like(f.decay_alpha)
    grad_abar, grad_b = grad_decay_alpha[:, 0], grad_gamma_S[:, 0]  # views                  (15)
    grad_abar[1:] += (grad_O * (f.q @ x.S0)).sum(-1)
    grad_abar[before] -= (grad_target * (f.p @ x.S0)).sum(-1)
    grad_abar[-1] += (x.S0 * grad_S).sum()
    grad_b[1:] -= (grad_O * (f.q @ x.M0)).sum(-1)
    grad_b[before] += (grad_target * (f.p @ x.M0)).sum(-1)
    grad_b[-1] -= (x.M0 * grad_S).sum()
    grad_gamma_M[-1, 0] += (x.M0 * grad_M).sum()
    grad_scaled = f.decay_alpha.T @ grad_gamma_S  # (16)
    grad_decay_alpha += grad_gamma_S @ f.scaled.T
    grad_beta = (grad_scaled * f.gamma_M).sum(-1)[1:]
    grad_direct = grad_scaled.diagonal()[1:]  # (21)
    grad_gamma_M += f.beta_column * grad_scaled
    grad_eta = (grad_gamma_M * f.decay_mu).sum(0)[1:]
    grad_decay_mu = grad_gamma_M * f.eta_row
    change_alpha, change_mu = grad_decay_alpha * f.decay_alpha, grad_decay_mu * f.decay_mu  # (17)
    grad_log_alpha = torch.stack([change_alpha[token:, :token].sum() for token in range(1, C + 1)])
    grad_log_mu = torch.stack([change_mu[token:, :token].sum() for token in range(1, C + 1)])
    if f.lookahead:
        grad_k = grad_k + grad_p
    else:
        grad_log_alpha += (f.p * grad_p).sum(-1)
        grad_k = grad_k + x.log_alpha.exp().unsqueeze(-1) * grad_p
    grad_q = f.q_norm * (grad_q - f.q * (f.q * grad_q).sum(-1, keepdim=True))  # (18)
    grad_k = f.k_norm * (grad_k - f.k * (f.k * grad_k).sum(-1, keepdim=True))
    gates = [grad_log_alpha, grad_log_mu, grad_beta, grad_eta, grad_direct]
    return [grad_q, grad_k, grad_target, *gates, grad_S0, grad_M0]


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("zero_gates", [False, True])
def test_the_printed_equations_are_the_recurrence_and_its_gradient(zero_gates, general, lookahead):
    x = Chunk.random(zero_gates, general)
    tracked = Chunk(*(tensor.clone().requires_grad_() for tensor in x.tensors()))
    expected = recurrence(tracked, lookahead)
    forward = Forward(x, lookahead)
    for actual, result in zip((forward.O, forward.S, forward.M), expected):
        torch.testing.assert_close(actual, result.detach(), rtol=0, atol=1e-13)
    grads_in = [torch.randn_like(result) for result in expected]
    expected_grads = torch.autograd.grad(expected, tracked.tensors(), grads_in)
    actual_grads = backward(x, forward, *grads_in)
    for field, actual, expected_grad in zip(fields(Chunk), actual_grads, expected_grads):
        torch.testing.assert_close(
            actual, expected_grad, rtol=0, atol=1e-12, msg=lambda text, name=field.name: f"{name}: {text}"
        )


def test_the_row_recurrences_are_the_matrix_products():
    x = Chunk.random(zero_gates=True, general=True)
    f = Forward(x)
    gamma_M, gamma_S = torch.zeros_like(f.gamma_M), torch.zeros_like(f.gamma_S)
    gamma_M[0, 0] = 1
    for i in range(1, C + 1):
        gamma_M[i] = x.log_mu[i - 1].exp() * gamma_M[i - 1]
        gamma_M[i, i] += x.eta[i - 1]
        gamma_S[i] = x.log_alpha[i - 1].exp() * gamma_S[i - 1] + x.beta[i - 1] * gamma_M[i]  # (20)
        gamma_S[i, i] += x.direct[i - 1]
    torch.testing.assert_close(gamma_M, f.gamma_M, rtol=0, atol=1e-15)
    torch.testing.assert_close(gamma_S, f.gamma_S, rtol=0, atol=1e-15)


def step_on_key(alpha: Tensor, mu: Tensor, beta: Tensor, eta: Tensor, direct: Tensor, lookahead: bool) -> Tensor:
    """What one step does to (k^T S, k^T M) of a unit key: the recurrence, applied to both unit vectors. [..., 2, 2]"""
    zero, one = torch.zeros_like(alpha), torch.ones_like(alpha)
    columns = []
    for S, M in ((one, zero), (zero, one)):
        r = -(alpha * S - beta * mu * M if lookahead else alpha * S)
        new_M = mu * M - eta * r
        columns.append(torch.stack([alpha * S - beta * new_M + direct * r, new_M], -1))
    return torch.stack(columns, -1)


def test_traces_determinants_and_the_stability_conditions_of_one_step():  # (23), (24), (25)
    torch.manual_seed(0)
    alpha, mu, beta, eta, direct = torch.rand(5, 20000, dtype=torch.float64)
    beta, eta, direct = 2 * beta, 4 * eta, 2 * direct  # far outside of what the layer allows
    step = step_on_key(alpha, mu, beta, eta, direct, lookahead=False)
    trace, determinant = step.diagonal(dim1=-2, dim2=-1).sum(-1), torch.linalg.det(step)
    torch.testing.assert_close(trace, alpha * (1 - beta * eta - direct) + mu)
    torch.testing.assert_close(determinant, alpha * mu * (1 - direct))
    eigenvalues = torch.linalg.eigvals(step)
    in_disc = alpha * beta * eta <= (1 + mu) * (1 + alpha * (1 - direct))
    assert torch.equal(eigenvalues.abs().amax(-1) <= 1 + 1e-9, in_disc)
    in_right_half = (direct <= 1) & (trace >= 0)
    assert torch.equal(eigenvalues.real.amin(-1) >= -1e-9, in_right_half)
    for condition in (in_disc, in_right_half):
        assert 0 < condition.sum() < len(condition)

    step = step_on_key(alpha, mu, beta, eta, direct, lookahead=True)
    trace, determinant = step.diagonal(dim1=-2, dim2=-1).sum(-1), torch.linalg.det(step)
    torch.testing.assert_close(trace, alpha * (1 - beta * eta - direct) + mu * (1 - beta * eta))
    torch.testing.assert_close(determinant, alpha * mu * (1 - beta * eta - direct))
    eigenvalues = torch.linalg.eigvals(step)
    in_disc = mu * beta * eta <= (1 + mu) * (1 + alpha * (1 - beta * eta - direct))
    assert torch.equal(eigenvalues.abs().amax(-1) <= 1 + 1e-9, in_disc)
    in_right_half = beta * eta + direct <= 1
    assert torch.equal(eigenvalues.real.amin(-1) >= -1e-9, in_right_half)
    for condition in (in_disc, in_right_half):
        assert 0 < condition.sum() < len(condition)


def test_a_chunk_is_an_affine_map():  # (19)
    x = Chunk.random(zero_gates=False)
    f = Forward(x)
    solved = torch.linalg.solve(f.solve, torch.cat([x.v, f.abar[:-1] * f.p, f.b[:-1] * f.p], dim=1))
    U, Y, Z = solved.split([V, K, K], dim=1)
    Ks, Km, eye = f.write_S * f.k, f.write_M * f.k, torch.eye(K, dtype=torch.float64)
    A = torch.cat(
        [
            torch.cat([f.abar[-1] * eye - Ks.T @ Y, -f.b[-1] * eye + Ks.T @ Z], dim=1),
            torch.cat([Km.T @ Y, f.mbar[-1] * eye - Km.T @ Z], dim=1),
        ]
    )
    E = torch.cat([Ks.T @ U, -Km.T @ U])
    torch.testing.assert_close(A @ torch.cat([x.S0, x.M0]) + E, torch.cat([f.S, f.M]), rtol=0, atol=1e-13)


# ------------------------------------------------------------------ first-order rules with a decay per key dimension


@dataclass
class VectorChunk:
    """Inputs of one chunk of GLA (no p, no e), KDA (no e) or RWKV-7."""

    q: Tensor  # [C, K], as are k, p, e and log_alpha
    k: Tensor
    v: Tensor  # [C, V]
    log_alpha: Tensor
    S0: Tensor  # [K, V]
    p: Tensor | None
    e: Tensor | None

    @classmethod
    def random(cls, rule: str) -> "VectorChunk":
        torch.manual_seed(0)
        q, k, p, e, log_alpha = 0.5 * torch.randn(5, C, K, dtype=torch.float64)
        log_alpha = -log_alpha.abs()
        log_alpha[3, 1] = -torch.inf
        v, S0 = torch.randn(C, V, dtype=torch.float64), torch.randn(K, V, dtype=torch.float64)
        return cls(q, k, v, log_alpha, S0, None if rule == "gla" else p, e if rule == "rwkv7" else None)

    def tensors(self) -> dict[str, Tensor]:
        return {
            field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) is not None
        }


def vector_recurrence(x: VectorChunk) -> tuple[Tensor, Tensor]:  # (31)
    S, outputs = x.S0, []
    for t in range(C):
        decayed = x.log_alpha[t].exp().unsqueeze(-1) * S + torch.outer(x.k[t], x.v[t])
        if x.p is not None:
            decayed = decayed + torch.outer(-x.k[t] if x.e is None else x.e[t], S.T @ x.p[t])
        S = decayed
        outputs.append(S.T @ x.q[t])
    return torch.stack(outputs), S


def products_of(late: Tensor, early: Tensor, decays: Tensor) -> Tensor:
    """[C, C] from rows [C, K] and the decays between them [C, C, K]."""
    return torch.einsum("id,jd,ijd->ij", late, early, decays)


def vector_forward_and_backward(x: VectorChunk, grad_O: Tensor, grad_S: Tensor) -> tuple[Tensor, Tensor, dict]:
    """Equations (32) to (38) as printed: o, S' and the gradients by name."""
    alpha = x.log_alpha.exp()
    between = torch.stack([torch.stack([alpha[j:i].prod(0) for j in range(C + 1)]) for i in range(C + 1)])  # j+1 .. i
    between = between * torch.ones(C + 1, C + 1, dtype=torch.float64).tril().unsqueeze(-1)
    abar, to_end = between[:, 0], between[-1, 1:]
    q_decays, p_decays = between[1:, 1:], between[:-1, 1:]  # [P K]: up to alpha_{i-1}, nothing on the diagonal
    p = torch.zeros_like(x.k) if x.p is None else x.p
    e = torch.zeros_like(x.k) if x.e is None else x.e
    is_kda = x.p is not None and x.e is None
    qk, qe, pk, pe = (  # (32)
        products_of(late, early, decays) for late, decays in ((x.q, q_decays), (p, p_decays)) for early in (x.k, e)
    )
    q_bar, p_bar, k_bar, e_bar = abar[1:] * x.q, abar[:-1] * p, to_end * x.k, to_end * e
    eye = torch.eye(C, dtype=torch.float64)
    solve = eye + pk if is_kda else eye - pe  # (33)
    solved = torch.linalg.solve(solve, x.v - p_bar @ x.S0 if is_kda else pk @ x.v + p_bar @ x.S0)
    written, probed = (solved, torch.zeros_like(solved)) if is_kda else (x.v, solved)
    o = q_bar @ x.S0 + qk @ written + qe @ probed  # (34)
    S = abar[-1].unsqueeze(-1) * x.S0 + k_bar.T @ written + e_bar.T @ probed

    grad_solved = qk.T @ grad_O + k_bar @ grad_S if is_kda else qe.T @ grad_O + e_bar @ grad_S  # (35)
    grad_target, sign = torch.linalg.solve(solve.T, grad_solved), -1 if is_kda else 1
    grad_v = grad_target if is_kda else qk.T @ grad_O + k_bar @ grad_S + pk.T @ grad_target
    grad_S0 = abar[-1].unsqueeze(-1) * grad_S + q_bar.T @ grad_O + sign * p_bar.T @ grad_target
    grad_qk, grad_pk = grad_O @ written.T, sign * grad_target @ written.T  # (36)
    grad_qe, grad_pe = grad_O @ probed.T, grad_target @ probed.T
    grad_q_bar, grad_p_bar = grad_O @ x.S0.T, sign * grad_target @ x.S0.T
    grad_k_bar, grad_e_bar = written @ grad_S.T, probed @ grad_S.T

    def along_late(grad: Tensor, early: Tensor, decays: Tensor) -> Tensor:
        return torch.einsum("ij,jd,ijd->id", grad, early, decays)

    def along_early(grad: Tensor, late: Tensor, decays: Tensor) -> Tensor:
        return torch.einsum("ij,id,ijd->jd", grad, late, decays)

    grad_q = abar[1:] * grad_q_bar + along_late(grad_qk, x.k, q_decays) + along_late(grad_qe, e, q_decays)  # (37)
    grad_p = abar[:-1] * grad_p_bar + along_late(grad_pk, x.k, p_decays) + along_late(grad_pe, e, p_decays)
    grad_k = to_end * grad_k_bar + along_early(grad_qk, x.q, q_decays) + along_early(grad_pk, p, p_decays)
    grad_e = to_end * grad_e_bar + along_early(grad_qe, x.q, q_decays) + along_early(grad_pe, p, p_decays)
    grad_log_abar = x.q * grad_q - x.k * grad_k - e * grad_e  # (38)
    grad_log_abar[:-1] += (p * grad_p)[1:]
    grad_log_abar[-1] += abar[-1] * (x.S0 * grad_S).sum(-1) + (k_bar * grad_k_bar + e_bar * grad_e_bar).sum(0)
    grad_log_alpha = grad_log_abar.flip(0).cumsum(0).flip(0)
    gradients = {"q": grad_q, "k": grad_k, "v": grad_v, "log_alpha": grad_log_alpha, "S0": grad_S0}
    return o, S, gradients | {"p": grad_p, "e": grad_e}


@pytest.mark.parametrize("rule", ["gla", "kda", "rwkv7"])
def test_the_printed_equations_of_vector_decays_are_the_recurrence_and_its_gradient(rule):
    x = VectorChunk.random(rule)
    tracked = VectorChunk(
        **{"p": None, "e": None} | {name: y.clone().requires_grad_() for name, y in x.tensors().items()}
    )
    expected = vector_recurrence(tracked)
    grads_in = [torch.randn_like(result) for result in expected]
    expected_grads = torch.autograd.grad(expected, list(tracked.tensors().values()), grads_in)
    o, S, gradients = vector_forward_and_backward(x, *grads_in)
    for actual, result in zip((o, S), expected):
        torch.testing.assert_close(actual, result.detach(), rtol=0, atol=1e-13)
    for name, expected_grad in zip(tracked.tensors(), expected_grads):
        torch.testing.assert_close(
            gradients[name], expected_grad, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
