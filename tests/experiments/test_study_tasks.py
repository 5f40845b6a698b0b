"""The data of the studies against independent definitions."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from mdn.experiments.studies.groups import GROUPS, product_table, word_problem
from mdn.experiments.studies.noisy_recall import (
    AGREEING,
    BINDINGS,
    FIRST_VALUE,
    VOCAB_SIZE,
    generate_noisy_recall,
    sequence_length,
)
from mdn.experiments.studies.real_series import (
    as_differences,
    autoregression,
    chosen_order,
    iterated,
    level_errors,
    origins,
)
from mdn.experiments.studies.signals import (
    LIFETIMES,
    MODES,
    NOISE,
    PERIODS,
    SEEN,
    UNASKED,
    continued_sinusoid,
    resonator,
)
from mdn.ops.fused import IGNORE_INDEX


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_the_answer_of_noisy_recall_is_the_value_that_most_bindings_of_the_key_have():
    keys = 6
    inputs, labels = generate_noisy_recall(20, keys, seeded())
    assert inputs.shape == labels.shape == (20, sequence_length(keys))
    assert int(inputs.min()) >= 0
    assert int(inputs.max()) < VOCAB_SIZE
    for row, asked in zip(inputs.tolist(), labels.tolist()):
        bound = {}
        for key, value in zip(row[: 2 * keys * BINDINGS : 2], row[1 : 2 * keys * BINDINGS : 2]):
            assert 1 <= key < FIRST_VALUE <= value
            bound.setdefault(key, []).append(value)
        answers = {key: Counter(values).most_common(1)[0] for key, values in bound.items()}
        assert all(count == AGREEING and len(bound[key]) == BINDINGS for key, (_, count) in answers.items())
        questions = [(row[place], label) for place, label in enumerate(asked) if label != IGNORE_INDEX]
        assert dict(questions) == {key: value for key, (value, _) in answers.items()}


def test_the_majority_is_not_simply_the_latest_binding():
    inputs, labels = generate_noisy_recall(200, 4, seeded())
    latest = 0
    for row, asked in zip(inputs.tolist(), labels.tolist()):
        last = dict(zip(row[: 8 * BINDINGS : 2], row[1 : 8 * BINDINGS : 2]))
        latest += sum(last[row[place]] == label for place, label in enumerate(asked) if label != IGNORE_INDEX)
    assert latest / 800 == pytest.approx(AGREEING / BINDINGS, abs=0.06)


@pytest.mark.parametrize(("name", "order"), [("parity", 2), ("mod 5", 5), ("S3", 6), ("A5", 60)])
def test_a_product_table_is_that_of_the_group(name, order):
    """Permutation matrices multiply as the elements do."""
    elements = GROUPS[name]
    table = product_table(elements)
    assert table.shape == (order, order)
    assert table[0].tolist() == table[:, 0].tolist() == list(range(order))  # the identity comes first
    matrices = np.stack([np.eye(len(element), dtype=int)[list(element)] for element in elements])
    for i, j in itertools.islice(itertools.product(range(order), repeat=2), 400):
        assert np.array_equal(matrices[i] @ matrices[j], matrices[table[i, j]])


def test_only_A5_among_the_groups_is_perfect():
    """The commutators of A5 generate A5 itself, which is what makes it hard; those of the others do not."""
    for name, elements in GROUPS.items():
        table = product_table(elements)
        inverse = (table == 0).int().argmax(dim=1)
        n = len(elements)
        made = {int(table[table[i, j], table[inverse[i], inverse[j]]]) for i in range(n) for j in range(n)}
        while True:
            products = {int(table[i, j]) for i in made for j in made}
            if products <= made:
                break
            made |= products
        assert (len(made) == n) == (name == "A5"), name


def test_labels_of_a_word_are_the_products_of_its_beginnings():
    inputs, labels = word_problem(5, 12, product_table(GROUPS["mod 5"]), seeded())
    assert torch.equal(labels, inputs.cumsum(dim=1) % 5)
    elements = GROUPS["A5"]
    inputs, labels = word_problem(3, 9, product_table(elements), seeded())
    for row, asked in zip(inputs.tolist(), labels.tolist()):
        places = list(range(5))
        for token, label in zip(row, asked):
            places = [elements[token][place] for place in places]
            assert tuple(places) == elements[label]


def test_the_resonator_answers_every_impulse_with_its_two_modes():
    inputs, targets, weights = resonator(3, 60, seeded())
    lag = torch.arange(60)
    response = sum(mode.radius**lag * torch.cos(2 * math.pi * lag / mode.period) for mode in MODES)
    expected = torch.zeros(3, 60)
    for t in range(60):
        for s in range(t + 1):
            expected[:, t] += inputs[:, s, 0] * response[t - s]
    torch.testing.assert_close(targets, expected, atol=1e-5, rtol=1e-5)
    assert weights[:, :UNASKED].sum() == 0
    assert (weights[:, UNASKED:] == 1).all()


def test_a_sinusoid_is_shown_with_noise_and_asked_for_in_the_blanks():
    inputs, targets, weights = continued_sinusoid(200, 120, seeded())
    shown, blank = inputs[:, :SEEN, 0], inputs[:, :, 1]
    assert (shown - targets[:, :SEEN]).std().item() == pytest.approx(NOISE, rel=0.05)
    assert inputs[:, SEEN:, 0].abs().max() == 0
    assert torch.equal(weights, blank)
    assert torch.equal(blank, (torch.arange(120) >= SEEN).float().expand(200, -1))


def test_a_damped_sinusoid_obeys_its_second_order_recurrence():
    """x_t = a x_{t-1} + b x_{t-2}; the coefficients give back a period and a lifetime within their ranges."""
    _, targets, _ = continued_sinusoid(50, 200, seeded())
    for row in targets.double().numpy():
        past = np.stack([row[1:-1], row[:-2]], axis=1)
        (a, b), *_ = np.linalg.lstsq(past, row[2:], rcond=None)
        assert np.abs(past @ [a, b] - row[2:]).max() < 1e-5
        radius = math.sqrt(-b)
        period = 2 * math.pi / math.acos(a / (2 * radius))
        assert PERIODS[0] * 0.99 <= period <= PERIODS[1] * 1.01
        assert LIFETIMES[0] * 0.95 <= -1 / math.log(radius) <= LIFETIMES[1] * 1.1


def test_an_autoregression_finds_its_coefficients_again_and_continues_exactly():
    weights = np.array([1.6, -0.8])
    values = [1.0, 0.5]
    for _ in range(300):
        values.append(weights @ values[-1:-3:-1])
    series = np.array(values[:40])
    found = autoregression(series, 2)
    assert found == pytest.approx(weights, abs=1e-9)
    assert iterated(found, series[None], 10)[0] == pytest.approx(values[40:50], abs=1e-9)


def test_the_chosen_order_reaches_as_far_back_as_the_series_does():
    source = np.random.default_rng(0)
    values = list(source.standard_normal(8))
    for _ in range(600):
        values.append(0.9 * values[-8] + 0.3 * source.standard_normal())
    assert chosen_order(np.array(values)) >= 8


def test_differences_are_scaled_by_the_training_part_and_errors_are_those_of_levels():
    levels = np.concatenate([np.arange(0, 70) % 2, 100 * np.arange(31)]).astype(float)
    series = as_differences("steps", levels)
    assert series.split == 70
    assert series.training.std() == pytest.approx(1.0)
    places = origins(series, context=10, horizon=5, most=8)
    assert places.min() >= series.split
    assert places.max() + 5 <= len(series.differences)
    actual = np.array([[1.0, 2.0, 3.0]])
    assert level_errors(np.zeros((1, 3)), actual, 1) == 1.0
    assert level_errors(np.zeros((1, 3)), actual, 3) == 36.0


@pytest.mark.parametrize(("factor", "lowest", "turning_by_72_degrees"), [(1, -1e-4, 0.35), (2, -0.23, 0.69)])
def test_within_mdns_bounds_no_step_can_count_modulo_two_or_five(factor, lowest, turning_by_72_degrees):
    """The eigenvalues of a step along a unit key over all allowed gates, as docs/experiments/state-tracking.md says."""
    alpha_max = torch.linspace(0, 1, 81)
    shares = torch.linspace(0, 1, 21)
    mu = torch.linspace(-2, 0, 81).exp()
    eta = torch.linspace(0, 2, 21)
    bound, share, mu, eta = torch.meshgrid(alpha_max, shares, mu, eta, indexing="ij")
    for alpha, beta in ((bound, factor * share * (1 - bound)), (share * bound, factor * (1 - bound))):
        trace, determinant = alpha * (1 - beta * eta) + mu, alpha * mu
        root = (trace.square() / 4 - determinant).to(torch.complex64).sqrt()
        for eigenvalue in (trace / 2 + root, trace / 2 - root):
            assert eigenvalue.real.min() >= lowest
            turning = eigenvalue.angle().abs() >= 2 * torch.pi / 5 - 1e-4
            assert eigenvalue.abs()[turning & (eigenvalue.abs() > 1e-3)].max() <= turning_by_72_degrees
    assert 0.35**5 < 0.01
