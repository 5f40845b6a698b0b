"""Spectra, products of steps and state norms, against NumPy, the full matrix and the float64 recurrence."""

import json
import math

import numpy as np
import pytest
import torch

from mdn.analysis.eigenvalues import (
    GateSample,
    inside_layer_bounds,
    pair_eigenvalues,
    quadrant_shares,
    sample_pair,
    sampled_regions,
    spectral_radius,
    transition_matrix,
)
from mdn.analysis.products import running_growth, window_growth
from mdn.analysis.recording import record_layer, record_model
from mdn.analysis.stability import analyse, guarantee, guarantee_end, initial_record
from mdn.analysis.state_norm import change_norms, summarise
from mdn.cli import main
from mdn.layers import MomentumDeltaNet
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.ops import recurrent_momentum_delta_rule

GATES = [(0.9, 0.3, 0.8, 1.5), (1.0, 1.0, 1.0, 2.0), (0.5, 0.9, 0.01, 1.9), (0.7, 0.2, 0.0, 1.0), (0.0, 0.5, 0.5, 1.0)]


def unit_key(size=5, seed=0):
    key = np.random.default_rng(seed).normal(size=size)
    return key / np.linalg.norm(key)


def small_model(mixer="momentum_deltanet", **fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 8, "expand_v": 2}
    return MomentumDeltaNetForCausalLM(MomentumDeltaNetConfig(mixer=mixer, **sizes, **fields)).eval()


