"""The attention that kvviz runs inside a transformers model.

A model calls its attention through a registered function. While a `Pass` is running, that function hands every layer's
queries, keys and values (after QK-norm and RoPE, whatever the family does) to the pass, which stores what it wants and
answers with the attention output. Outside a pass the model is untouched and `model.generate` works as always.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

NAME = "kvviz"

MASS_BYTES = {"cpu": 3 << 19, "cuda": 256 << 20, "mps": 64 << 20}
"""Bytes of attention weights held at once when attention mass is summed: what stays in a CPU's cache, or fills a GPU."""


class Pass(Protocol):
    """Something that wants to see, and answer, the attention of every layer of a forward."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        """q [B, Hq, T, d], k and v [B, Hkv, T, d] of the new tokens, after RoPE -> output [B, T, Hq, d].

        `window` is the layer's sliding window in tokens, or None.
        """
        ...


_running: ContextVar[Pass] = ContextVar("kvviz_pass")


def _attention(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, sliding_window=None, **_):
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _running.get().attend(module.layer_idx, query, key, value, scaling, sliding_window), None


AttentionInterface.register(NAME, _attention)


@contextmanager
def running(model: PreTrainedModel, forward: Pass) -> Iterator[None]:
    """Send the attention of `model` through `forward` until the block ends, then put the model back as it was."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    token = _running.set(forward)
    config._attn_implementation = NAME
    try:
        with torch.no_grad():
            yield
    finally:
        config._attn_implementation = before
        _running.reset(token)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None = None) -> Tensor:
    """Full attention of the last T tokens over all S tokens that stand in k and v: lower-right causal, fused.

    Args:
        q: [Hq, T, d]; k, v: [Hkv, S, d], S >= T.
        scaling: factor on the logits.
        window: sliding window in tokens, or None.

    Returns:
        [Hq, T, d]
    """
    t, s = q.shape[1], k.shape[1]
    mask = None
    if (t != s and t > 1) or (window is not None and s > window):
        ahead = torch.arange(s, device=q.device) - torch.arange(s - t, s, device=q.device)[:, None]  # key - query
        mask = ahead <= 0
        if window is not None:
            mask &= ahead > -window
    return F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None and t > 1, scale=scaling, enable_gqa=True
    )[0]


def attention_mass(q: Tensor, k: Tensor, scaling: float) -> Tensor:
    """Attention that each key received, summed over the queries that can see it, mean over the g heads of a group.

    Summed in float32, one KV head and some queries at a time: the N x N matrix is never held. (H2O, arXiv:2306.14048.)

    Args:
        q: [Hq, T, d] queries after RoPE of the last T tokens; k: [Hkv, S, d] keys of all tokens so far, S >= T.

    Returns:
        [Hkv, S] float32
    """
    (hq, t, d), (hkv, s, _) = q.shape, k.shape
    g = hq // hkv
    grouped = q.view(hkv, g, t, d) * scaling
    mass = torch.zeros(hkv, s, device=q.device, dtype=torch.float32)
    chunk = min(t, max(1, MASS_BYTES.get(q.device.type, MASS_BYTES["cpu"]) // (4 * g * s)))
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    for head in range(hkv):
        for start in range(0, t, chunk):
            rows = grouped[head, :, start : start + chunk]
            n = rows.shape[1]
            seen = s - t + start + n  # later keys are invisible to all of these queries
            logits = (rows.reshape(g * n, d) @ k[head, :seen].T).float()
            logits.view(g, n, seen)[..., seen - n :].masked_fill_(future[:n, :n], float("-inf"))
            mass[head, :seen] += logits.softmax(dim=-1).sum(dim=0)
    return mass / g
