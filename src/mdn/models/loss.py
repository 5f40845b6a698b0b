"""Cross entropy of a linear head without ever holding all logits.

    loss = sum_t -log softmax(W h_t)[label_t] / count

The tokens are taken ``chunk_size`` at a time; each piece computes its logits, its part of the loss and right away the
gradients with respect to h and W, so that the ``[tokens, vocabulary]`` matrix exists only for one piece.
Shapes: hidden ``[N, D]``, weight ``[V, D]``, labels ``[N]`` (``ignore_index`` entries count for nothing).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.ops.fused import IGNORE_INDEX


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """The sum over tokens; gradients are computed in the forward pass and scaled in the backward pass."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_size: int) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Summed over many pieces, so at least in float32.
        grad_weight = torch.zeros_like(weight, dtype=_wide(weight.dtype)) if wants_weight else None
        loss = hidden.new_zeros((), dtype=_wide(hidden.dtype))
        for start in range(0, hidden.shape[0], chunk_size):
            piece, target = hidden[start : start + chunk_size], labels[start : start + chunk_size]
            logits = F.linear(piece, weight)
            log_probabilities = F.log_softmax(logits.to(_wide(logits.dtype)), dim=-1)
            loss = loss + F.nll_loss(log_probabilities, target, ignore_index=IGNORE_INDEX, reduction="sum")
            if not (wants_hidden or wants_weight):
                continue
            counted = target != IGNORE_INDEX
            grad_logits = log_probabilities.exp_()
            correct = torch.where(counted, target, 0).unsqueeze(-1)
            grad_logits.scatter_add_(-1, correct, torch.full_like(correct, -1, dtype=grad_logits.dtype))
            grad_logits = (grad_logits * counted.unsqueeze(-1)).to(logits.dtype)
            if grad_hidden is not None:
                grad_hidden[start : start + chunk_size] = grad_logits @ weight.to(logits.dtype)
            if grad_weight is not None:
                grad_weight += grad_logits.mT @ piece.to(logits.dtype)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        grads = [None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors]
        return (*grads, None, None)


def chunked_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_size: int, count: Tensor | int | None = None
) -> Tensor:
    """The loss of hidden ``[..., D]`` against labels ``[...]``, divided by ``count`` (None: by the labelled tokens)."""
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(f"labels must have shape {list(hidden.shape[:-1])}, got {list(labels.shape)}")
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if not torch.compiler.is_compiling():
        # Tasks with few labels (associative recall, question answering) need few rows of logits.
        labelled = (labels != IGNORE_INDEX).nonzero().squeeze(-1)
        hidden, labels = hidden.index_select(0, labelled), labels.index_select(0, labelled)
    total = _ChunkedLinearCrossEntropy.apply(hidden, weight, labels, chunk_size)
    if count is None:
        count = (labels != IGNORE_INDEX).sum()
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def shift_labels_left(labels: Tensor, valid: Tensor | None = None, last: Tensor | None = None) -> Tensor:
    """Labels of the next token, ``[B, T]``.

    ``valid`` (bool ``[B, T]``): masked tokens are neither predictors nor targets. ``last`` (int64): flat indices of the
    last token of every packed sequence, which must not predict the first token of its neighbour.
    """
    shifted = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
    if valid is not None:
        shifted = shifted.masked_fill(~(valid & F.pad(valid, (0, 1), value=False)[..., 1:]), IGNORE_INDEX)
    if last is not None:
        shifted = shifted.reshape(-1).index_fill(0, last, IGNORE_INDEX).reshape(labels.shape)
    return shifted


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
