"""Picking each head's own rows, the one step that eviction keeps repeating."""

from __future__ import annotations

import torch
from torch import Tensor


def take(x: Tensor, index: Tensor) -> Tensor:
    """x [H, N, ...] at index [H, m], each head at its own -> [H, m, ...].

    Copies whole rows, which on a CPU is several times faster than `x.gather` or `x[heads, index]`.
    """
    rows = index + x.shape[1] * torch.arange(len(x), device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, index.shape)
