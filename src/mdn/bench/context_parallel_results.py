"""Costs of context parallelism by formula, and the tables and the figure of `mdn bench context-parallel`.

    python -m mdn.bench.context_parallel_results docs/experiments/data/context_parallel.json docs/distributed.md

rewrites the text between `<!-- table NAME -->` and `<!-- end -->` in the page.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from mdn.bench.context_parallel import MATRICES
from mdn.common.plots import COLOURS, doubling_axis, figure, plain_log_axis
from mdn.common.results import Table, fill_page, markdown_table, read_results
from mdn.models.info import load_config
from mdn.parallel.volume import STATE_BYTES, layer_volume
from mdn.training.build import meta_model

LINK = 50e9
"""bytes per second of one 400 Gb/s link"""
DEVICE = 400e12
"""floating-point operations per second of a device, for the time of a layer's own work"""
CONFIGS = ("mdn_400M", "mdn_1.3B", "mdn_h_3to1_400M")
TOKENS = (2**17, 2**20)
RANKS = (8, 16, 64)
CHUNK = 64


# ---------------------------------------------------------------------------------------------------------- operations


def rule_products(matrices: int, key_dim: int, columns: int, outputs: bool = True) -> float:
    """Multiply-adds of a rule per token and head, for states of ``matrices`` x K rows and some columns.

    Chunks read the states for the errors and for the outputs and write them, 3 x matrices x K x columns; inside a
    chunk the triangular products P K^T, Q K^T, the solve and attend R take C / 2 each. Without outputs a third falls
    away: the reads and products of q.
    """
    passes, halves = (3, 2) if outputs else (2, 1)
    return passes * matrices * key_dim * columns + halves * CHUNK / 2 * (key_dim + columns)


def summary_share(matrices: int, key_dim: int, value_dim: int, training: bool) -> float:
    """The summary of a range over its forward pass: E has V columns, A has one per row of the state.

    For a backward pass the second call also keeps the outputs' response to the incoming state.
    """
    E = rule_products(matrices, key_dim, value_dim, outputs=False)
    A = rule_products(matrices, key_dim, matrices * key_dim, outputs=training)
    return (E + A) / rule_products(matrices, key_dim, value_dim)


class RecurrentBlock(NamedTuple):
    """The first block of a config."""

    config: str
    mixer: Any
    heads: int
    key_dim: int
    value_dim: int
    mixer_parameters: int
    """multiply-adds per token outside the rule, as are the parameters"""
    parameters: int

    @classmethod
    def of(cls, config: str) -> RecurrentBlock:
        block: Any = meta_model(load_config(config)).model.layers[0]
        numbers = [sum(p.numel() for p in part.parameters()) for part in (block.attn, block)]
        return cls(config, block.attn, *block.attn.state_shapes()["S"].shape, *numbers)

    def rule(self, outputs: bool = True) -> float:
        """Multiply-adds of the rule per token, all heads."""
        return self.heads * rule_products(2, self.key_dim, self.value_dim, outputs)

    def shares(self, training: bool) -> list[float]:
        """The summary over a forward pass of the rule, of the mixer and of the block."""
        share, rule = summary_share(2, self.key_dim, self.value_dim, training), self.rule()
        return [share * rule / (others + rule) for others in (0, self.mixer_parameters, self.parameters)]


def shares_by_formula() -> list[dict[str, Any]]:
    """What the summary adds to a forward pass of the rule, of the mixer and of the block."""
    blocks = [RecurrentBlock.of(config) for config in CONFIGS]
    return [
        {
            "config": block.config,
            "K": block.key_dim,
            "V": block.value_dim,
            "forward": block.shares(training=False),
            "training": block.shares(training=True),
        }
        for block in blocks
    ]


# --------------------------------------------------------------------------------------------------------------- bytes


