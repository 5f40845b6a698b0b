"""The figures of the docs are those of the recorded results beside them."""

import json
import re
from pathlib import Path

import pytest

from mdn.analysis import figures
from mdn.analysis.kinds import KINDS, tables_of
from mdn.common.results import read_results, write_results

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDED = sorted((ROOT / figures.DATA).glob("*.json"))


def words_of(svg):
    """All text of a drawing: titles, labels, ticks, legends and the command."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text(encoding="utf-8"))


def test_every_recorded_result_of_the_docs_gives_its_figure_again(tmp_path):
    data, kept = ROOT / figures.DATA, ROOT / figures.FIGURES
    assert figures.main(["--data", str(data), "--figures", str(tmp_path), "--pages", str(tmp_path)]) == 0
    names = sorted(path.stem for path in data.glob("*.json"))
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == names
    for name in names:
        assert (kept / f"{name}.png").is_file(), f"make figures was not run for {name}"
        assert words_of(tmp_path / f"{name}.svg") == words_of(kept / f"{name}.svg"), f"{name} is out of date"


def test_every_figure_that_the_experiment_pages_show_has_recorded_results():
    pages = [*(ROOT / "docs" / "experiments").glob("*.md"), ROOT / "docs" / "analysis.md"]
    for page in pages:
        for name in re.findall(r"\]\([./]*figures/([\w-]+)\.(?:png|svg)\)", page.read_text(encoding="utf-8")):
            assert (ROOT / figures.DATA / f"{name}.json").is_file(), f"{page} shows {name}"


@pytest.mark.parametrize("name", ["ablations", "causality", "dynamics", "efficiency", "mqar"])
def test_the_tables_of_a_page_are_those_of_the_recorded_results(name):
    page = (ROOT / figures.PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert figures.PLACE.search(page)
    assert figures.with_tables(page, ROOT / figures.DATA) == page, "make figures was not run"
    generated = re.sub(r"<!-- (?:table|study)[^>]*-->.*?<!-- end[^>]*-->", "", page, flags=re.DOTALL)
    assert "\n|" not in generated, "a table is written by hand"


@pytest.mark.parametrize("name", ["ablations", "causality", "dynamics", "efficiency", "mqar"])
def test_a_page_opens_with_its_answer_in_two_sentences(name):
    page = (ROOT / figures.PAGES / f"{name}.md").read_text(encoding="utf-8")
    heading, opening, *_ = re.sub(r"<!--[^>]*-->\n+", "", page).split("\n\n")
    assert heading.startswith("# ")
    assert len(re.findall(r"\.(?=\s|$)", opening)) == 2


def test_a_page_gets_all_tables_of_a_result_or_one_by_its_number(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table train -->\nold\n<!-- end -->\n<!-- table train 2 -->\n<!-- end -->\nafter\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.json").write_text((ROOT / figures.DATA / "train.json").read_text())
    folders = {"--data": tmp_path / "data", "--figures": tmp_path, "--pages": tmp_path}
    assert figures.main([str(word) for pair in folders.items() for word in pair]) == 0
    text = page.read_text()
    assert (text.count("tokens per second"), text.count("speed over MDN's")) == (1, 2)
    assert "old" not in text
    assert text.startswith("before\n")
    with pytest.raises(ValueError, match=r"table train 9.*3 tables"):
        figures.with_tables("<!-- table train 9 -->\n<!-- end -->\n", tmp_path / "data")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_recorded_result_says_its_kind_and_has_tables(path):
    content = read_results(path)
    assert content["kind"] in KINDS
    assert content["command"].startswith("mdn ")
    tables = tables_of(content)
    assert tables
    assert all(len(row) == len(table.header) for table in tables for row in table.rows)


def test_a_result_file_keeps_numbers_that_json_does_not_have(tmp_path):
    path = tmp_path / "r.json"
    write_results(path, "odd", {"largest": float("inf"), "least": float("-inf"), "unknown": float("nan")})
    assert json.loads(path.read_text())["largest"] == "inf"
    content = read_results(path, "odd")
    assert content["largest"] == float("inf")
    assert content["least"] == float("-inf")
    assert content["unknown"] != content["unknown"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "must hold a JSON object"),
        ('{"kind": "b"}', "kind must be 'a'"),
    ],
)
def test_what_is_not_a_result_file_is_refused_by_name(tmp_path, text, reason):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"r\.json .*{reason}"):
        read_results(path, "a")
