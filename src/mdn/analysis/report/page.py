"""The page itself: one HTML file with everything inside. It loads nothing: a content policy forbids every request."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from html import escape
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from mdn.analysis.kinds import KINDS, number
from mdn.analysis.report.chart import loss_charts
from mdn.analysis.report.collect import Found, ResultFile, TrainingRun
from mdn.analysis.stability import initial_record
from mdn.common.results import Table

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class Preset(NamedTuple):
    """Gates that a button of the explorer sets."""

    label: str
    alpha: float
    beta: float
    mu: float
    eta: float
    direct: float = 0.0


# Inside the layer's bounds (alpha + beta <= 1, mu >= exp(-2)) except where the label says otherwise.
PRESETS = (
    Preset("oscillating", 0.85, 0.15, 0.95, 1.5),
    Preset("oscillating, half of it direct", 0.85, 0.075, 0.95, 1.5, 0.1125),
    Preset("oscillating, Nesterov's", 0.85, 0.133, 0.95, 1.5, 0.21),
    Preset("no momentum", 0.55, 0.45, 0, 1),
    Preset("edge of the guarantee", 0.25, 0.75, 0.125, 2),
    Preset("outside the bounds", 0.9, 1, 0.1, 2),
)
MOST_LAYERS = 4


def asset(name: str) -> str:
    return resources.files("mdn.analysis.report").joinpath("assets", name).read_text(encoding="utf-8")


def build_page(found: Found, title: str, command: str, date: str) -> str:
    sections = [("Spectral explorer", explorer(found.runs))]
    if found.runs:
        sections.append(("Training", loss_charts(found.runs) + _html(_runs_table(found.runs))))
    sections += list(_result_sections(found.results))
    if found.figures:
        sections.append(("Figures", "".join(_figure(*entry) for entry in found.figures)))
    if found.unused:
        unused = "".join(f"<li>{escape(line)}</li>" for line in found.unused)
        sections.append(("Files that were not used", f'<ul class="quiet">{unused}</ul>'))
    links = "".join(f'<li><a href="#{_anchor(name)}">{escape(name)}</a></li>' for name, _ in sections)
    body = "".join(
        f'<section aria-labelledby="{_anchor(name)}"><h2 id="{_anchor(name)}">{escape(name)}</h2>{content}</section>'
        for name, content in sections
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{asset("page.css")}</style>
</head>
<body>
<a class="skip" href="#{_anchor(sections[0][0])}">to the content</a>
<header><h1>{escape(title)}</h1>
<p class="quiet">{escape(date)} · made with <code>{escape(command)}</code></p>
<button type="button" id="theme" aria-pressed="false">light / dark</button></header>
<nav aria-label="sections"><ul>{links}</ul></nav>
<main>{body}</main>
<footer><p>This page is one file and loads nothing.</p></footer>
<script>
{asset("explorer.js")}</script>
</body>
</html>
"""


def explorer(runs: list[TrainingRun]) -> str:
    """The explorer with its presets. It opens with the first: mean gates of a trained layer, else of a fresh one."""
    presets = [*_trained_presets(runs), _fresh_preset(), *PRESETS]
    buttons = ""
    for preset in presets:
        gates = ",".join(f"{gate:g}" for gate in preset[1:])
        buttons += f'<button type="button" data-gates="{gates}">{escape(preset.label)}</button>'
    return asset("explorer.html").replace("<!-- presets -->", buttons)


def _trained_presets(runs: list[TrainingRun]) -> list[Preset]:
    """Mean gates of the layers of the first run that recorded some and has the layer's bounds (an ablation may not)."""
    for run in runs:
        if run.gates and all(layer["alpha"] + layer["beta"] <= 1 for layer in run.gates):
            name = run.name.rsplit("/", 1)[-1]
            return [
                Preset(
                    f"{name}, layer {layer['layer']:g}",
                    *(round(layer.get(gate, 0.0), 3) for gate in Preset._fields[1:]),
                )
                for layer in run.gates[:MOST_LAYERS]
            ]
    return []


def _fresh_preset() -> Preset:
    """Mean gates of a layer at its initial values. The bounds are convex: means of gates inside them are inside."""
    gates = initial_record("full", heads=64, steps=32, seed=0).gates
    return Preset("fresh layer", *(round(float(x.mean()), 3) for x in (gates.alpha, gates.beta, gates.mu, gates.eta)))


def _anchor(name: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in name.lower())


def _result_sections(results: list[ResultFile]) -> Iterator[tuple[str, str]]:
    """A section per kind, in the order of the known kinds, then unknown ones."""
    kinds = {result.kind for result in results}
    for kind in [*(kind for kind in KINDS if kind in kinds), *sorted(kinds - set(KINDS))]:
        files = [result for result in results if result.kind == kind]
        commands = dict.fromkeys(result.command for result in files)
        made = "".join(f"<p class='quiet'><code>{escape(text)}</code></p>" for text in commands if text)
        title = KINDS[kind].title if kind in KINDS else kind.capitalize()
        yield title, made + "".join(_html(table) for result in files for table in result.tables)


def _runs_table(runs: list[TrainingRun]) -> Table:
    rows = []
    for run in runs:
        held_out = run.summary.get("held_out") or (run.held_out[-1]["held_out"] if run.held_out else {})
        last = run.steps[-1] if run.steps else {}
        facts = (run.summary.get("parameters"), last.get("step"), last.get("tokens"), last.get("loss"))
        measures = (held_out.get("loss"), held_out.get("perplexity"), held_out.get("bits_per_byte"))
        done = "yes" if run.summary else "no"
        rows.append([run.name, run.summary.get("mixer", "–"), done, *map(number, facts), *map(number, measures)])
    header = ["run", "mixer", "finished", "parameters", "steps", "tokens", "last loss", "held-out loss", "perplexity"]
    return Table("Losses in nats per token", [*header, "bits per byte"], rows)


def _html(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0]).replace("_", "_<wbr>")}</th>{"".join(map(_cell, row[1:]))}</tr>'
        for row in table.rows
    )
    caption = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
    # A wide table scrolls by itself; with a tabindex the keyboard can scroll it too.
    label = escape(table.caption or "table", quote=True)
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'{caption}<div class="scroll" tabindex="0" role="region" aria-label="{label}">{inner}</div>'


def _cell(text: str) -> str:
    """Numbers and short words stay on one line."""
    return f"<td>{escape(text)}</td>" if len(text) > 20 else f'<td class="short">{escape(text)}</td>'


def _figure(path: Path, command: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    name = f"{path.parent.name}/{path.name}"
    made = f" · <code>{escape(command)}</code>" if command else ""
    image = f'<img alt="figure {escape(name, quote=True)}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(name)}{made}</figcaption></figure>"