@pytest.mark.parametrize("direct", [0.0, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("gates", GATES)
def test_the_closed_form_gives_numpys_eigenvalues_of_the_full_transition(gates, direct):
    alpha, beta, mu, eta = gates
    found = np.linalg.eigvals(transition_matrix(alpha, beta, mu, eta, unit_key(), direct))
    expected = [alpha] * 4 + [mu] * 4 + list(pair_eigenvalues(alpha, beta, mu, eta, direct))
    # Double eigenvalues (alpha = mu = 1) are only known to the square root of the machine precision.
    np.testing.assert_allclose(np.sort_complex(np.poly(found)), np.sort_complex(np.poly(expected)), atol=1e-9)


@pytest.mark.parametrize("direct", [0.0, 0.3])
@pytest.mark.parametrize("gates", GATES)
def test_the_transition_is_one_step_of_the_float64_recurrence_without_input(gates, direct):
    alpha, beta, mu, eta = (torch.tensor(x, dtype=torch.float64).view(1, 1, 1) for x in gates)
    key = torch.tensor(unit_key())
    state = torch.randn(2, 1, 1, 5, 3, dtype=torch.float64)
    zero = torch.zeros(1, 1, 1, 3, dtype=torch.float64)
    k = key.view(1, 1, 1, 5)
    _, after = recurrent_momentum_delta_rule(
        *(k, k, zero, alpha.log(), mu.log(), None, beta, eta), initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=False, direct=torch.full_like(beta, direct),
    )  # fmt: skip
    stacked = torch.cat([state[0, 0, 0], state[1, 0, 0]]).numpy()
    expected = transition_matrix(*gates, unit_key(), direct) @ stacked
    np.testing.assert_allclose(torch.cat([after[0, 0, 0], after[1, 0, 0]]).numpy(), expected, atol=1e-12)


def test_small_eigenvalues_keep_their_digits():
    # mu = 1e-14: computed as a difference of two numbers near 0.7, the small root would have no digit left.
    large, small = pair_eigenvalues(0.9, 0.2, 1e-14, 1.0)
    assert abs(small - 0.9e-14 / large) < 1e-28
    assert small.real == pytest.approx(1e-14 / 0.8, rel=1e-9)


def test_a_complex_pair_is_conjugate_and_its_square_modulus_is_alpha_times_mu():
    first, second = pair_eigenvalues(0.9, 0.5, 0.9, 1.2)
    assert first.imag > 0
    assert second == pytest.approx(np.conj(first))
    assert abs(first) ** 2 == pytest.approx(0.81)


def test_the_unit_disc_holds_exactly_when_alpha_beta_eta_is_small_enough():
    rng = np.random.default_rng(1)
    alpha, mu = rng.uniform(0, 1, (2, 3000))
    beta, eta = rng.uniform(0, 4, 3000), rng.uniform(0, 2, 3000)
    inside = np.abs(pair_eigenvalues(alpha, beta, mu, eta)).max(axis=-1) <= 1 + 1e-9
    condition = alpha * beta * eta <= (1 + alpha) * (1 + mu)
    assert (inside == condition).all()
    assert 0.05 < inside.mean() < 0.999


def test_the_layers_bounds_keep_the_right_half_plane_down_to_one_eighth_and_no_further():
    rng = np.random.default_rng(2)
    safe = inside_layer_bounds(rng, 20000, 0.125)
    assert sample_pair(safe).real.min() >= 0
    assert spectral_radius(safe).max() <= 1
    worst = pair_eigenvalues(0.25, 0.75, 0.124, 2.0)
    assert worst.real.min() < 0
    end = guarantee_end(guarantee(np.linspace(-2.2, -1.9, 301)))
    assert end["found by sweep"] == pytest.approx(-math.log(8), abs=2e-3)


def test_only_unconstrained_momentum_enters_the_left_half_plane_with_complex_values():
    shares = {}
    for name, gates in sampled_regions(4000).items():
        shares[name] = quadrant_shares(sample_pair(gates))
        assert sum(shares[name].values()) == pytest.approx(1)
        assert shares[name]["1st quadrant"] == shares[name]["4th quadrant"]
    assert shares["unconstrained momentum"]["2nd quadrant"] > 0.005
    for name in ("constrained momentum", "layer"):
        assert shares[name]["2nd quadrant"] == shares[name]["negative real"] == 0
        assert shares[name]["1st quadrant"] > 0.05
    assert shares["first order"]["1st quadrant"] == 0
    assert shares["quasi-hyperbolic"]["2nd quadrant"] == 0
    assert 0 < shares["quasi-hyperbolic"]["negative real"] < 0.05  # where more than 1 is written directly


def test_products_over_windows_have_the_norm_of_the_multiplied_matrices():
    rng = np.random.default_rng(3)
    gates = GateSample(*rng.uniform(0.2, 1.1, (5, 12, 2)))
    keys = rng.normal(size=(12, 2, 4))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    growth = window_growth(gates, keys, 6)
    assert growth.shape == (2, 2)
    for window in range(2):
        for head in range(2):
            product = np.eye(8)
            for t in range(6 * window, 6 * window + 6):
                step = gates.map(lambda x, t=t, head=head: x[t, head])
                product = (
                    transition_matrix(step.alpha, step.beta, step.mu, step.eta, keys[t, head], step.direct) @ product
                )
            assert growth[window, head] == pytest.approx(np.log10(np.linalg.norm(product, 2)), abs=1e-9)
    assert running_growth(gates, keys, 6)[0] == pytest.approx(growth[0])


def test_growth_beyond_float64_is_still_measured():
    steps = 900
    gates = GateSample.of_paper(*(np.full((steps, 1), value) for value in (1.0, 0.0, 3.0, 0.0)))
    keys = np.tile(unit_key(3), (steps, 1, 1))
    assert running_growth(gates, keys, 900)[-1, 0] == pytest.approx(steps * math.log10(3), rel=1e-9)


def test_without_the_bound_on_alpha_products_of_stable_steps_grow_and_with_it_they_do_not():
    free, full = (analyse(initial_record(name, 24, 512, 0), [64]) for name in ("alpha_max = 1", "full"))
    assert free["largest spectral radius"] <= 1 + 1e-9
    assert full["largest spectral radius"] <= 1 + 1e-9
    assert free["whole"]["largest log10 norm"] > 6
    assert full["whole"]["largest log10 norm"] < 2


@pytest.mark.parametrize("kind", ["quasi-hyperbolic", "Nesterov"])
def test_products_of_a_fresh_layer_with_a_direct_write_do_not_grow(kind):
    found = analyse(initial_record(kind, 24, 512, 0), [64])
    assert found["largest spectral radius"] <= 1 + 1e-9
    assert found["whole"]["largest log10 norm"] < 2


def test_recorded_gates_and_keys_are_those_of_the_layer():
    torch.manual_seed(1)
    layer = MomentumDeltaNet(32, 8, 2, num_v_heads=4, expand_v=1, layer_idx=0).eval()
    hidden = torch.randn(1, 7, 32)
    record = record_layer(layer, hidden)
    gates = layer.gates(hidden)
    np.testing.assert_allclose(record.gates.mu, gates.log_mu.exp()[0].detach().numpy(), rtol=1e-6)
    np.testing.assert_allclose(record.gates.beta, gates.beta[0].detach().numpy(), rtol=1e-6)
    assert not record.gates.direct.any()
    assert record.keys.shape == (7, 4, 8)
    np.testing.assert_allclose(np.linalg.norm(record.keys, axis=-1), 1, atol=1e-3)
    np.testing.assert_array_equal(record.keys[:, 0], record.keys[:, 1])
    assert not layer.rule._forward_hooks


def test_recording_a_model_without_mdn_layers_says_so():
    with pytest.raises(ValueError, match="no momentum_deltanet layer"):
        record_model(small_model("gated_deltanet"), torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("mixer", ["momentum_deltanet", "gated_deltanet", "comba", "mamba2"])
def test_change_norms_are_differences_of_states_after_prefills(mixer):
    model = small_model(mixer)
    ids = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(4))
    norms = change_norms(model, ids)
    assert sorted(norms) == [0, 1]
    with torch.no_grad():
        states = [
            model(input_ids=ids[:, :length], use_cache=True).past_key_values.layers[1].recurrent_states[0].clone()
            for length in (4, 5)
        ]
    expected = torch.linalg.matrix_norm(states[1] - states[0]).numpy()
    np.testing.assert_allclose(norms[1]["change"][3], expected, rtol=2e-3, atol=1e-6)
    np.testing.assert_allclose(norms[1]["norm"][3], torch.linalg.matrix_norm(states[1]).numpy(), rtol=2e-3, atol=1e-6)
    summary = summarise(norms)
    heads = states[0].shape[1]
    assert summary["n"] == 2 * 2 * heads
    assert summary["curve"][3] == pytest.approx(np.mean([norms[layer]["change"][3] for layer in (0, 1)]))


def test_a_model_without_a_matrix_state_is_refused():
    with pytest.raises(ValueError, match="no layer with a matrix state"):
        change_norms(small_model("attention"), torch.zeros(1, 3, dtype=torch.long))


def test_analyze_spectra_writes_figure_table_and_the_check_against_numpy(tmp_path, capsys):
    plot, results = tmp_path / "s.png", tmp_path / "s.json"
    assert main(["analyze", "spectra", "--points", "300", "--plot", str(plot), "--json", str(results)]) == 0
    assert "unconstrained momentum" in capsys.readouterr().out
    content = json.loads(results.read_text())
    assert content["kind"] == "spectra"
    assert content["closed form against numpy.linalg.eigvals"]["largest distance"] < 1e-6
    assert plot.stat().st_size > 5000
    assert plot.with_suffix(".svg").is_file()


def test_analyze_stability_takes_gate_ranges(tmp_path):
    results = tmp_path / "s.json"
    options = ["--heads", "4", "--steps", "64", "--windows", "1,16", "--json", str(results)]
    assert main(["analyze", "stability", "--alpha", "1,1", "--mu", "1,1", "--beta", "0.5,0.5", *options]) == 0
    (source,) = json.loads(results.read_text())["sources"].values()
    assert source["largest spectral radius"] == pytest.approx(1)
    assert source["windows"][1]["median log10 norm"] > source["windows"][0]["median log10 norm"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spectra", "--points", "0"], "--points must be at least 1"),
        (["spectra", "--model", "x"], "--model and --text belong together"),
        (["stability", "--alpha", "0.5,2"], "--alpha must satisfy"),
        (["stability", "--alpha", "half"], "--alpha must be two numbers"),
        (["stability", "--variants", "nothing"], "unknown names"),
        (["stability", "--windows", "4,x"], "--windows must be positive"),
        (["stability", "--windows", "99999999999"], "--windows must be positive whole numbers"),
        (
            ["stability", "--windows", "64", "--steps", "8", "--heads", "2"],
            "--windows must have one of at most 8 steps",
        ),
        (["stability", "--heads", "2000000000"], "--heads x --steps must be at most"),
        (["spectra", "--json", f"{__file__}/x.json"], "not a directory"),
        (["causality", "--tasks", "sums"], "--tasks must be among"),
        (["causality", "--blocks", "0"], "--blocks must be positive whole numbers"),
        (["causality", "--out", __file__], "--out must be a directory, got a file"),
        (["state-norm", "nowhere", "--text", "missing.txt"], "missing.txt is not a file"),
    ],
)
def test_bad_input_to_analyze_is_one_clear_line_and_exit_code_2(arguments, message, capsys):
    assert main(["analyze", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
