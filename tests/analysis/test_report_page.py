"""The report page without a browser: what it holds, that it asks for nothing, and the explorer's own arithmetic.

The browser's part is test_report_browser.py (marked slow, needs Chromium).
"""

import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from mdn.analysis.eigenvalues import transition_matrix
from mdn.analysis.report.chart import loss_charts, round_ticks
from mdn.analysis.report.collect import TrainingRun
from mdn.analysis.report.page import asset, explorer
from mdn.cli import main
from mdn.ops import recurrent_momentum_delta_rule
from report_case import make_runs


class Elements(HTMLParser):
    """All elements with their attributes, the text, and whether tags close in order."""

    EMPTY = frozenset(("meta", "link", "input", "img", "br"))

    def __init__(self, page):
        super().__init__()
        self.found, self.open, self.text = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    out = folder / "page.html"
    assert main(["report", str(make_runs(folder)), "--out", str(out)]) == 0
    return out.read_text()


def test_the_page_holds_runs_results_and_figures_with_their_commands(page):
    elements = Elements(page)
    assert elements.open == []
    for words in ("runs/tiny", "momentum_deltanet", "12,345", "0.720", "unconstrained momentum", "mdn draw --a-line"):
        assert words in elements.text
    assert "mdn <spectra>" in elements.text  # escaped in the source, the same words for the reader
    assert "odd.json: not a result file" in elements.text
    assert "config.json" not in elements.text


def test_the_page_refers_to_nothing_outside_itself(page):
    for tag, attributes in Elements(page).found:
        for name in ("src", "href", "action", "data", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert "url(" not in page
    assert "@import" not in page
    assert not re.search(r"\b(fetch|XMLHttpRequest|import|WebSocket|sendBeacon)\s*\(", page)
    assert "default-src 'none'" in page


def test_every_control_has_a_label_and_every_link_a_target(page):
    found = Elements(page).found
    ids = [attributes["id"] for _, attributes in found if "id" in attributes]
    assert len(ids) == len(set(ids))
    labelled = {attributes.get("for") for tag, attributes in found if tag == "label"}
    controls = [attributes["id"] for tag, attributes in found if tag == "input"]
    assert sorted(controls) == ["alpha", "beta", "direct", "eta", "mu"]
    assert set(controls) <= labelled
    for tag, attributes in found:
        if tag == "a":
            assert attributes["href"].removeprefix("#") in ids
        if tag in ("svg", "img"):
            assert attributes.get("aria-label") or attributes.get("alt")
    for name in re.findall(r'byId\("([\w-]+)"\)', page):
        assert name in ids


# --------------------------------------------------------------------------------------------- the loss and the presets


def training_run(losses, gates=()):
    steps = [{"step": n, "loss": loss, "tokens": 1000 * (n + 1)} for n, loss in enumerate(losses)]
    return TrainingRun(name="runs/tiny", steps=steps, held_out=[], gates=list(gates), summary={})


def test_the_loss_curve_is_drawn_whole_on_round_ticks():
    chart = loss_charts([training_run([7.66, 7.5, *([3.0] * 300)])])
    for drawing in re.findall(r"<svg.*?</svg>", chart):
        curve = re.search(r'<path d="M([^"]*)" fill="none"', drawing)[1]
        heights = [float(point.split()[1]) for point in curve.split("L")]
        ticks = [
            (float(y), float(value))
            for y, value in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)</text>', drawing)
        ]
        (y0, low), (y1, high) = ticks[0], ticks[-1]
        found = low + (heights[0] + 4 - y0) * (high - low) / (y1 - y0)
        assert found == pytest.approx(7.66, abs=0.02)
        assert [value for _, value in ticks] == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(2.3, 5.6, [2, 3, 4, 5, 6]), (0, 358_000, [0, 100_000, 200_000, 300_000, 400_000])]
)
def test_ticks_are_round_numbers(low, high, expected):
    assert round_ticks(low, high, 4) == expected


def first_preset(runs):
    return [float(gate) for gate in re.search(r'data-gates="([^"]*)"', explorer(runs))[1].split(",")]


def test_the_explorer_opens_with_the_mean_gates_of_a_trained_model_or_of_a_fresh_layer():
    outside = {"layer": 0, "alpha": 0.9, "beta": 0.4, "mu": 0.9, "eta": 1.0}  # an ablation without bounds
    trained = {"layer": 0, "alpha": 0.4, "beta": 0.34, "mu": 0.87, "eta": 1.01}
    assert first_preset([training_run([1.0], [outside]), training_run([1.0], [trained])]) == [0.4, 0.34, 0.87, 1.01, 0]
    with_direct = trained | {"beta": 0.2, "direct": 0.14}
    assert first_preset([training_run([1.0], [with_direct])]) == [0.4, 0.2, 0.87, 1.01, 0.14]
    alpha, beta, mu, eta, direct = first_preset([training_run([1.0])])
    assert direct == 0
    assert alpha + beta <= 1
    assert mu >= math.exp(-2)
    assert 0 < eta < 2


