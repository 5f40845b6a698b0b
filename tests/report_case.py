"""A small set of run folders for the report page: one training run, one result, one figure, made by hand."""

import json

from mdn.analysis.spectra import spectra
from mdn.common.plots import figure, save_figure


def make_runs(folder):
    run = folder / "runs" / "tiny"
    run.mkdir(parents=True)
    lines = [{"step": n, "loss": 5.0 / n, "tokens": 100 * n, "grad_norm": 1.0} for n in range(1, 21)]
    held_out = {"loss": 0.5, "perplexity": 1.65, "bits_per_byte": 0.72}
    lines.append({"step": 20, "held_out": held_out})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"mixer": "momentum_deltanet", "parameters": 12345, "held_out": held_out}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    results = spectra(200, 0)
    (folder / "runs" / "spectra.json").write_text(
        json.dumps({"kind": "spectra", "command": "mdn <spectra>", **results})
    )
    (folder / "runs" / "odd.json").write_text('{"something": 1}')
    fig, axis = figure("a figure", "x", "y")
    axis.plot([0, 1], [0, 1])
    save_figure(fig, folder / "runs" / "line.png", "mdn draw --a-line")
    return folder / "runs"
