"""Attention weights that several scorers read: of the prompt's last queries, or of later ones, over the keys.

All in float32 (float64 input stays float64), whatever the cache's dtype. Query head h has KV head h // g.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvviz.policies.base import require
from kvviz.state import STORED_QUERIES, LayerState


def precise(x: Tensor) -> Tensor:
    """x in float32, or in float64 where it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def by_group(x: Tensor, layer: LayerState) -> Tensor:
    """[Hq, ...] -> [Hkv, g, ...]: the query heads beside the KV head that they share."""
    return x.unflatten(0, (-1, layer.groups))


def check_window(window: int) -> None:
    """A window is a number of queries that the prefill keeps."""
    require(
        window == int(window) and 1 <= window <= STORED_QUERIES,
        f"window is 1 to {STORED_QUERIES} queries (the prefill keeps no more); got {window}.",
    )


def attention_logits(layer: LayerState, queries: Tensor) -> Tensor:
    """Attention logits c q.k of queries [Hq, T, d] over all keys, [Hq, T, N]."""
    grouped = by_group(precise(queries) * layer.scaling, layer).flatten(1, 2)  # [Hkv, g T, d]
    return (grouped @ precise(layer.keys).mT).view(*queries.shape[:2], -1)


def window_attention(layer: LayerState, window: int) -> Tensor:
    """Attention of the last `window` queries over all keys, causal inside the window, softmax over all N.

    Args:
        window: w; a prompt shorter than that has all its queries in the window.

    Returns:
        [Hq, min(w, N), N], each row sums to 1.
    """
    check_window(window)
    logits = attention_logits(layer, layer.queries[:, -window:])
    w = logits.shape[1]
    if layer.positions is None:
        later = torch.ones(w, w, dtype=torch.bool, device=logits.device).triu(1)
        logits[..., -w:].masked_fill_(later, float("-inf"))
    else:  # entries have left before: slots are not positions
        asked_at = torch.arange(layer.total_tokens - w, layer.total_tokens, device=logits.device)
        later = layer.positions[:, None] > asked_at[:, None]  # [Hkv, w, N]
        by_group(logits, layer).masked_fill_(later[:, None], float("-inf"))
    return logits.softmax(dim=-1)


def with_unscored(scores: Tensor, first: int = 0, last: int = 0) -> Tensor:
    """Widen scores [Hkv, n] to [Hkv, first + n + last] by entries that the method keeps unscored.

    They get the row's maximum (0 where nothing is scored): finite, on the row's own scale. What keeps them is
    the policy's protection, not this number.
    """
    top = scores.amax(dim=-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(scores.shape[0], 1)
    return torch.cat((top.expand(-1, first), scores, top.expand(-1, last)), dim=-1)
