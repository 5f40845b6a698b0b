"""Result files as tables: a caption, a header and rows of text. A function per kind; others list their numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Content = dict[str, Any]


@dataclass(frozen=True)
class Table:
    caption: str
    header: list[str]
    rows: list[list[str]]


def number(value: Any, digits: int = 3) -> str:
    """A number for people; words (nan, inf) and missing values as they are."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.{digits}g}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.{digits}f}"


def _spectra(content: Content) -> list[Table]:
    entries = {**content["regions"], **{f"layer {e['layer']} of the model": e for e in content["layers"]}}
    shares = [name for name in next(iter(entries.values())) if "real" in name or "quadrant" in name]
    shares = [name for name in shares if name != "smallest real part"]
    rows = [[name, *(f"{entry[share]:.1%}" for share in shares)] for name, entry in entries.items()]
    return [Table("Share of the eigenvalues of single steps in each region", ["gates", *shares], rows)]


def _stability(content: Content) -> list[Table]:
    rows = []
    for name, entry in content["sources"].items():
        whole, last = entry["whole"], entry["windows"][-1]
        numbers = (entry["largest spectral radius"], last["99 % log10 norm"], whole["largest log10 norm"])
        rows.append([name, *map(number, numbers), f"{whole['share above float32']:.1%}"])
    window = next(iter(content["sources"].values()))["windows"][-1]["window"]
    header = ["gates", "largest radius of a step", f"99 % log10 norm over {window} steps", "largest log10 norm"]
    return [Table("Single steps and products of steps", [*header, "heads beyond float32"], rows)]


def _state_norm(content: Content) -> list[Table]:
    rows = [
        [name, entry["mixer"], number(entry["mean change"]), number(entry["steps"]), f"{entry['n']} ({entry['n is']})"]
        for name, entry in content["models"].items()
    ]
    return [
        Table(
            f"Mean change of S per decoding step, on {content['text']}",
            ["model", "mixer", "change", "steps", "n"],
            rows,
        )
    ]


def _causality(content: Content) -> list[Table]:
    rows = []
    for result in content["results"]:
        cell = result["cell"]
        for name, trained in result["as trained"].items():
            values = (trained, result["stepwise"][name], result["stepwise"][name] - trained)
            rows.append([cell["task"], name, str(cell["block_size"]), str(cell["seed"]), *map(number, values)])
    header = ["task", "test", "block", "seed", "as trained", "decoded stepwise", "mismatch"]
    return [Table("Trained with blocks, decoded token by token", header, rows)]


def _ablations(content: Content) -> list[Table]:
    def steps(values: list[Any]) -> str:
        return ", ".join("no" if value is None else f"step {value}" for value in values) or "not run"

    rows = []
    for entry in content["rows"]:
        bits = entry["bits per byte"]
        mean = f"{number(sum(bits) / len(bits))} ({number(min(bits))} to {number(max(bits))})" if bits else "–"
        exact, paper = steps(entry["diverged at"]), steps(entry["diverged at, paper's arithmetic"])
        growth = number(entry["largest log10 growth"], 1)
        rows.append([entry["row"], entry["paper reports"], exact, mean, paper, growth, entry["verdict"]])
    header = [
        "row",
        "paper, 400M",
        "diverged, exact form",
        "bits per byte",
        "diverged, log-domain form",
        "log10 growth",
    ]
    return [Table(f"{content['cells']} of {content['of']} runs", [*header, "verdict"], rows)]


def _decode(content: Content) -> list[Table]:
    tables = []
    contexts = sorted({row["context"] for row in content["rows"]})
    for batch in sorted({row["batch"] for row in content["rows"]}):
        rows = []
        for mixer in content["parameters"]:
            mine = {r["context"]: r for r in content["rows"] if r["mixer"] == mixer and r["batch"] == batch}
            cells = [f"{1e3 * mine[c]['seconds']:.2f} ({number(mine[c]['ratio to MDN'], 2)})" for c in contexts]
            rows.append([mixer, *cells, f"{mine[contexts[-1]]['bytes per sequence'] / 2**20:.2f}"])
        header = ["mixer", *(f"{c:,}" for c in contexts), f"MiB per sequence at {contexts[-1]:,}"]
        tables.append(Table(f"Batch {batch}: ms per decoding step (ratio to MDN) by context", header, rows))
    return tables


