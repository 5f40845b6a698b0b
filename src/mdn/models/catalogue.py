"""The table of all shipped configurations (`mdn info --all`, docs/models.md), computed from the configs alone."""

from __future__ import annotations

from tqdm import tqdm

from mdn.models.configuration import MomentumDeltaNetConfig
from mdn.models.info import ModelFacts, load_config, model_facts
from mdn.models.sources import shipped_configs

CONTEXT = 4096
INTRODUCTION = f"""# Models

Made by `mdn info --all > docs/models.md`. Every row is a JSON file in `configs/`, which `mdn info` and recipes take by
its name. Sizes follow the paper and the authors' released configs. Where neither says how a model was built, the choice
is ours and named below the table.

- Parameters: all of them, and without embedding and head.
- State: what one sequence keeps after {CONTEXT:,} tokens, in a bfloat16 model (recurrent states are float32).
- GFLOPs: of the forward pass of one token at that context; a multiply-add is two. Training costs three times as much.
"""
NOTES = """
Mamba2-H: the paper does not give its layout. Here it keeps the 48 blocks without MLP of Mamba2, with attention in every
fourth of them. The other hybrids put attention at layers 3, 7, 11, ... (3:1) or 7, 15, 23 (7:1) of 24, as the authors'
configs do.
"""
COLUMNS = ("config", "layers", "hidden", "heads", "parameters", "without embeddings", "state", "GFLOPs")


def all_facts(progress: bool = False) -> dict[str, ModelFacts]:
    """Facts about every shipped config, by name."""
    names = tqdm(shipped_configs(), unit="config", disable=not progress, leave=False)
    return {name: model_facts(load_config(name), CONTEXT) for name in names}


def page(facts: dict[str, ModelFacts]) -> str:
    """The whole of docs/models.md."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *(_row(name, of_one) for name, of_one in facts.items())]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{INTRODUCTION}\n{table}\n{NOTES}"


def _row(name: str, facts: ModelFacts) -> tuple[str, ...]:
    config = load_config(name)
    outside = sum(facts.parameters.get(part, 0) for part in ("embedding", "head"))
    return (
        f"`{name}`",
        _layers(config),
        str(config.hidden_size),
        _heads(config),
        f"{facts.total_parameters:,}",
        f"{facts.total_parameters - outside:,}",
        f"{sum(facts.state_bytes.values()) / 2**20:.1f} MiB",
        f"{facts.forward_flops_per_token / 1e9:.3f}",
    )


def _layers(config: MomentumDeltaNetConfig) -> str:
    kinds = [config.mixer_name(layer) for layer in range(config.num_hidden_layers)]
    return " + ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _heads(config: MomentumDeltaNetConfig) -> str:
    """Heads and their key dimension; Mamba2's follow from its width."""
    if config.mixer == "mamba2":
        expand = (config.mixer_options or {}).get("expand", 2)
        return f"{int(expand * config.hidden_size) // config.head_dim} x {config.head_dim}"
    dim = config.hidden_size // config.num_heads if config.mixer == "attention" else config.head_dim
    return f"{config.num_heads} x {dim}"