# ------------------------------------------------------------------------------------- the explorer's own arithmetic


def explorer_functions():
    """The functions between the marks of explorer.js, as Python: plain arithmetic, so few words change."""
    source = re.search(r"// <maths>\n(.*?)// </maths>", asset("explorer.js"), re.DOTALL)[1]
    lines = []
    for line in source.splitlines():
        line = re.sub(r"^function (\w+\(.*\)) \{$", r"def \1:", line)
        line = re.sub(r"^(\s+)const ", r"\1", line)
        lines.append("" if line == "}" else line.rstrip(";"))
    text = "\n".join(lines).replace("Math.sqrt", "sqrt").replace("Math.max", "max")
    assert not re.search(r"[{}?]|Math|let |=>", text), text
    names = {"sqrt": math.sqrt, "max": max}
    exec(text, names)
    return names["pairEigenvalues"], names["stepWeight"]


def test_the_explorers_eigenvalues_are_those_of_the_full_transition():
    pair_eigenvalues, _ = explorer_functions()
    rng = np.random.default_rng(0)
    key = rng.normal(size=3)
    key /= np.linalg.norm(key)
    for _ in range(100):
        alpha, beta, mu = rng.uniform(0, 1, 3)
        eta, direct = rng.uniform(0, 2, 2)
        real1, imaginary1, real2, imaginary2 = pair_eigenvalues(alpha, beta, mu, eta, direct)
        expected = [alpha, alpha, mu, mu, complex(real1, imaginary1), complex(real2, imaginary2)]
        found = np.linalg.eigvals(transition_matrix(alpha, beta, mu, eta, key, direct))
        np.testing.assert_allclose(np.poly(found), np.poly(expected), atol=1e-12)


@pytest.mark.parametrize("feedback", [0, 1])
def test_the_explorers_response_is_the_float64_recurrence_after_one_write(feedback):
    _, step = explorer_functions()
    gates = (0.95, 0.4, 0.85, 1.3, 0.2)
    steps = 12
    first, second = torch.eye(2, dtype=torch.float64)
    keys = torch.stack([first] + [first if feedback else second] * (steps - 1)).view(1, steps, 1, 2)
    values = torch.zeros(1, steps, 1, 1, dtype=torch.float64)
    values[0, 0] = 1
    queries = first.expand(1, steps, 1, 2)
    alpha, beta, mu, eta, direct = (torch.full((1, steps, 1), gate, dtype=torch.float64) for gate in gates)
    expected, _ = recurrent_momentum_delta_rule(
        *(queries, keys, values, alpha.log(), mu.log(), None, beta, eta),
        scale=1.0,
        use_qk_l2norm_in_kernel=False,
        direct=direct,
    )
    weight = momentum = 0.0
    for t in range(steps):
        weight, momentum = step(weight, momentum, *gates, 1.0 if t == 0 else 0.0, feedback)
        assert weight == pytest.approx(expected[0, t, 0, 0].item(), abs=1e-12)


# --------------------------------------------------------------------------------------------------------- bad input


def test_bad_input_to_report_is_one_line_and_nothing_is_written(tmp_path, capsys):
    out = tmp_path / "page.html"
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ([str(tmp_path / "nowhere")], "no run folder"),
        ([str(tmp_path / "empty")], "nothing to report"),
    ):
        assert main(["report", *arguments, "--out", str(out)]) == 2
        assert message in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.txt")]) == 2
    assert "--out must be an .html file" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"kind": "spec', "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"kind": "mqar", "chosen": [{"a": 1}]}', "not a complete result of kind &#x27;mqar&#x27;"),
    ],
)
def test_a_bad_result_file_is_listed_and_does_not_stop_the_page(tmp_path, text, reason):
    runs = make_runs(tmp_path)
    (runs / "bad.json").write_text(text)
    (runs / "tiny" / "summary.json").write_text("{")  # nor does a torn summary: the run is listed as unused
    out = tmp_path / "page.html"
    assert main(["report", str(runs), "--out", str(out)]) == 0
    page = out.read_text()
    assert re.search(rf"bad\.json: [^<]*{reason}", page)
    assert "unconstrained momentum" in page