def _mqar(content: Content) -> list[Table]:
    segments = list(content["chosen"][0]["accuracy"]) if content["chosen"] else []
    rows = []
    for row in content["chosen"]:
        cells = [f"{100 * row['mean'][s]:.1f} ± {100 * row['spread'][s]:.1f}" for s in segments]
        rows.append([row["mixer"], str(row["hidden_size"]), number(row["learning_rate"]), *cells])
    header = ["mixer", "d", "learning rate", *segments]
    return [Table(f"{content['recipe'].get('name', '')}: accuracy in %, by length:pairs", header, rows)]


def _evaluation(content: Content) -> list[Table]:
    table = content["table"]
    header = ["model", *(f"{column['title']} {column['metric']}".strip() for column in table["columns"])]
    rows = [[row["model"], *(number(value, 2) for value in row["numbers"])] for row in table["rows"]]
    return [Table("; ".join(table.get("notes") or ["Evaluations"]), header, rows)]


def _ablation_cell(content: Content) -> list[Table]:
    bits = (content.get("held_out") or {}).get("bits_per_byte")
    diverged = "no" if content["diverged"] is None else f"step {content['diverged']}"
    row = [content["row"], str(content["seed"]), content["arithmetic"], diverged, number(bits)]
    return [Table("Finished runs", ["row", "seed", "arithmetic", "diverged", "bits per byte"], [row])]


def _causality_cell(content: Content) -> list[Table]:
    return _causality({"results": [content]})


def _benchmark(content: Content) -> list[Table]:
    """Rows of numbers and words with the same names, as benchmarks write them."""
    names = [name for name, value in content["rows"][0].items() if isinstance(value, int | float | str)]
    rows = [[number(row.get(name)) for name in names] for row in content["rows"]]
    return [Table("", [name.replace("_", " ") for name in names], rows)]


def _anything(content: Content) -> list[Table]:
    """The numbers and words of the two uppermost levels."""
    rows = []
    for name, value in content.items():
        if isinstance(value, dict):
            rows += [[f"{name}: {key}", number(v)] for key, v in value.items() if isinstance(v, int | float | str)]
        elif isinstance(value, int | float | str) and name not in ("kind", "command"):
            rows.append([name, number(value)])
    return [Table("", ["what", "value"], rows)] if rows else []


MAKERS: dict[str, tuple[str, Callable[[Content], list[Table]]]] = {
    "evaluation": ("Evaluations", _evaluation),
    "mqar": ("Associative recall", _mqar),
    "decode": ("Efficiency: decoding", _decode),
    "benchmark": ("Efficiency: benchmarks", _benchmark),
    "ablations": ("Ablations", _ablations),
    "ablation cell": ("Ablation runs", _ablation_cell),
    "causality": ("Causality: blockwise against stepwise", _causality),
    "causality cell": ("Causality runs", _causality_cell),
    "state-norm": ("Change of the fast weight", _state_norm),
    "spectra": ("Spectra", _spectra),
    "stability": ("Stability", _stability),
}
"""kind: (title of its section, maker of its tables); the sections' order"""


def title_of(kind: str) -> str:
    return MAKERS[kind][0] if kind in MAKERS else kind.capitalize()


def tables_of(kind: str, content: Content) -> list[Table]:
    try:
        return (MAKERS[kind][1] if kind in MAKERS else _anything)(content)
    except (KeyError, IndexError, TypeError, StopIteration) as error:
        raise ValueError(f"a result of kind {kind!r} lacks {error}: made by another version?") from None


def merged(tables: list[Table]) -> list[Table]:
    """Tables with the same caption and header become one (single runs of a grid)."""
    together: dict[tuple[str, ...], Table] = {}
    for table in tables:
        key = (table.caption, *table.header)
        rows = together[key].rows if key in together else []
        together[key] = Table(table.caption, table.header, [*rows, *table.rows])
    return list(together.values())
