"""What a run would be, without running it: parameters, tokens, steps, memory per device, and the launch command."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mdn.models import MomentumDeltaNetForCausalLM
from mdn.training.build import meta_model, model_config
from mdn.training.recipe import Recipe, TokenizerSettings, TrainingSettings

GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class BatchPlan:
    """How one optimiser step of `rows` sequences is spread: ranks x accumulation x micro."""

    rows: int
    ranks: int
    micro: int
    accumulation: int


def plan_batch(training: TrainingSettings, ranks: int) -> BatchPlan:
    """The largest micro-batch up to the wished one that divides a rank's share evenly."""
    rows = training.batch_sequences
    if rows % ranks:
        raise ValueError(
            f"training.batch_tokens={training.batch_tokens} is {rows} sequences of {training.sequence_length} tokens, "
            f"which {ranks} ranks cannot share evenly; use a number of ranks that divides {rows}"
        )
    share = rows // ranks
    micro = max(n for n in range(1, min(training.micro_batch_sequences, share) + 1) if share % n == 0)
    return BatchPlan(rows, ranks, micro, share // micro)


@dataclass(frozen=True)
class Plan:
    """Figures of a run; sizes are bytes on one device."""

    parameters: int
    batch: BatchPlan
    steps: int
    tokens: int
    state_bytes: int
    activation_bytes: int
    launch: str

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes


def vocabulary(settings: TokenizerSettings) -> int:
    """Its size, known before any text is read."""
    if settings.kind == "pretrained":
        from mdn.training.tokenizer import load_pretrained

        return len(load_pretrained(str(settings.path)))
    return {"bytes": 257, "bpe": settings.vocab_size, "gpt2": GPT2_VOCABULARY}[settings.kind]


def launch_line(recipe_name: str, overrides: list[str], nodes: int, devices: int) -> str:
    """The command to run on every node; one device on one node needs no launcher."""
    arguments = " ".join(["train", recipe_name, *overrides])
    if nodes * devices == 1:
        return f"mdn {arguments}"
    place = "--standalone" if nodes == 1 else "--rdzv-backend c10d --rdzv-id $JOB --rdzv-endpoint $HEAD_NODE:29500"
    return f"torchrun --nnodes {nodes} --nproc_per_node {devices} {place} --no-python mdn {arguments}"


def _saved_activations(model: MomentumDeltaNetForCausalLM, tokens: int, checkpointing: bool, half: bool) -> int:
    """Bytes kept for the backward pass of one micro-batch, counted by running the model on the meta device."""
    storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = (storage, storage.nbytes())  # holding it keeps its address from being used again
        return tensor

    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    watched = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with watched, torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        model.model(input_ids=ids, use_cache=False)
    # The head: logits, log-softmax and its gradient in float32, of all tokens or of one piece of the chunked loss.
    rows = min(model.config.loss_chunk_size or tokens, tokens)
    return sum(size for _, size in storages.values()) + 3 * 4 * rows * model.config.vocab_size


def make_plan(recipe: Recipe, recipe_name: str, overrides: list[str], nodes: int, devices: int) -> Plan:
    """`devices` per node. Raises the same ValueErrors as a run would."""
    ranks = nodes * devices
    batch = plan_batch(recipe.training, ranks)
    config = model_config(recipe, vocabulary(recipe.tokenizer), 0)
    model = meta_model(config)
    parameters = model.num_parameters()
    shards = {"ddp": 1, "fsdp": ranks, "hsdp": recipe.distributed.shard_size or 1}[recipe.distributed.strategy]
    tokens = batch.micro * recipe.training.sequence_length
    half = recipe.training.precision == "bfloat16"
    return Plan(
        parameters=parameters,
        batch=batch,
        steps=recipe.training.total_steps,
        tokens=recipe.training.total_steps * recipe.training.batch_tokens,
        # weights, gradients and Adam's two averages, all float32
        state_bytes=16 * parameters // shards,
        activation_bytes=_saved_activations(model, tokens, recipe.training.gradient_checkpointing, half),
        launch=launch_line(recipe_name, overrides, nodes, devices),
    )


def describe(recipe: Recipe, plan: Plan) -> str:
    batch, length = plan.batch, recipe.training.sequence_length
    return "\n".join(
        [
            f"parameters   {plan.parameters:,}",
            f"tokens       {plan.tokens:,} in {plan.steps:,} steps of {recipe.training.batch_tokens:,}",
            f"batch        {batch.rows} sequences of {length} = {batch.ranks} ranks x {batch.accumulation} passes "
            f"x {batch.micro}",
            f"memory       about {plan.total_bytes / 1e9:.2f} GB a device: {plan.state_bytes / 1e9:.2f} for weights, "
            f"gradients and Adam, {plan.activation_bytes / 1e9:.2f} for the activations kept for the backward pass",
            f"output       {recipe.output_dir}",
            f"launch       {plan.launch}",
        ]
    )
