"""Complete a prompt with a model directory that a run has just written: proof that it loads and generates."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import mdn.models  # noqa: F401 (registers the architecture with the Auto classes)
from mdn.training.schema import SampleSettings


def complete(directory: Path, settings: SampleSettings) -> str:
    """The prompt and its continuation."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer(settings.prompt, return_tensors="pt", add_special_tokens=False)
    # Training texts begin with the end-of-text id, so a prompt does too.
    start = torch.tensor([[tokenizer.eos_token_id]])
    ids = torch.cat([start, inputs["input_ids"]], dim=1)
    torch.manual_seed(0)  # the same model says the same thing
    choice = {"do_sample": True, "temperature": settings.temperature} if settings.temperature else {"do_sample": False}
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=settings.max_new_tokens, pad_token_id=0, **choice
    )
    return str(tokenizer.decode(output[0, 1:], skip_special_tokens=True))
