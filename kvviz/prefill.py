"""One forward over the prompt. Nothing is evicted here; everything that policies look at is caught on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvviz.attention import attention_mass, causal_attention, running
from kvviz.rotary import Rotary, turn
from kvviz.state import STORED_QUERIES, LayerState, PromptState, QueryStatistics

CHUNK = 8192
"""Tokens read in one forward; longer prompts are read in several, with the same result and bounded memory."""

Progress = Callable[[float, str], None]
"""Told the share done in [0, 1] and what is being done. It may raise to cancel."""


class _Recorder:
    """Gathers one layer's keys, values and query statistics over the chunks of a prefill."""

    def __init__(self, rotary: Rotary, n_tokens: int, want_mass: bool) -> None:
        self.rotary, self.n_tokens, self.want_mass = rotary, n_tokens, want_mass
        self.statistics = QueryStatistics(n_tokens)
        self.keys = self.values = self.queries = self.mass = None
        self.scaling, self.window = 1.0, None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: int, unturn: tuple[Tensor, Tensor]) -> Tensor:
        """q [Hq, T, d], k, v [Hkv, T, d] of the tokens from `start` on -> output [Hq, T, d]."""
        end = start + q.shape[1]
        if self.keys is None:
            self.keys = k.new_empty(k.shape[0], self.n_tokens, k.shape[2])
            self.values = torch.empty_like(self.keys)
        self.keys[:, start:end], self.values[:, start:end] = k, v
        self.statistics.add(turn(q.float(), *unturn), start)
        recent = q[:, -STORED_QUERIES:]
        if self.queries is not None and recent.shape[1] < STORED_QUERIES:
            recent = torch.cat((self.queries, recent), dim=1)[:, -STORED_QUERIES:]
        self.queries = recent.clone()
        if self.want_mass and self.window is None:
            mass = attention_mass(q, self.keys[:, :end], self.scaling)
            if self.mass is not None:
                mass[:, :start] += self.mass
            self.mass = mass
        return causal_attention(q, self.keys[:, :end], self.values[:, :end], self.scaling, self.window)

    def state(self, index: int, projection: Callable[[], Tensor] | None) -> LayerState:
        """What the layer leaves behind. A sliding-window layer keeps its window and no more."""
        keys, values = self.keys, self.values
        if self.window is not None and self.n_tokens > self.window:
            keys, values = keys[:, -self.window :].clone(), values[:, -self.window :].clone()
        mean, cov = self.statistics.result()
        return LayerState(
            keys=keys,
            values=values,
            queries=self.queries,
            query_mean=mean,
            query_cov=cov,
            scaling=self.scaling,
            rotary=self.rotary,
            projection=projection,
            attention_mass=self.mass,
            sliding=self.window is not None,
            index=index,
            total_tokens=self.n_tokens,
        )


class _PrefillPass:
    """Reads the prompt chunk by chunk and reports after every layer."""

    def __init__(self, recorders: list[_Recorder], n_tokens: int, progress: Progress | None) -> None:
        self.recorders, self.n_tokens, self.progress = recorders, n_tokens, progress
        self.start = self.end = 0
        self._tables: dict[tuple, tuple[Tensor, Tensor]] = {}

    def next_chunk(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self._tables = {}

    def _unturn(self, rotary: Rotary, device: torch.device) -> tuple[Tensor, Tensor]:
        """What undoes the rotation of this chunk's positions; layers of one type and device share it."""
        key = (id(rotary), device)
        if key not in self._tables:
            self._tables[key] = rotary.inverse_table(torch.arange(self.start, self.end, device=device))
        return self._tables[key]

    def attend(self, layer, q, k, v, scaling, window):
        recorder = self.recorders[layer]
        recorder.scaling, recorder.window = scaling, window
        out = recorder.attend(q[0], k[0], v[0], self.start, self._unturn(recorder.rotary, q.device))
        if self.progress is not None:
            layers = len(self.recorders)
            share = (self.start + (self.end - self.start) * (layer + 1) / layers) / self.n_tokens
            self.progress(share, f"Reading {self.n_tokens:,} tokens, layer {layer + 1} of {layers}")
        return out.transpose(0, 1)[None]


def rotaries(model: PreTrainedModel) -> list[Rotary]:
    """The rotations of every layer; layers of one type share one object."""
    body = model.model
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    by_type = hasattr(body.rotary_emb, "layer_types")
    made: dict[str | None, Rotary] = {}
    for kind in types:
        kind = kind if by_type else None
        if kind not in made:
            made[kind] = Rotary.from_module(body.rotary_emb, kind)
    return [made[kind if by_type else None] for kind in types]


def prefill(
    model: PreTrainedModel,
    ids: list[int],
    *,
    want_mass: bool = False,
    progress: Progress | None = None,
    chunk: int = CHUNK,
) -> PromptState:
    """Read a prompt once, with full attention.

    Args:
        ids: the prompt's token ids, N >= 1.
        want_mass: also sum the attention that every key receives (H2O needs it; it costs time).
        progress: told after every layer; may raise to cancel, and then nothing is kept.
        chunk: tokens a forward.

    Returns:
        PromptState, on the model's device.
    """
    began = time.perf_counter()
    n, device = len(ids), model.device
    recorders = [_Recorder(rotary, n, want_mass) for rotary in rotaries(model)]
    forward = _PrefillPass(recorders, n, progress)
    tokens = torch.tensor([ids], device=device)
    with running(model, forward):
        for start in range(0, n, chunk):
            end = min(start + chunk, n)
            forward.next_chunk(start, end)
            output = model(
                input_ids=tokens[:, start:end],
                position_ids=torch.arange(start, end, device=device)[None],
                use_cache=False,
                logits_to_keep=1,
            )
        layers = [
            recorder.state(index, partial(getattr, block.self_attn.o_proj, "weight"))
            for index, (recorder, block) in enumerate(zip(recorders, model.model.layers, strict=True))
        ]
        logits = output.logits[0, -1].float().clone()
    return PromptState(ids=tuple(ids), layers=tuple(layers), logits=logits, seconds=time.perf_counter() - began)
