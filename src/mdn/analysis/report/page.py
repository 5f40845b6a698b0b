"""The page itself: one HTML file with everything inside. It asks for nothing: a content policy forbids any request."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from html import escape
from importlib import resources

from mdn.analysis.report.chart import loss_charts
from mdn.analysis.report.collect import Found, ResultFile, TrainingRun
from mdn.analysis.report.tables import MAKERS, Table, merged, number, tables_of, title_of

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def asset(name: str) -> str:
    return resources.files("mdn.analysis.report").joinpath("assets", name).read_text(encoding="utf-8")


def build_page(found: Found, title: str, command: str, date: str) -> str:
    sections = [("Spectral explorer", asset("explorer.html"))]
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


def _anchor(name: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in name.lower())


def _result_sections(results: list[ResultFile]) -> Iterator[tuple[str, str]]:
    """A section per kind, in the order of the table of makers, then kinds it does not know."""
    kinds = {result.kind for result in results}
    hidden = {f"{kind} cell" for kind in ("ablation", "causality") if kind in kinds or f"{kind}s" in kinds}
    known = [kind for kind in MAKERS if kind in kinds and kind not in hidden]
    for kind in [*known, *sorted(kinds - set(MAKERS))]:
        files = [result for result in results if result.kind == kind]
        tables = merged([table for result in files for table in tables_of(kind, result.content)])
        commands = dict.fromkeys(result.content.get("command", "") for result in files)
        made = "".join(f"<p class='quiet'><code>{escape(text)}</code></p>" for text in commands if text)
        yield title_of(kind), made + "".join(map(_html, tables))


def _runs_table(runs: list[TrainingRun]) -> Table:
    rows = []
    for run in runs:
        summary = run.summary or {}
        held_out = summary.get("held_out") or (run.held_out[-1]["held_out"] if run.held_out else {})
        last = run.steps[-1] if run.steps else {}
        facts = (summary.get("parameters"), last.get("step"), last.get("tokens"), last.get("loss"))
        measures = (held_out.get("loss"), held_out.get("perplexity"), held_out.get("bits_per_byte"))
        done = "yes" if run.summary else "no"
        rows.append([run.name, summary.get("mixer", "–"), done, *map(number, facts), *map(number, measures)])
    header = ["run", "mixer", "finished", "parameters", "steps", "tokens", "last loss", "held-out loss", "perplexity"]
    return Table("Losses in nats per token", [*header, "bits per byte"], rows)


def _html(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in table.rows
    )
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    # A wide table scrolls by itself; with a tabindex the keyboard can scroll it too.
    label = escape(table.caption or "table", quote=True)
    inner = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{inner}</div>'


def _figure(path, command: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    name = f"{path.parent.name}/{path.name}"
    made = f" · <code>{escape(command)}</code>" if command else ""
    image = f'<img alt="figure {escape(name, quote=True)}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(name)}{made}</figcaption></figure>"
