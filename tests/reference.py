"""Slow, independent references: attention with evicted entries masked out, inside transformers' own forward."""

from __future__ import annotations

import torch
from transformers import AttentionInterface

import kvviz

HIDDEN: dict[int, torch.Tensor] = {}  # layer -> [Hkv, N] bool, True where an entry is gone for tokens from N on


def _masked(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, sliding_window=None, **_):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.mT * scaling
    t = query.shape[2]
    row, column = torch.arange(t)[:, None], torch.arange(t)
    gone = (column > row).expand(1, query.shape[1], t, t).clone()
    if sliding_window is not None:
        gone |= column <= row - sliding_window
    elif module.layer_idx in HIDDEN:
        hidden = HIDDEN[module.layer_idx].repeat_interleave(groups, 0)
        n = hidden.shape[1]
        gone[:, :, n:, :n] |= hidden[None, :, None]
    weights = logits.masked_fill(gone, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register("masked_reference", _masked)


def masked_logits(model, ids: list[int], kept=None) -> torch.Tensor:
    """Logits [T, V] of a whole sequence where tokens after the prompt see only what `kept` (a Retained) holds."""
    HIDDEN.clear()
    if kept is not None:
        for index, layer in enumerate(kept.layers):
            if not layer.sliding:
                hidden = torch.ones(len(layer.counts), kept.n_tokens, dtype=torch.bool)
                for head, (_, _, positions) in enumerate(layer.heads()):
                    hidden[head, positions] = False
                HIDDEN[index] = hidden
    before = model.config._attn_implementation
    model.config._attn_implementation = "masked_reference"
    try:
        with torch.no_grad():
            return model(torch.tensor([ids]), use_cache=False).logits[0].float()
    finally:
        model.config._attn_implementation = before
        HIDDEN.clear()


def run(engine, state, question, policies, budget, **more) -> kvviz.runs.Run:
    """The finished run of `engine.generate`."""
    *_, last = engine.generate(state, question, policies, budget, **more)
    return last.run


EVERY = [name for name in kvviz.policies.names() if name != "full"]
