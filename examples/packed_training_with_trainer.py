"""Packed training with the Hugging Face Trainer: samples of different lengths in one row, without padding or leaks.

    python examples/packed_training_with_trainer.py --steps 20

`DataCollatorWithFlattening` lays samples end to end and restarts `position_ids` at each one. The model reads the
boundaries from them: state, convolutions and attention start anew with every sample. The script first shows that a
packed row gives every sample the loss it has alone, then trains.
"""

import argparse
import inspect
import tempfile

import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM


def samples() -> list[dict[str, list[int]]]:
    """The functions of a standard module, as bytes: from a few dozen to a few thousand tokens each."""
    sources = [inspect.getsource(x) for _, x in inspect.getmembers(inspect, inspect.isfunction)]
    return [{"input_ids": list(source.encode()[:1024])} for source in sources]


def total_loss(model: MomentumDeltaNetForCausalLM, batch: dict[str, torch.Tensor]) -> tuple[float, int]:
    """Summed over predicted tokens, and their number."""
    count = int((batch["labels"][:, 1:] != -100).sum())
    with torch.no_grad():
        return model(**batch).loss.item() * count, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    config = MomentumDeltaNetConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=2,
        head_dim=32,
        expand_v=1,
        attn={"layers": [1], "num_heads": 2},  # attention respects the boundaries as well
    )
    model = MomentumDeltaNetForCausalLM(config)
    data = samples()
    collate = DataCollatorWithFlattening()

    packed, count = total_loss(model, collate(data[:4]))
    alone = sum(total_loss(model, collate([sample]))[0] for sample in data[:4])
    print(f"mean loss of {count} tokens: packed {packed / count:.6f}, one sample at a time {alone / count:.6f}")

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        )
        Trainer(model, arguments, data_collator=collate, train_dataset=data).train()


if __name__ == "__main__":
    main()
