"""A vLLM engine in this process that tests drive step by step, and what transformers says to the same prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.forward_context import get_forward_context
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.scheduler import Scheduler

from mdn.vllm.served_mixers import ServedRecurrence

Tokens = list[int]


@dataclass
class Counters:
    """What happened in an engine's steps."""

    steps: int = 0
    mixed_steps: int = 0
    """with decoding requests and prompts in one batch"""
    resumed_prompts: int = 0
    """parts of prompts before which something was read already"""
    prompt_tokens: int = 0
    decoded_tokens: int = 0
    most_requests: int = 0
    preemptions: int = 0

    def add(self, metadata: Any) -> None:
        self.steps += 1
        self.mixed_steps += metadata.num_decodes > 0 and metadata.num_prefills > 0
        if metadata.num_prefills:
            self.resumed_prompts += int(metadata.has_initial_states_p.sum())
        self.prompt_tokens += metadata.num_prefill_tokens
        self.decoded_tokens += metadata.num_decode_tokens
        self.most_requests = max(self.most_requests, metadata.num_decodes + metadata.num_prefills)


@dataclass
class Engine:
    engine: LLMEngine
    counters: Counters = field(default_factory=Counters)
    _requests: int = 0

    def add(self, prompt: Tokens, **sampling: Any) -> str:
        self._requests += 1
        name = str(self._requests)
        settings = {"max_tokens": 12, "temperature": 0.0, "detokenize": False, "ignore_eos": True, **sampling}
        params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **settings)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def run(self, prompts: Sequence[Tokens], every: int = 0, **sampling: Any) -> list[RequestOutput]:
        """The final outputs; a new request arrives every so many steps (0: all at once)."""
        waiting, names, finished, step = list(prompts), [], {}, 0
        while waiting or self.engine.has_unfinished_requests():
            while waiting and (every == 0 or step >= len(names) * every):
                names.append(self.add(waiting.pop(0), **sampling))
            finished |= {output.request_id: output for output in self.engine.step() if output.finished}
            step += 1
        return [finished[name] for name in names]

    def free_pages(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.engine_core.engine_core.scheduler


@contextmanager
def engine(model: Path, monkeypatch: Any, **arguments: Any) -> Iterator[Engine]:
    """An engine for a model directory; its memory is released at the end."""
    counters = Counters()
    serve, preempt = ServedRecurrence.serve, Scheduler._preempt_request

    def counted_serve(layer: ServedRecurrence, *given: Any) -> None:
        context = get_forward_context()
        if layer.mixer.layer_idx == 0 and context.attn_metadata is not None:
            counters.add(context.attn_metadata[layer.name])
        serve(layer, *given)

    def counted_preempt(scheduler: Scheduler, *given: Any, **named: Any) -> Any:
        counters.preemptions += 1
        return preempt(scheduler, *given, **named)

    settings: dict[str, Any] = {
        "max_model_len": 1100,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    with monkeypatch.context() as patches:
        patches.setattr(ServedRecurrence, "serve", counted_serve)
        patches.setattr(Scheduler, "_preempt_request", counted_preempt)
        made = LLMEngine.from_engine_args(EngineArgs(model=str(model), **{**settings, **arguments}))
        counters.__init__()  # warming up does not count
        try:
            yield Engine(made, counters)
        finally:
            made.engine_core.shutdown()
            del made
            cleanup_dist_env_and_memory()


def tokens_of(outputs: list[RequestOutput]) -> list[Tokens]:
    return [list(output.outputs[0].token_ids) for output in outputs]


class Continuation(NamedTuple):
    tokens: Tokens
    logprobs: torch.Tensor
    """``[tokens, vocabulary]``"""


@torch.no_grad()
def expected_continuations(model: Any, prompts: Sequence[Tokens], count: int = 12) -> list[Continuation]:
    """Greedy continuations by transformers' ``generate``, one prompt at a time."""
    found = []
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **settings)
        logprobs = torch.cat(output.logits).log_softmax(-1)
        found.append(Continuation(output.sequences[0, len(prompt) :].tolist(), logprobs))
    return found


def expected_tokens(model: Any, prompts: Sequence[Tokens], count: int = 12) -> list[Tokens]:
    return [continuation.tokens for continuation in expected_continuations(model, prompts, count)]
