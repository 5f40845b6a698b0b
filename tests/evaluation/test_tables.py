"""Scoring by the retrieval protocol, the suites, and the layout of the tables."""

import json

import pytest

from mdn.evaluation.contains import contains, question_prompt, question_target, score_completion, score_question
from mdn.evaluation.jobs import jobs_of
from mdn.evaluation.local_data import find_local_file
from mdn.evaluation.suites import COMMONSENSE, LONGBENCH, PERPLEXITY, RETRIEVAL, Job, needle_suite
from mdn.evaluation.tables import as_json, as_markdown, as_text, columns_of_tasks, make_table


def test_contains_ignores_case_and_takes_any_answer():
    assert contains("It was PARIS, I think", ["Paris"]) == 1.0
    assert contains("It was Paris", ["London", "paris"]) == 1.0
    assert contains("It was Pari", ["Paris"]) == 0.0
    assert contains("1+1 (two)", ["(two)"]) == 1.0  # no regular expression


def test_completions_are_scored_by_their_value_alone():
    assert score_completion({"text": "t", "value": " Denver Broncos "}, ["the denver broncos won"]) == {"contains": 1.0}
    assert score_completion({"text": "t", "value": "Denver"}, ["the broncos won"]) == {"contains": 0.0}


@pytest.mark.parametrize(
    ("context", "question", "prompt"),
    [
        ("A dog ran.", "Who ran?", "A dog ran. Who ran?"),
        ("A dog ran. Who ran?", "Who ran?", "A dog ran. Who ran?"),
        ("A dog ran. WHO RAN?who ran?", "Who ran?", "A dog ran. Who ran?"),
        ("[PAR] A dog ran [DOC]", "Who ran?", "A dog ran. Who ran?"),
        ("A dog ran...", "Who ran?", "A dog ran. Who ran?"),
    ],
)
def test_the_question_follows_the_context_once(context, question, prompt):
    assert question_prompt({"context": context, "question": question}) == prompt


def test_questions_are_scored_by_any_answer():
    document = {"context": "", "question": "", "answers": ["four", "4"]}
    assert score_question(document, ["there were 4 of them"]) == {"contains": 1.0}
    assert score_question(document, ["there were 3 of them"]) == {"contains": 0.0}
    assert question_target(document) == " four"
    assert question_target({"answers": []}) == " unanswerable"


def results(suite, *numbers):
    found: dict = {}
    for column, number in zip(suite.columns, numbers):
        found.setdefault(column.job, {"metrics": {}})["metrics"][column.metric] = number
    return found


def test_the_commonsense_table_has_the_papers_columns_metrics_and_average():
    table = make_table([COMMONSENSE], {"one": results(COMMONSENSE, *[0.1 * n for n in range(8)])})
    assert table.titles == ["Hella.", "Lamb.", "ARCe", "ARCc", "PIQA", "Wino.", "BoolQ", "SciQ", "Avg."]
    assert table.metrics == ["acc_n ↑", "acc ↑", "acc ↑", "acc_n ↑", *["acc ↑"] * 5]
    assert table.numbers[0] == pytest.approx([0, 10, 20, 30, 40, 50, 60, 70, 35])
    assert table.notes == []


def test_perplexities_are_not_percentages():
    table = make_table([PERPLEXITY], {"one": results(PERPLEXITY, 54.36, 32.8)})
    assert table.numbers == [[54.36, 32.8]]
    assert table.metrics == ["ppl ↓", "ppl ↓"]


def test_retrieval_and_longbench_have_the_papers_columns():
    table = make_table([RETRIEVAL, LONGBENCH], {"one": {}})
    assert table.titles[:7] == ["FDA", "SWDE", "SQD.", "NQ", "TQA.", "Drop", "Avg."]
    assert table.titles[7:] == [
        *("LCC", "RBP", "GvR", "QMS", "MNs", "NQA", "QQA", "MFQ", "HQA", "2WM", "MUS", "TRC", "TQA", "SSM", "Avg.")
    ]
    assert list(dict.fromkeys(table.groups[7:-1])) == ["Code", "Summarization", "SingleQA", "MultiQA", "Few-shot"]
    assert {column.job.max_length for column in RETRIEVAL.columns} == {2048}
    assert {column.job.max_length for column in LONGBENCH.columns} == {16384}


