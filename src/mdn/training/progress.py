"""What the user sees while training runs: a bar with loss, tokens per second and time left; and TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mdn.common import progress as bars


class ProgressBar:
    """One bar over all steps; a resumed run starts where it stopped. Silent on every rank but the first."""

    def __init__(self, total: int, done: int, tokens_per_step: int, show: bool) -> None:
        self.tokens_per_step = tokens_per_step
        self.bar = bars.progress(
            total=total,
            initial=done,
            desc="train",
            unit="step",
            disable=bars.silent or not show,
            bar_format="{desc} {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )

    def step(self, loss: float | None) -> None:
        rate = self.bar.format_dict["rate"]
        words = [] if loss is None else [f"loss {loss:.3f}"]
        if rate:
            words.append(f"{rate * self.tokens_per_step:,.0f} tokens/s")
        self.bar.set_postfix_str(", ".join(words), refresh=False)
        self.bar.update(1)

    def close(self) -> None:
        self.bar.close()


class TensorBoard:
    """Scalars for TensorBoard; does nothing when it is switched off or on other ranks than the first."""

    def __init__(self, directory: Path, first_step: int, on: bool) -> None:
        self.writer: Any = None
        if on:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides what an interrupted run wrote after its last checkpoint
            self.writer = SummaryWriter(str(directory), purge_step=first_step)

    def scalars(self, prefix: str, values: dict[str, float], step: int) -> None:
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(f"{prefix}/{name}", value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
