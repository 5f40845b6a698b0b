"""The tables and the figure of docs/serving.md, from a record of `mdn bench serve --json FILE`.

    python -m mdn.bench.serving_page benchmarks/results/serve.json docs/serving.md

rewrites the text between `<!-- table serve -->` and `<!-- end -->` in the page, and draws figures/serving.png.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mdn.bench.serving import REFERENCE, draw, tables
from mdn.common.results import fill_page, read_results

FIGURE = "figures/serving.png"


def fill(page: str, content: dict[str, Any]) -> str:
    """The page with its tables taken from the record."""
    speed, latency, memory = map(str, tables(content))
    figure = f"![Throughput, latency and memory against batch size and context]({FIGURE})"
    return fill_page(page, {"serve": "\n\n".join([conditions(content), figure, speed, latency, memory, flat(content)])})


def conditions(content: dict[str, Any]) -> str:
    """What the figures were measured on, in one paragraph."""
    size, machine, parameters = content["size"], content["machine"], content["parameters"]
    lines = [
        f"{size['layers']} layers, hidden size {size['hidden_size']}, {min(parameters.values()):,} to "
        f"{max(parameters.values()):,} parameters,",
        f"prompts of {size['prompt']} and answers of {size['answer']} tokens, float32, vLLM {content['vllm']},",
        f"{machine['threads']} threads of {machine['processor']},",
        f"least time of {content['rounds']} rounds, load {machine['load_before']:.1f} before "
        "(`benchmarks/results/serve.json`):",
    ]
    return "\n".join(lines)


def flat(content: dict[str, Any]) -> str:
    """Whether MDN's memory depends on the context."""
    rows = [row for row in content["memory"] if row["model"] == REFERENCE]
    sizes = sorted({row["bytes per sequence"] for row in rows})
    contexts = sorted(row["context"] for row in rows)
    between = f"between {contexts[0]:,} and {contexts[-1]:,} tokens of context"
    if len(sizes) == 1:
        return f"The memory of a sequence of MDN is the same {between}."
    return f"The memory of a sequence of MDN is {sizes[0]:,} to {sizes[-1]:,} bytes {between}."


if __name__ == "__main__":
    from mdn.common.plots import save_figure

    record_file, page_file = map(Path, sys.argv[1:])
    record = read_results(record_file, "serve")
    page_file.write_text(fill(page_file.read_text(), record))
    save_figure(draw(record), page_file.parent / FIGURE, record["command"])
