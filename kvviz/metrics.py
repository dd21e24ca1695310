"""How far a policy's output is from the full cache's: divergence per step, agreement, first difference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) in nats of next-token distributions.

    Args:
        reference, other: logits [..., V] float32; they broadcast.

    Returns:
        [...], zero where the distributions are equal, never negative.
    """
    p, q = reference.log_softmax(dim=-1), other.log_softmax(dim=-1)
    return (p.exp() * (p - q)).sum(dim=-1).clamp_min(0)


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ, the end of the shorter one included; None if they are equal."""
    for i, (a, b) in enumerate(zip(reference, other, strict=False)):
        if a != b:
            return i
    return None if len(reference) == len(other) else min(len(reference), len(other))


def top_words(logits: Tensor, k: int = 3) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of logits [..., V]: ids [..., k] and probabilities [..., k]."""
    p, ids = logits.softmax(dim=-1).topk(k, dim=-1)
    return ids, p


def agreement(reference: Tensor, other: Tensor) -> Tensor:
    """Share of steps in which both would write the same token: top-1 agreement of logits [T, V]."""
    return (reference.argmax(-1) == other.argmax(-1)).float().mean()


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy in nats of tokens ids [..., T] under logits [..., T, V]."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), ids.flatten(), reduction="none").view(ids.shape)
