"""`mdn eval` from the command line: several models side by side, the files it writes, and bad input in one line."""

import json
from operator import attrgetter

import pytest

from eval_support import make_model, make_tokenizer, write_data
from mdn.cli import main
from mdn.common.loading import load_model


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    for number, name in enumerate(("first", "second")):
        make_model(seed=number).save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    write_data(folder / "data")
    return folder


def command(place, *options):
    models = [str(place / "first"), str(place / "second")]
    return ["eval", *models, "--data", str(place / "data"), "--out", str(place / "out"), *options]


def shown_as(number: float) -> str:
    return f"{number:.2f}" if number < 1e5 else f"{number:.2e}"


def test_two_models_stand_side_by_side_and_files_say_the_same(place, capsys):
    files = ["--json", str(place / "r.json"), "--markdown", str(place / "r.md")]
    assert main(command(place, "--suite", "perplexity", "--limit", "2", "--max-length", "256", *files)) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[-2:]] == ["first", "second"]
    assert shown[-5].split() == ["Lamb.", "Wiki."]
    content = json.loads((place / "r.json").read_text())
    rows = {row["model"]: row["numbers"] for row in content["table"]["rows"]}
    assert rows["first"] != rows["second"]
    assert shown[-2].split()[1:] == [shown_as(number) for number in rows["first"]]
    assert f"| first | {shown_as(rows['first'][0])} |" in (place / "r.md").read_text()
    result = content["results"]["first"]["lambada_openai"]
    assert result["metrics"]["perplexity"] == rows["first"][0]
    assert (result["limit"], result["max_length"]) == (2, 256)
    assert len(list((place / "out").rglob("*.json"))) == 4


def test_a_packed_model_is_evaluated_like_its_dequantised_weights(place, capsys, tmp_path):
    options = ("--suite", "perplexity", "--limit", "1", "--max-length", "64", "--json", str(tmp_path / "r.json"))
    assert main(["quantize", str(place / "first"), str(place / "packed"), "--weights", "int4"]) == 0
    packed, plain = load_model(place / "packed"), make_model(seed=0)
    plain.load_state_dict({name: attrgetter(name)(packed) for name in plain.state_dict()})
    plain.save_pretrained(place / "plain")
    make_tokenizer().save_pretrained(place / "plain")
    models = [str(place / name) for name in ("packed", "plain", "first")]
    assert main(["eval", *models, "--data", str(place / "data"), "--out", str(tmp_path / "out"), *options]) == 0
    numbers = [row["numbers"] for row in json.loads((tmp_path / "r.json").read_text())["table"]["rows"]]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
    assert numbers[0] != pytest.approx(numbers[2], rel=1e-5)


def test_missing_tasks_are_an_error_or_a_dash(place, capsys):
    options = ("--suite", "retrieval", "--max-length", "256", "--limit", "1")
    assert main(command(place, *options)) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("mdn: error:")
    assert all(task in message for task in ("fda", "swde", "based_nq", "based_triviaqa"))
    assert main(command(place, *options, "--skip-missing")) == 0
    shown = capsys.readouterr().out
    assert "first: retrieval Avg. over 2 of 6 tasks" in shown
    assert shown.split("first ", 1)[1].split()[:2] == ["–", "–"]


@pytest.mark.parametrize("option", ["--data DATA", "--skip-missing", "--batch-size 8", "--seed 0", "--out OUT"])
def test_what_mqar_does_not_read_is_refused_with_it_alone(place, capsys, option):
    words = option.replace("DATA", str(place / "data")).replace("OUT", str(place / "out")).split()
    assert main(["eval", str(place / "first"), "--suite", "mqar", *words]) == 2
    assert f"{words[0]} has no effect on --suite mqar" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "give --suite or --tasks"),
        (("--suite", "perplexiti"), "expected some of perplexity, commonsense, retrieval, longbench, needle, mqar"),
        (("--tasks", "arc_eazy"), "did you mean arc_easy"),
        (("--tasks", "arc_easy", "--limit", "0"), "--limit must be at least 1, got 0"),
        (("--suite", "mqar", "--device", "cpu"), "--device cannot be combined with --suite mqar: whole test segments"),
        (("--suite", "mqar", "--dtype", "bfloat16"), "--dtype cannot be combined with --suite mqar"),
        (("--suite", "perplexity,mqar", "--limit", "2"), "--limit cannot be combined with --suite mqar"),
        (("--suite", "mqar", "--max-length", "64"), "--max-length cannot be combined with --suite mqar"),
        (("--suite", "mqar"), "--data has no effect on --suite mqar"),
        (("--suite", "perplexity", "--lengths", "1024"), "--lengths is for --suite needle, which is not asked for"),
        (("--suite", "perplexity", "--haystack", "stdlib"), "--haystack is for --suite needle"),
        (("--suite", "perplexity", "--plot", "map.png"), "--plot is for --suite needle"),
        (("--tasks", "arc_easy", "--recipe", "quick"), "--recipe is for --suite mqar"),
        (("--tasks", "arc_easy", "--data", "/nowhere"), "--data /nowhere is not a directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(place, capsys, options, words):
    assert main(command(place, *options)) == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]