def by_formula() -> list[dict[str, Any]]:
    """Bytes that a rank receives in one recurrent layer's forward pass, in bfloat16 with float32 states: by our
    exchange, by passing states on from rank to rank, and by Ulysses, which trades tokens for heads and back."""
    rows = []
    for block in map(RecurrentBlock.of, CONFIGS):
        mixer, heads = block.mixer, block.heads
        for tokens in TOKENS:
            for ranks in RANKS:
                share = tokens // ranks
                per_token = 2 * (2 * mixer.key_dim + 2 * mixer.value_dim) + 4 * STATE_BYTES * heads  # q, k, v, o; gates
                rows.append(
                    {
                        "config": block.config,
                        "heads": heads,
                        "tokens": tokens,
                        "ranks": ranks,
                        "summaries": layer_volume(mixer, share, ranks, activation_bytes=2).forward,
                        "ring": 2 * STATE_BYTES * heads * block.key_dim * block.value_dim,
                        "ring_waiting_seconds": 2 * block.rule(outputs=False) * share * (ranks - 1) / DEVICE,
                        "ulysses": share * per_token * (ranks - 1) // ranks,
                        "layer_seconds": 2 * (block.parameters + block.rule()) * share / DEVICE,
                        "summary_share": block.shares(training=False)[-1],
                    }
                )
    return rows


