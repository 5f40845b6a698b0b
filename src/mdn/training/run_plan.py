"""What a run would be, without running it: parameters, tokens, steps, memory per device, and the launch command."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mdn.models import MomentumDeltaNetForCausalLM
from mdn.parallel.volume import layer_volume
from mdn.training.build import meta_model, model_config, refuse_indivisible
from mdn.training.mesh import MeshShape, mesh_shape
from mdn.training.recipe import Recipe, TokenizerSettings, TrainingSettings

GPT2_VOCABULARY = 50257
FEWEST_TOKENS = 4096
"""tokens on a rank below which the exchange of context parallelism takes longer than the work it saves"""


@dataclass(frozen=True)
class BatchPlan:
    """How one optimiser step of `rows` sequences is spread: ranks x accumulation x micro.

    Ranks that share rows (context or tensor parallelism) count once.
    """

    rows: int
    ranks: int
    micro: int
    accumulation: int


def plan_batch(training: TrainingSettings, ranks: int) -> BatchPlan:
    """The largest micro-batch up to the requested one that divides a rank's share evenly."""
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
    mesh: MeshShape
    tokens_per_rank: int
    """tokens of one pass"""
    exchanged_bytes: list[int]
    """per layer and pass, forward and backward: what one rank receives from the others of its context group"""
    launch: str

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes


def vocabulary(settings: TokenizerSettings) -> int:
    """The size of the vocabulary, as far as it is known before any text is read."""
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


def _exchanged(
    model: MomentumDeltaNetForCausalLM, recipe: Recipe, mesh: MeshShape, tokens: int, half: bool
) -> list[int]:
    layout = recipe.distributed.context_layout
    mixers = (layer.attn for layer in model.model.layers)
    volumes = [layer_volume(mixer, tokens, mesh.context, layout, 2 if half else 4) for mixer in mixers]
    return [volume.total // mesh.tensor for volume in volumes]


def make_plan(recipe: Recipe, recipe_name: str, overrides: list[str], nodes: int, devices: int) -> Plan:
    """`devices` per node. Raises the same ValueErrors as a run would."""
    ranks = nodes * devices
    mesh = mesh_shape(recipe.distributed, ranks)
    batch = plan_batch(recipe.training, mesh.data)
    config = model_config(recipe, vocabulary(recipe.tokenizer), 0)
    refuse_indivisible(recipe, config)
    model = meta_model(config)
    parameters = model.num_parameters()
    in_blocks = sum(parameter.numel() for parameter in model.model.layers.parameters())
    held = parameters - in_blocks + in_blocks // mesh.tensor
    shards = {"ddp": 1, "fsdp": ranks, "hsdp": recipe.distributed.shard_size or 1}[recipe.distributed.strategy]
    tokens = batch.micro * recipe.training.sequence_length // mesh.context
    half = recipe.training.precision == "bfloat16"
    return Plan(
        parameters=parameters,
        batch=batch,
        steps=recipe.training.total_steps,
        tokens=recipe.training.total_steps * recipe.training.batch_tokens,
        # weights, gradients and Adam's two averages, all float32
        state_bytes=16 * held // shards,
        activation_bytes=_saved_activations(model, tokens, recipe.training.gradient_checkpointing, half),
        mesh=mesh,
        tokens_per_rank=tokens,
        exchanged_bytes=_exchanged(model, recipe, mesh, tokens, half),
        launch=launch_line(recipe_name, overrides, nodes, devices),
    )


def _describe_mesh(plan: Plan) -> list[str]:
    """The arrangement of the ranks and what context parallelism moves; nothing where rows are all that is split."""
    if plan.mesh.context * plan.mesh.tensor == 1:
        return []
    lines = [f"mesh         {plan.mesh}; {plan.tokens_per_rank:,} tokens of a pass on each rank"]
    if plan.mesh.context > 1:
        step, largest = sum(plan.exchanged_bytes) * plan.batch.accumulation, max(plan.exchanged_bytes)
        lines.append(
            f"exchange     each rank receives up to {largest / 2**20:,.2f} MiB per layer and pass, "
            f"{step / 2**20:,.1f} MiB per step"
        )
        if plan.tokens_per_rank < FEWEST_TOKENS:
            lines.append(
                f"warning      {plan.tokens_per_rank:,} tokens on a rank are too few for context parallelism to pay; "
                f"use at least about {FEWEST_TOKENS:,}, that is a smaller distributed.context_parallel"
            )
    return lines


def describe(recipe: Recipe, plan: Plan) -> str:
    batch, length = plan.batch, recipe.training.sequence_length
    return "\n".join(
        [
            f"parameters   {plan.parameters:,}",
            f"tokens       {plan.tokens:,} in {plan.steps:,} steps of {recipe.training.batch_tokens:,}",
            f"batch        {batch.rows} sequences of {length} = {batch.ranks} ranks x {batch.accumulation} passes "
            f"x {batch.micro}",
            *_describe_mesh(plan),
            f"memory       about {plan.total_bytes / 1e9:.2f} GB a device: {plan.state_bytes / 1e9:.2f} for weights, "
            f"gradients and Adam, {plan.activation_bytes / 1e9:.2f} for the activations kept for the backward pass",
            f"output       {recipe.output_dir}",
            f"launch       {plan.launch}",
        ]
    )
