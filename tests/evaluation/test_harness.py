"""Tasks through lm-evaluation-harness on local files: each request type equals a computation in plain torch, the batch
size changes nothing, and an interrupted job resumes."""

import copy
import json
import math
import re

import pytest
import torch

from eval_support import (
    ARC,
    COMPLETIONS,
    LAMBADA,
    PAGES,
    log_probabilities,
    make_model,
    make_tokenizer,
    score,
    write_data,
)
from mdn.evaluation.definitions import tasks_named
from mdn.evaluation.harness import Settings, Subject, TaskSource, evaluate, result_path
from mdn.evaluation.jobs import run_jobs
from mdn.evaluation.local_data import MissingData
from mdn.evaluation.suites import Job

MODELS = ["momentum_deltanet", "attention"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def subject(request, tmp_path_factory):
    model, tokenizer = make_model(request.param), make_tokenizer()
    source = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    return Subject(request.param, str(source), model, tokenizer)


def metrics(subject, data, out, task, batch_size=2, max_length=256, **options):
    job = Job(task, max_length)
    settings = Settings(out, (data,), batch_size=batch_size, **options)
    outcome = run_jobs([job], [subject], settings, say=lambda line: None)
    return outcome.results[subject.label][job]["metrics"]


def test_lambada_equals_a_perplexity_computed_directly(subject, data, tmp_path):
    expected = []
    for text in LAMBADA:
        context, _, last = text.rpartition(" ")
        expected.append(score(subject.model, context.encode(), f" {last}".encode()))
    found = metrics(subject, data, tmp_path, "lambada_openai")
    perplexity = math.exp(-sum(value for value, _ in expected) / len(expected))
    assert found["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert found["acc"] == sum(greedy for _, greedy in expected) / len(expected)


def test_multiple_choice_takes_the_likeliest_answer(subject, data, tmp_path):
    right, right_per_byte = 0, 0
    for row in ARC:
        context = f"Question: {row['question']}\nAnswer:".encode()
        answers = row["choices"]["text"]
        scores = [score(subject.model, context, f" {answer}".encode())[0] for answer in answers]
        gold = "ABCD".index(row["answerKey"])
        right += scores.index(max(scores)) == gold
        normed = [value / len(answer) for value, answer in zip(scores, answers)]
        right_per_byte += normed.index(max(normed)) == gold
    found = metrics(subject, data, tmp_path, "arc_easy")
    assert (found["acc"], found["acc_norm"]) == (right / len(ARC), right_per_byte / len(ARC))


def test_rolling_perplexity_counts_every_token_once_in_windows(subject, data, tmp_path):
    """Windows of 256: the first predicts from the end-of-text token, the next ones from one token of context."""
    nats, words = 0.0, 0
    for row in PAGES:
        page = row["page"]
        text = detokenised(page)
        ids = list(text.encode())
        for start in range(0, len(ids), 256):
            window = ids[start : start + 256]
            # the harness lets the last window begin earlier, so that it is full; only new tokens count
            first = max(0, start + len(window) - 256) if start else 0
            inputs = [256, *ids[: len(window) - 1]] if start == 0 else ids[first - 1 : start + len(window) - 1]
            found = log_probabilities(subject.model, inputs)[-len(window) :]
            nats -= found.gather(1, torch.tensor(window)[:, None]).sum().item()
        words += len(re.split(r"\s+", page))
    found = metrics(subject, data, tmp_path, "wikitext")
    assert found["word_perplexity"] == pytest.approx(math.exp(nats / words), rel=1e-3)


def test_the_first_window_begins_with_the_models_start_token(subject, data, tmp_path):
    """Not with the tokenizer's, where that is another one."""
    other = make_tokenizer()
    other.bos_token = "a"
    changed = Subject(subject.label, subject.source, subject.model, other)
    expected = metrics(subject, data, tmp_path / "same", "wikitext")
    assert metrics(changed, data, tmp_path / "other", "wikitext") == expected


def test_a_start_token_that_the_tokenizer_does_not_have_is_not_the_models(subject, data, tmp_path):
    """The authors' configs name id 1, which training has never used: a text begins with the tokenizer's."""
    model = copy.deepcopy(subject.model)
    model.config.bos_token_id = model.generation_config.bos_token_id = 1
    changed = Subject(subject.label, subject.source, model, subject.tokenizer)
    expected = metrics(subject, data, tmp_path / "same", "wikitext")
    assert metrics(changed, data, tmp_path / "other", "wikitext") == expected


def detokenised(page: str) -> str:
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    return wikitext_detokenizer({"page": page})


def test_generation_continues_greedily_and_stops_at_the_line_end(subject, data, tmp_path):
    expected = []
    for row in COMPLETIONS:
        ids = list(row["text"].strip().encode())
        prompt = len(ids)
        while len(ids) < prompt + 48 and (len(ids) == prompt or ids[-1] not in (10, 256)):
            ids.append(int(log_probabilities(subject.model, ids)[-1].argmax()))
        written = bytes(token for token in ids[prompt:] if token < 256).decode("utf-8", errors="replace")
        expected.append(row["value"].lower() in written.split("\n")[0].lower())
    found = metrics(subject, data, tmp_path, "squad_completion", max_length=512)
    assert found["contains"] == pytest.approx(sum(expected) / len(expected))


@pytest.mark.parametrize("task", ["lambada_openai", "arc_easy", "wikitext", "squad_completion"])
def test_the_batch_size_changes_no_score(subject, data, tmp_path, task):
    one = metrics(subject, data, tmp_path / "1", task, batch_size=1)
    eight = metrics(subject, data, tmp_path / "8", task, batch_size=8)
    assert one.keys() == eight.keys()
    for name in (name for name in one if not name.endswith("stderr")):
        assert one[name] == pytest.approx(eight[name], rel=1e-5)


def test_our_own_question_task_runs(subject, data, tmp_path):
    assert metrics(subject, data, tmp_path, "based_drop")["contains"] in (0.0, 1.0)


def test_a_result_says_where_it_comes_from_and_is_not_computed_twice(subject, data, tmp_path, monkeypatch):
    job, settings = Job("lambada_openai", 256), Settings(tmp_path, (data,), limit=2, seed=7)
    source = TaskSource((data,))
    path = result_path(subject, job, settings, source.local_file(job))
    task = source.load(job, subject.source)
    first = evaluate(subject, job, task, settings, path)
    assert first["model"]["sha256"] == subject.hash
    assert first["provenance"]["seed"] == 7
    assert first["provenance"]["versions"]["lm_eval"].startswith("0.4.")
    assert first["provenance"]["command"]
    assert (first["examples"], first["limit"]) == (2, 2)
    monkeypatch.setattr(subject.model, "forward", None)
    assert evaluate(subject, job, task, settings, path) == first == json.loads(path.read_text())


def test_other_settings_have_other_files_and_the_batch_size_the_same(subject, data, tmp_path):
    source = TaskSource((data,))
    job = Job("lambada_openai", 256)
    file = source.local_file(job)
    usual = result_path(subject, job, Settings(tmp_path, (data,)), file)
    assert result_path(subject, job, Settings(tmp_path, (data,), batch_size=1), file) == usual
    assert result_path(subject, job, Settings(tmp_path, (data,), limit=3), file) != usual
    assert result_path(subject, Job("lambada_openai", 128), Settings(tmp_path, (data,)), file) != usual


def test_an_interrupted_task_goes_on_from_the_answers_it_has(subject, data, tmp_path, monkeypatch):
    calls = []
    forward = subject.model.forward

    def counted(*args, **kwargs):
        calls.append(1)
        if interrupt and len(calls) > 2:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(subject.model, "forward", counted)
    interrupt = True
    with pytest.raises(KeyboardInterrupt):
        metrics(subject, data, tmp_path / "a", "lambada_openai", batch_size=1)
    interrupt = False
    calls.clear()
    resumed = metrics(subject, data, tmp_path / "a", "lambada_openai", batch_size=1)
    assert len(calls) == len(LAMBADA) - 2
    whole = metrics(subject, data, tmp_path / "b", "lambada_openai", batch_size=1)
    assert len(calls) == len(LAMBADA) - 2 + len(LAMBADA)
    assert resumed["perplexity"] == pytest.approx(whole["perplexity"], rel=1e-6)
    assert not list((tmp_path / "a").rglob("*.partial*"))


def test_missing_data_is_named_before_anything_runs_and_skipped_only_if_asked(subject, data, tmp_path, monkeypatch):
    jobs = [Job("lambada_openai", 256), Job("sciq", 256)]
    settings = Settings(tmp_path, (data,))
    with pytest.raises(MissingData, match=r"sciq: no sciq.jsonl in .*data"):
        run_jobs(jobs, [subject], settings)
    assert not list(tmp_path.rglob("*.json"))
    said = []
    outcome = run_jobs(jobs, [subject], settings, skip_missing=True, say=said.append)
    assert list(outcome.results[subject.label]) == jobs[:1]
    assert len(said) == 1
    assert "sciq" in said[0]


def test_a_group_or_a_tag_stands_for_its_tasks():
    assert tasks_named("boolq") == ["boolq"]
    assert set(tasks_named("ai2_arc")) == {"arc_easy", "arc_challenge"}
    humanities = tasks_named("mmlu_humanities")
    assert "mmlu_philosophy" in humanities
    assert set(humanities) < set(tasks_named("mmlu"))
    with pytest.raises(ValueError, match="unknown task 'no_such_thing'"):
        tasks_named("no_such_thing")


def test_an_unknown_task_is_named_with_the_nearest(subject, data, tmp_path):
    with pytest.raises(ValueError, match=r"unknown task 'lambada_opena'.*lambada_openai"):
        run_jobs([Job("lambada_opena")], [subject], Settings(tmp_path, (data,)))