def attention_by_formula() -> list[dict[str, Any]]:
    """The attention layers of a hybrid: bytes of all keys and values, which every rank gathers."""
    model: Any = meta_model(load_config("mdn_h_3to1_400M"))
    mixer = next(block.attn for block in model.model.layers if block.attn.cache_type == "full_attention")
    return [
        {"tokens": tokens, "ranks": ranks, "bytes": layer_volume(mixer, tokens // ranks, ranks, "zigzag", 2).forward}
        for tokens in TOKENS
        for ranks in RANKS
    ]


# -------------------------------------------------------------------------------------------------------------- tables


def tables(content: dict[str, Any]) -> list[Table]:
    return [table(content) for table in TABLES.values()]


def rule_table(content: dict[str, Any]) -> Table:
    rows = []
    for row in content["rules"]:
        matrices, dims = MATRICES[row["rule"]], (row["K"], row["V"])
        counted = [f"{summary_share(matrices, *dims, training):.0%}" for training in (False, True)]
        measured = [f"{row['share']:.0%}", f"{row['training_share']:.0%}"]
        rows.append([row["rule"], f"{dims[0]}, {dims[1]}", counted[0], measured[0], counted[1], measured[1]])
    header = ["rule", "K, V", "counted", "measured", "counted, training", "measured, training"]
    return Table("the summary of a range over the forward pass of its rule", header, rows)


def share_table(content: dict[str, Any]) -> Table:
    rows = []
    for row in content["shares"]:
        shares = [f"{forward:.0%} / {training:.0%}" for forward, training in zip(row["forward"], row["training"])]
        rows.append([row["config"], f"{row['K']}, {row['V']}", *shares])
    header = ["config", "K, V", "of the rule", "of the mixer", "of the block"]
    return Table("the summary over a forward pass, by formula: alone / with a backward pass to follow", header, rows)


def layer_table(content: dict[str, Any]) -> Table:
    rows = [
        [row["mixer"], f"{row['alone_seconds'] * 1e3:.1f} ms", f"{row['share']:.0%}", f"{row['training_share']:.0%}"]
        for row in content["layers"]
    ]
    header = ["layer", "forward, alone", "summary over it", "with a backward pass to follow"]
    return Table("the summary of a range over the forward pass of a whole mixer", header, rows)


def exchange_table(content: dict[str, Any]) -> Table:
    rows = [
        [
            row["mixer"],
            str(row["ranks"]),
            f"{row['alone_seconds'] * 1e3:.1f} ms",
            f"{row['shared_seconds'] * 1e3:.1f} ms",
            f"{row['received_bytes']:,}",
            f"{row['bytes_by_formula']:,}",
        ]
        for row in content["exchange"]
    ]
    header = ["layer", "ranks", "step alone", "step shared", "bytes received", "by formula"]
    return Table("forward and backward of one mixer, on as many tokens alone and as a rank of several", header, rows)


def formula_table(content: dict[str, Any]) -> Table:
    rows = []
    for row in content["formula"]:
        hops, possible = row["ranks"] - 1, row["heads"] % row["ranks"] == 0
        waiting = f"{row['ring_waiting_seconds'] * 1e3:.2f}"
        rows.append(
            [
                row["config"],
                f"{row['tokens'] // 1024}k",
                str(row["ranks"]),
                f"{row['layer_seconds'] * 1e3:.2f}",
                f"{row['summary_share']:.0%}",
                f"{_size(row['summaries'])} / {_time(row['summaries'])}",
                f"{_size(row['ring'])} x {hops} / {_time(row['ring'] * hops)} + {waiting}",
                f"{_size(row['ulysses'])} / {_time(row['ulysses'])}" if possible else f"no: {row['heads']} heads",
            ]
        )
    header = ["config", "tokens", "ranks", "layer, ms", "summary", "summaries", "ring of states", "Ulysses"]
    return Table("one recurrent layer's forward pass on one rank, by formula: MiB / ms", header, rows)


def attention_table(content: dict[str, Any]) -> Table:
    rows = [
        [f"{row['tokens'] // 1024}k", str(row["ranks"]), _size(row["bytes"]), _time(row["bytes"])]
        for row in content["attention"]
    ]
    return Table("one attention layer of mdn_h_3to1_400M", ["tokens", "ranks", "received, MiB", "ms"], rows)


TABLES = {
    "rules": rule_table,
    "shares": share_table,
    "layers": layer_table,
    "exchange": exchange_table,
    "formula": formula_table,
    "attention": attention_table,
}
"""by their names in the page"""


def _size(count: float) -> str:
    return f"{count / 2**20:,.1f}"


def _time(count: float) -> str:
    return f"{count / LINK * 1e3:,.2f}"


# ------------------------------------------------------------------------------------------------------ figure and page


def draw(content: dict[str, Any]) -> Any:
    """Time of the exchange against that of the layer, over the ranks, for the largest config at both lengths."""
    fig, axes = figure("One layer's forward pass, by formula", "ranks", "milliseconds", columns=2, size=(9.0, 3.8))
    for axis, tokens in zip(axes.flat, TOKENS):
        rows = [row for row in content["formula"] if (row["config"], row["tokens"]) == ("mdn_1.3B", tokens)]
        ranks = [row["ranks"] for row in rows]
        lines = {
            "work of the layer": [row["layer_seconds"] for row in rows],
            "summaries (this project)": [row["summaries"] / LINK for row in rows],
            "ring of states": [row["ring"] * (row["ranks"] - 1) / LINK + row["ring_waiting_seconds"] for row in rows],
            "Ulysses (not with these 6 heads)": [row["ulysses"] / LINK for row in rows],
        }
        for (label, seconds), colour in zip(lines.items(), (COLOURS[6], COLOURS[1], COLOURS[0], COLOURS[2])):
            style = {"work of the layer": "s--", "Ulysses (not with these 6 heads)": "o:"}.get(label, "o-")
            axis.plot(ranks, [1e3 * x for x in seconds], style, label=label, color=colour)
        axis.set_title(f"mdn_1.3B, {tokens // 1024}k tokens")
        plain_log_axis(axis)
        doubling_axis(axis, ranks)
    axes.flat[0].legend(fontsize=8)
    return fig


def fill(page: str, content: dict[str, Any]) -> str:
    """The page with its tables taken from the results."""
    found = {name: table(content) for name, table in TABLES.items()}
    texts = {name: markdown_table(table.header, table.rows) for name, table in found.items()}
    size, machine = content["size"], content["machine"]
    texts["machine"] = (
        f"Recorded on {machine['date'][:10]}: {machine['processor']}, load {machine['load_before']:.1f} before it; "
        f"{size['tokens']:,} tokens\nper rank, {size['num_heads']} heads, layers of width {size['hidden_size']} with "
        f"heads of {size['head_dim']}."
    )
    return fill_page(page, texts)


if __name__ == "__main__":
    results, page_file = map(Path, sys.argv[1:])
    page_file.write_text(fill(page_file.read_text(), read_results(results, "context-parallel")))