def test_a_task_needed_by_two_suites_runs_once():
    jobs = jobs_of([PERPLEXITY, COMMONSENSE])
    assert [job.task for job in jobs].count("lambada_openai") == 1
    assert len(jobs) == 9


def test_the_needle_suite_has_six_tasks_at_every_length():
    suite = needle_suite()
    assert len(suite.columns) == 6 * 5
    assert [column.title for column in suite.columns[:5]] == ["1K", "2K", "4K", "8K", "16K"]
    assert suite.columns[0].job == Job("niah_single_1", 1024, needle_length=1024)


def test_a_missing_task_is_a_dash_and_the_average_says_what_it_is_over():
    found = results(COMMONSENSE, *[0.5] * 8)
    del found[COMMONSENSE.columns[0].job]
    table = make_table([COMMONSENSE], {"one": found})
    assert table.cells()[0][1] == "–"
    assert table.cells()[0][-1] == "50.00"
    assert table.notes == ["one: commonsense Avg. over 7 of 8 tasks"]


def test_the_text_table_is_aligned_with_models_side_by_side():
    both = {"mdn": results(PERPLEXITY, 54.36, 32.8), "a-longer-name": results(PERPLEXITY, 5.5, 1032.8)}
    lines = as_text(make_table([PERPLEXITY], both)).splitlines()
    assert lines == [
        "               Perplexity",
        "               Lamb.    Wiki.",
        "               ppl ↓    ppl ↓",
        "-----------------------------",
        "mdn            54.36    32.80",
        "a-longer-name   5.50  1032.80",
    ]


def test_the_markdown_table_has_a_row_per_model():
    lines = as_markdown(make_table([PERPLEXITY], {"mdn": results(PERPLEXITY, 54.36, 32.8)})).splitlines()
    assert lines == [
        "*Perplexity*",
        "",
        "| Model | Lamb.<br>ppl ↓ | Wiki.<br>ppl ↓ |",
        "| --- | ---: | ---: |",
        "| mdn | 54.36 | 32.80 |",
    ]


def test_the_json_table_keeps_the_numbers():
    content = json.loads(json.dumps(as_json(make_table([PERPLEXITY], {"mdn": results(PERPLEXITY, 54.36, 32.8)}))))
    assert content["rows"] == [{"model": "mdn", "numbers": [54.36, 32.8]}]
    assert content["columns"][1] == {"group": "Perplexity", "title": "Wiki.", "metric": "ppl ↓"}


def test_tasks_by_name_show_every_metric_as_it_is():
    job = Job("boolq")
    found = {"one": {job: {"metrics": {"acc": 0.25, "acc_stderr": 0.1, "f1": 0.5}}}}
    table = make_table([columns_of_tasks([job], found)], found)
    assert (table.groups, table.titles, table.numbers) == (["boolq", "boolq"], ["acc", "f1"], [[0.25, 0.5]])


def test_a_metric_the_task_does_not_have_is_an_error_that_names_those_it_has():
    found = {"one": {PERPLEXITY.columns[0].job: {"metrics": {"acc": 1.0}}}}
    with pytest.raises(ValueError, match=r"lambada_openai.*'perplexity'.*acc"):
        make_table([PERPLEXITY], found)


def test_local_files_are_found_by_the_tasks_name_or_a_known_one(tmp_path):
    (tmp_path / "lambada_test.jsonl").write_text("{}")
    assert find_local_file("lambada_openai", (tmp_path,)).path.name == "lambada_test.jsonl"
    (tmp_path / "lambada_openai.parquet").write_text("")
    assert find_local_file("lambada_openai", (tmp_path,)).path.name == "lambada_openai.parquet"
