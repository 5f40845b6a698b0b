"""The stability-aware gates: the paper's formulas, every ablation, and the facts about eigenvalues they promise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mdn.layers import GateSettings, MomentumDeltaNet, StabilityGates

HEADS = 3


def random_inputs(heads=HEADS, value_heads=HEADS, scale=2.0, seed=0, tokens=40):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    projections = [normal(2, tokens, value_heads) for _ in range(4)]
    parameters = [normal(heads), normal(value_heads), normal(heads), normal(value_heads), normal(heads)]
    return projections, parameters


def paper_gates(projections, parameters, tau, min_log_mu):
    """Section 3.3 word by word, with the angle and its trigonometry."""
    a, b, m, e = projections
    A_log, dt_bias, Mu_log, mu_bias, log_factor = parameters
    eta = torch.tanh(e / tau) + 1
    theta = torch.atan(eta * log_factor.exp())
    log_alpha = torch.log(torch.cos(theta) ** 2) - A_log.exp() * torch.log1p((a + dt_bias).exp())
    log_mu = (-Mu_log.exp() * torch.log1p((m + mu_bias).exp())).clamp(min=min_log_mu)
    return log_alpha, log_mu, torch.sin(theta) ** 2 / (1 + (-b).exp()), eta


@pytest.mark.parametrize("tau", [1.0, 11.3])
def test_the_gates_are_those_of_the_paper(tau):
    projections, parameters = random_inputs()
    found = StabilityGates(GateSettings(tau=tau, min_log_mu=-2.0))(*projections, *parameters)
    for gate, expected in zip(found, paper_gates(projections, parameters, tau, -2.0)):
        torch.testing.assert_close(gate, expected)


def test_alpha_max_and_beta_max_add_up_to_one():
    projections, parameters = random_inputs()
    projections[0].fill_(-1e4)  # softplus 0: alpha at its bound
    projections[1].fill_(1e4)  # sigmoid 1: beta at its bound
    gates = StabilityGates(GateSettings(tau=1.0))(*projections, *parameters)
    torch.testing.assert_close(gates.log_alpha.exp() + gates.beta, torch.ones_like(gates.beta))


def test_value_heads_of_one_group_share_the_parameters_of_their_key_head():
    projections, parameters = random_inputs(heads=2, value_heads=6)
    per_key_head = [0, 2, 4]
    repeated = [x.repeat_interleave(3) if i in per_key_head else x for i, x in enumerate(parameters)]
    gates = StabilityGates(GateSettings(tau=1.0))
    for found, expected in zip(gates(*projections, *parameters), gates(*projections, *repeated)):
        torch.testing.assert_close(found, expected)


def test_each_ablation_changes_its_own_gate_only():
    projections, parameters = random_inputs()
    full = StabilityGates(GateSettings(tau=1.0))(*projections, *parameters)
    a, b, _, e = projections
    open_alpha = StabilityGates(GateSettings(tau=1.0, bound_alpha=False))(*projections, *parameters)
    torch.testing.assert_close(
        open_alpha.log_alpha, -parameters[0].exp() * torch.nn.functional.softplus(a + parameters[1])
    )
    assert open_alpha.beta.equal(full.beta)
    open_beta = StabilityGates(GateSettings(tau=1.0, bound_beta=False))(*projections, *parameters)
    torch.testing.assert_close(open_beta.beta, torch.sigmoid(b))
    assert open_beta.log_alpha.equal(full.log_alpha)
    sigmoid = StabilityGates(GateSettings(tau=1.0, eta_activation="sigmoid"))(*projections, *parameters)
    torch.testing.assert_close(sigmoid.eta, 2 * torch.sigmoid(e))
    unclamped = StabilityGates(GateSettings(tau=1.0, min_log_mu=None))(*projections, *parameters)
    assert unclamped.log_mu.min() < -2 <= full.log_mu.min()
    torch.testing.assert_close(unclamped.log_mu.clamp_min(-2), full.log_mu)
    doubled = StabilityGates(GateSettings(tau=1.0, allow_neg_eigval=True))(*projections, *parameters)
    torch.testing.assert_close(doubled.beta, 2 * full.beta)


def test_without_momentum_mu_is_exactly_zero():
    (a, b, _, e), (A_log, dt_bias, _, _, log_factor) = random_inputs()
    gates = StabilityGates(GateSettings(tau=1.0))(a, b, None, e, A_log, dt_bias, None, None, log_factor)
    assert (gates.log_mu == -math.inf).all()
    assert gates.log_mu.exp().abs().max() == 0


def test_the_layer_uses_the_released_temperature():
    assert MomentumDeltaNet(hidden_size=64, head_dim=8, num_heads=2, tau_factor=8).gate_map.settings.tau == math.sqrt(8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eta_activation": "relu"}, "eta_activation"),
        ({"min_log_mu": 0.5}, "min_log_mu"),
        ({"min_log_mu": math.nan}, "min_log_mu"),
        ({"tau": 0.0}, "tau"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        GateSettings(**{"tau": 1.0, **fields})


# ------------------------------------------------------------------------------------------------ stability (section 4)


def step_matrix(alpha, mu, beta, eta, key, direct=0):
    """What one step does to (S, M) as a matrix on [S; M], built from the recurrence itself with values zero."""
    size = key.shape[0]
    identity = torch.eye(size, dtype=key.dtype)
    error_from_state = -alpha * torch.outer(key, key)  # k r^T with r = -(alpha k)^T S
    momentum_from_state = -eta * error_from_state  # M' = mu M - eta k r^T
    top_left = alpha * identity - beta * momentum_from_state + direct * error_from_state
    top = torch.cat([top_left, -beta * mu * identity], dim=1)
    return torch.cat([top, torch.cat([momentum_from_state, mu * identity], dim=1)])


def layer_gates(seed: int, min_log_mu: float | None, momentum: str):
    torch.manual_seed(seed)
    layer = MomentumDeltaNet(hidden_size=16, head_dim=4, num_heads=4, min_log_mu=min_log_mu, momentum=momentum).double()
    with torch.no_grad():
        return layer.gates(3 * torch.randn(1, 6, 16, dtype=torch.float64))


# The least log mu that keeps the trace of a step positive: 1/8, and (sqrt(2) - 1) / 2 for Nesterov's step.
LEAST_LOG_MU = {"heavy_ball": -math.log(8), "quasi_hyperbolic": -math.log(8), "nesterov": math.log((2**0.5 - 1) / 2)}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clamp=st.sampled_from([-1.0, -2.0, -math.log(8), None]),
    momentum=st.sampled_from(sorted(LEAST_LOG_MU)),
)
def test_all_eigenvalues_of_a_step_lie_in_the_unit_disc_and_in_the_right_half_plane_above_the_clamp(
    seed, clamp, momentum
):
    gates = layer_gates(seed, clamp, momentum)
    key = torch.nn.functional.normalize(
        torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), dim=0
    )
    direct = torch.zeros_like(gates.beta) if gates.direct is None else gates.direct
    log_alpha, log_mu, beta, eta, direct = (gate.reshape(-1) for gate in (*gates[:4], direct))
    for i in range(log_alpha.numel()):
        step = step_matrix(log_alpha[i].exp(), log_mu[i].exp(), beta[i], eta[i], key, direct[i])
        eigenvalues = torch.linalg.eigvals(step)
        assert eigenvalues.abs().max() <= 1 + 1e-9
        if log_mu[i] >= LEAST_LOG_MU[momentum] and direct[i] <= 1:
            assert eigenvalues.real.min() >= -1e-9


@pytest.mark.parametrize(("mu", "sign"), [(0.12, -1), (0.13, 1)])
def test_the_right_half_plane_ends_exactly_at_mu_of_one_eighth(mu, sign):
    """The worst gates that the bounds allow: eta = 2 and tan^2 theta = 3, so alpha = 1/4 and beta = 3/4."""
    alpha, beta, eta = (torch.tensor(x, dtype=torch.float64) for x in (0.25, 0.75, 2.0))
    key = torch.tensor([1.0, 0.0], dtype=torch.float64)
    eigenvalues = torch.linalg.eigvals(step_matrix(alpha, torch.tensor(mu, dtype=torch.float64), beta, eta, key))
    assert eigenvalues.real.min() * sign > 0
