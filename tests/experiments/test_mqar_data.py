"""The MQAR generator keeps zoology's rules, and the rewriting variant asks for the later value."""

import numpy as np
import pytest
import torch
from scipy import stats

from mdn.experiments.mqar_data import IGNORE_INDEX, generate

VOCAB = 512


def make(number=64, length=64, pairs=8, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return generate(number, length, pairs, vocab_size=VOCAB, generator=generator, **options)


def bindings_of(row: list[int], pairs: int, times: int = 1) -> dict[int, int]:
    """The value each key has at the end of the context, read from the tokens alone."""
    return {row[2 * i]: row[2 * i + 1] for i in range(times * pairs)}


@pytest.mark.parametrize("rewriting", [False, True])
def test_keys_and_values_are_distinct_and_from_their_halves_of_the_vocabulary(rewriting):
    examples = make(rewriting=rewriting)
    for row in examples.inputs.tolist():
        keys, values = row[0:16:2], row[1:16:2]
        assert len(set(keys)) == 8
        assert len(set(values)) == 8
        assert all(1 <= key < VOCAB // 2 for key in keys)
        assert all(VOCAB // 2 <= value < VOCAB for value in values)


def test_every_key_is_asked_once_after_the_pairs_at_the_first_position_of_a_slot():
    examples = make()
    for row, labels in zip(examples.inputs.tolist(), examples.labels.tolist()):
        asked = [place for place, label in enumerate(labels) if label != IGNORE_INDEX]
        assert len(asked) == 8
        assert all(place >= 16 and place % 2 == 0 for place in asked)
        assert sorted(row[place] for place in asked) == sorted(row[0:16:2])


def test_the_label_of_a_query_is_the_value_bound_to_its_key_and_stands_nowhere_else():
    examples = make()
    for row, labels in zip(examples.inputs.tolist(), examples.labels.tolist()):
        bound = bindings_of(row, 8)
        for place, label in enumerate(labels):
            if label != IGNORE_INDEX:
                assert label == bound[row[place]]
    assert (examples.labels != IGNORE_INDEX).sum() == 64 * 8


def test_queries_and_answers_say_the_same_as_the_labels():
    examples = make()
    assert torch.equal(examples.labels.gather(1, examples.queries), examples.answers)


def test_rewriting_binds_every_key_twice_and_asks_for_the_later_value():
    examples = make(length=64, pairs=8, rewriting=True)
    moved = 0
    for row, labels in zip(examples.inputs.tolist(), examples.labels.tolist()):
        stale, bound = bindings_of(row, 8), bindings_of(row, 8, times=2)
        assert sorted(row[0:16:2]) == sorted(row[16:32:2])
        assert not set(stale.values()) & set(bound.values())
        moved += row[0:16:2] != row[16:32:2]
        for place, label in enumerate(labels):
            if label != IGNORE_INDEX:
                assert place >= 32
                assert label == bound[row[place]] != stale[row[place]]
    assert moved > 60  # another order, save for rare chance


def test_slots_of_the_first_and_second_query_follow_the_power_law():
    """Chi-square against probabilities written down here: the first draw is proportional to slot^(a - 1), the second
    to the same weights among the slots that are left."""
    slots, number = 24, 20_000
    examples = make(number=number, length=2 * 4 + 2 * slots, pairs=4, power=0.01)
    weights = np.array([(slot + 1) ** (0.01 - 1) for slot in range(slots)])
    first = weights / weights.sum()
    second = np.array([sum(first[i] * first[j] / (1 - first[i]) for i in range(slots) if i != j) for j in range(slots)])
    drawn = (examples.queries.numpy() - 8) // 2
    for query, expected in ((0, first), (1, second)):
        seen = np.bincount(drawn[:, query], minlength=slots)
        assert stats.chisquare(seen, expected * number).pvalue > 1e-3
    uniform = stats.chisquare(np.bincount(drawn[:, 0], minlength=slots))
    assert uniform.pvalue < 1e-9  # the check can tell the distributions apart


def test_everything_else_is_a_uniform_random_token():
    examples = make(number=2000, length=64, pairs=4)
    free = torch.ones_like(examples.inputs, dtype=torch.bool)
    free[:, :8] = False
    free.scatter_(1, examples.queries, False)
    seen = torch.bincount(examples.inputs[free], minlength=VOCAB).numpy()
    assert stats.chisquare(seen).pvalue > 1e-3


def test_the_same_seed_gives_the_same_examples_and_another_seed_others():
    assert torch.equal(make(seed=1).inputs, make(seed=1).inputs)
    assert not torch.equal(make(seed=1).inputs, make(seed=2).inputs)


@pytest.mark.parametrize(
    ("length", "pairs", "rewriting", "words"),
    [
        (63, 4, False, "length must be even"),
        (64, 17, False, "at least 68"),
        (64, 11, True, "at least 66"),
        (64, 0, False, "pairs must be at least 1"),
        (4096, 256, False, "vocab_size"),
    ],
)
def test_impossible_shapes_are_refused_with_the_argument_named(length, pairs, rewriting, words):
    with pytest.raises(ValueError, match=words):
        make(length=length, pairs=pairs, rewriting=rewriting)
