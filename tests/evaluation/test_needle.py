"""The needle generator: lengths, depths, answers; a tiny model; RULER's tasks on a text of one's own."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eval_support import make_model, make_tokenizer
from mdn.cli import main
from mdn.evaluation.harness import Settings, Subject, TaskSource
from mdn.evaluation.jobs import run_jobs
from mdn.evaluation.needle import (
    NEEDLE,
    documentation_sentences,
    documentation_text,
    find_needles_in_text,
    make_example,
    sentences,
    shortest_length,
)
from mdn.evaluation.ruler import adapted_ruler
from mdn.evaluation.suites import Job
from mdn.experiments.tiny_needle import NeedleSettings, Words, find_needles, make_batch


def words_in(text: str) -> int:
    return len(text.split())


def make(length=100, depth=0.5, seed=0, **options):
    return make_example(length, depth, words_in, random.Random(seed), **options)


@pytest.mark.parametrize("haystack", ["noise", "documentation"])
@pytest.mark.parametrize("length", [40, 100, 500])
def test_a_text_fills_its_length_up_to_one_sentence(haystack, length):
    example = make(length, haystack=haystack)
    total = words_in(f"{example.prompt} {example.answer}")
    assert length - 30 < total <= length


def test_the_answer_stands_in_the_needle_of_the_asked_key():
    for seed in range(20):
        example = make(seed=seed, keys=4)
        asked = example.prompt.rsplit("number for ", 1)[1].removesuffix(" is:")
        assert NEEDLE.format(key=asked, value=example.answer) in example.prompt
        assert example.prompt.count("One of the special magic numbers for") == 4
        for question, answer in example.others:
            other = question.split("number for ")[1].removesuffix(" is:")
            assert other != asked
            assert NEEDLE.format(key=other, value=answer) in example.prompt


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_the_needle_stands_at_its_depth(depth):
    example = make(2000, depth)
    body = example.prompt.split("following text. ")[1].rsplit(" The special", 1)[0]
    before = body.index("One of the special") / (len(body) - len(NEEDLE))
    assert before == pytest.approx(depth, abs=0.02)


def test_bad_requests_name_the_argument():
    with pytest.raises(ValueError, match="length=10 leaves no room"):
        make(10)
    with pytest.raises(ValueError, match="depth must be in"):
        make(depth=1.5)
    with pytest.raises(ValueError, match="haystack must be one of"):
        make(haystack="essays")
    with pytest.raises(ValueError, match="keys must be in"):
        make(keys=0)


def test_the_documentation_is_prose():
    found = documentation_sentences()
    assert len(found) > 500
    assert all(sentence[0].isupper() and sentence[-1] in ".!?" for sentence in found)
    assert len(set(found)) == len(found)
    assert sentences("One. Two! Three?") == ["One.", "Two!", "Three?"]


def test_labels_are_the_answers_at_the_end_of_every_question():
    words = Words()
    example = make_example(100, 0.5, words.count, random.Random(0), keys=3)
    inputs, labels = make_batch(words, [example], with_others=True)
    names = {number: token for token, number in words.ids.items()}
    answers = [example.answer, *(answer for _, answer in example.others)]
    places = (labels[0] != -100).nonzero().flatten().tolist()
    assert [names[labels[0, place].item()] for place in places] == answers
    assert [names[inputs[0, place].item()] for place in places] == [":"] * 3
    assert [names[inputs[0, place + 1].item()] for place in places[:-1]] == answers[:-1]
    assert places[-1] == inputs.shape[1] - 1


def test_no_word_of_the_noise_is_unknown():
    words = Words()
    example = make_example(1000, 0.5, words.count, random.Random(1), keys=8)
    assert 1 not in words.encode(example.prompt)


def test_scores_are_the_share_found_by_length_and_depth():
    """A stand-in that answers with the first number of the text: right where the asked needle comes first."""
    words = NeedleSettings().vocabulary()
    sign = words.ids["numbers"]

    def first_number(inputs, logits_to_keep):
        logits = torch.zeros(len(inputs), 1, len(words))
        for row, ids in enumerate(inputs.tolist()):
            needle = ids.index(sign, ids.index(sign) + 1)  # the instruction has the word, too
            logits[row, 0, ids[needle + 5]] = 1.0  # numbers for KEY is : VALUE
        return SimpleNamespace(logits=logits)

    one = NeedleSettings(test_lengths=(64, 96), depths=(0.0, 1.0), examples=12, keys=1)
    assert find_needles(first_number, one).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    four = replace(one, keys=4, test_lengths=(128,), examples=40)
    at_the_beginning, at_the_end = find_needles(first_number, four)[:, 0]
    assert at_the_beginning == 1.0
    assert at_the_end == 0.0


def test_the_command_trains_a_tiny_model_and_draws_the_map(tmp_path, capsys):
    options = ["--steps", "3", "--lengths", "64,96", "--depths", "2", "--examples", "2", "--keys", "1"]
    assert main(["needle", *options, "--out", str(tmp_path), "--json", str(tmp_path / "r.json")]) == 0
    assert "momentum_deltanet: found at 64:" in capsys.readouterr().out
    assert (tmp_path / "needle.png").is_file()
    assert (tmp_path / "r.json").read_text() == (tmp_path / "results.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "a"], "--lengths must be positive whole numbers"),
        (["--lengths", "20"], "--lengths: 4 needles, the instruction and the question need"),
        (["--keys", "30"], "the shortest training text has 96"),
        (["--keys", "100"], "keys must be in 1..64"),
        (["--out", __file__], "--out must be a directory, got a file"),
        (["--mixers", "mdn"], "--mixers mdn is unknown"),
        (["--learning-rate", "nan"], "--learning-rate must be above 0 and finite"),
        (
            ["--model", "m", "--mixers", "gla"],
            "--mixers is for tiny models that are trained here; it cannot be combined",
        ),
        (["--model", "m", "--steps", "500"], "--steps is for tiny models"),
        (["--model", "m", "--learning-rate", "5e-3"], "--learning-rate is for tiny models"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_trained(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("mdn.experiments.tiny_needle.train_finder", lambda *_: pytest.fail("trained"))
    assert main(["needle", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_the_shortest_length_has_room_for_its_needles():
    for keys in (1, 4, 8):
        make(shortest_length(words_in, keys), keys=keys)


def test_a_language_model_is_asked_in_text():
    found = find_needles_in_text(
        make_model(), make_tokenizer(), (300,), (0.0, 1.0), examples=1, haystack="noise", keys=1, new_tokens=2
    )
    assert found.shape == (2, 1)
    assert set(found.flatten().tolist()) <= {0.0, 1.0}


def test_the_seed_of_the_command_is_that_of_the_texts(tmp_path, monkeypatch):
    asked, model, tokenizer = [], make_model(), make_tokenizer()
    monkeypatch.setattr("mdn.common.loading.load", lambda *_: (model, tokenizer))
    monkeypatch.setattr(type(model), "generate", lambda _, ids, **__: asked.append(tokenizer.decode(ids[0])) or ids)
    options = ["--lengths", "400", "--keys", "1", "--depths", "1", "--examples", "1", "--out", str(tmp_path)]
    for seed in ("1", "1", "2"):
        assert main(["needle", "--model", "m", *options, "--seed", seed]) == 0
    assert asked[0] == asked[1] != asked[2]


def test_rulers_tasks_run_on_a_text_of_ones_own(tmp_path):
    model, tokenizer = make_model(), make_tokenizer()
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    subject = Subject("tiny", str(tmp_path / "m"), model, tokenizer)
    jobs = [Job("niah_multikey_1", 2048, 2048)]
    settings = Settings(tmp_path / "out", limit=2, haystack="one")
    first = run_jobs(jobs, [subject], settings, haystack=documentation_text()).results["tiny"][jobs[0]]
    assert 0.0 <= first["metrics"]["2048"] <= 1.0
    assert first["examples"] == 2
    own = "A sentence of my own. " * 100
    with adapted_ruler(own, limit=2):
        task = TaskSource().load(jobs[0], subject.source)
    assert all("A sentence of" in row["input"] and len(row["outputs"]) == 1 for row in task.dataset["test"])
    assert len(task.dataset["test"]) == 2
