"""The second stage: a prompt state, a policy and a budget -> what is retained. Milliseconds, no forward."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvviz import budget as budgets
from kvviz.allocation import keep
from kvviz.moments import Moments
from kvviz.policies.policy import Policy
from kvviz.quantize import Quantized, entry_bytes
from kvviz.state import LayerState, PromptState


@dataclass(frozen=True)
class RetainedLayer:
    """What one layer keeps, ragged over its KV heads: head after head in one flat tensor of S = counts.sum() entries.

    Attributes:
        keys, values: [S, d] in the model's dtype, or a 4-bit `Quantized`.
        positions: [S] int64, true positions in the prompt, sorted within each head.
        counts: entries of each head.
        moments: statistics of what was evicted, or None where nothing was or no correction is wanted.
        sliding: a sliding-window layer, left alone.
    """

    keys: Tensor | Quantized
    values: Tensor | Quantized
    positions: Tensor
    counts: tuple[int, ...]
    moments: Moments | None = None
    sliding: bool = False

    def heads(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(keys [n, d], values [n, d], positions [n]) of every head."""
        parts = (t.split(self.counts) for t in (self.keys, self.values, self.positions))
        return list(zip(*parts, strict=True))


@dataclass(frozen=True)
class Retained:
    """What a policy keeps of a prompt of `n_tokens` under `budget` entries a head; holds no reference to the rest."""

    policy: Policy
    budget: int
    n_tokens: int
    layers: tuple[RetainedLayer, ...]
    seconds: float = 0.0

    @property
    def entries(self) -> float:
        """Entries a head, averaged over the heads of the layers that can be evicted."""
        counts = [c for layer in self.layers if not layer.sliding for c in layer.counts]
        return sum(counts) / len(counts)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values kept."""
        return sum(t.nbytes for layer in self.layers for t in (layer.keys, layer.values))

    @property
    def moments_bytes(self) -> int:
        """Bytes of the moment statistics."""
        return sum(layer.moments.bytes for layer in self.layers if layer.moments is not None)

    @property
    def bytes(self) -> int:
        """All bytes that the policy needs: keys, values, statistics."""
        return self.kv_bytes + self.moments_bytes


def evict(state: PromptState, policy: Policy, budget: int, scores: list[Tensor | None] | None = None) -> Retained:
    """Cut a prompt's cache down to `budget` entries a head on average.

    Args:
        state: from `prefill`; it is not changed.
        budget: entries per head averaged over the layers, sinks and window included; N or more keeps everything.
        scores: what `score_layers(state, policy)` gave, if it is at hand.

    Raises:
        ValueError: a budget below 1, or a policy that needs something the state was not asked for.
    """
    began = time.perf_counter()
    budget, n = budgets.check_entries(budget), state.n_tokens
    if policy.keeps_all or budget >= n:
        layers = tuple(_whole(layer, policy.bits) for layer in state.layers)
        return Retained(policy, n, n, layers, time.perf_counter() - began)
    scores = scores or score_layers(state, policy)
    masks = _masks(state, policy, scores, budget)
    layers = tuple(
        _whole(layer) if layer.sliding else _cut(layer, policy, masks[layer.index]) for layer in state.layers
    )
    return Retained(policy, budget, n, layers, time.perf_counter() - began)


def score_layers(state: PromptState, policy: Policy) -> list[Tensor | None]:
    """Scores [Hkv, N] of every layer (None for layers with a sliding window); they do not depend on the budget.

    Raises:
        ValueError: the state lacks what the scorer needs; the message says how to get it.
    """
    return [None if layer.sliding else policy.scorer.score(layer) for layer in state.layers]


def layer_budgets(state: PromptState, policy: Policy, budget: int) -> list[int]:
    """Entries a head for every layer; the layers that can be evicted average to `budget` exactly."""
    open_layers = [not layer.sliding for layer in state.layers]
    always = sum(policy.protection(state.n_tokens, budget))
    shares = iter(policy.allocation.layer_budgets(budget, sum(open_layers), state.n_tokens, always))
    return [
        next(shares) if is_open else layer.n_tokens for is_open, layer in zip(open_layers, state.layers, strict=True)
    ]


def entries_within(state: PromptState, policy: Policy, n_bytes: int) -> int:
    """The largest budget in entries a head whose keys, values and moment statistics fit into `n_bytes`.

    Raises:
        ValueError: not even one entry a head fits.
    """
    open_layers = [layer for layer in state.layers if not layer.sliding]
    sliding = sum(layer.keys.nbytes + layer.values.nbytes for layer in state.layers if layer.sliding)
    heads, _, d = open_layers[0].keys.shape
    moments = 0 if policy.correction is None else budgets.moments_bytes(d, second=policy.partition > 0)
    itemsize = open_layers[0].keys.element_size()
    if policy.bits == 4:
        itemsize = entry_bytes(d, itemsize) / d
    return min(budgets.from_bytes(n_bytes - sliding, len(open_layers), heads, d, itemsize, moments), state.n_tokens)


def keep_mask(layer: LayerState, policy: Policy, scores: Tensor, budget: int, protected: Tensor) -> Tensor:
    """Which entries of a layer stay, [Hkv, N] bool, under `budget` entries a head of this layer."""
    return _refined([layer], policy, [scores], [budget], protected)[0]


def _masks(state: PromptState, policy: Policy, scores: list[Tensor | None], budget: int) -> dict[int, Tensor]:
    """Index of each layer that can be evicted -> which of its entries stay; layers of one device some at a time."""
    shares, masks = layer_budgets(state, policy, budget), {}
    devices: dict[torch.device, list[LayerState]] = defaultdict(list)
    for layer in state.layers:
        if not layer.sliding:
            devices[layer.keys.device].append(layer)
    for device, layers in devices.items():
        protected = policy.protected(state.n_tokens, budget, device)
        for start in range(0, len(layers), policy.scorer.together):
            group = layers[start : start + policy.scorer.together]
            own = ([scores[layer.index] for layer in group], [shares[layer.index] for layer in group])
            masks |= zip((layer.index for layer in group), _refined(group, policy, *own, protected), strict=True)
    return masks


def _refined(
    layers: list[LayerState], policy: Policy, scores: list[Tensor], shares: list[int], protected: Tensor
) -> tuple[Tensor, ...]:
    """Which entries stay, [Hkv, N] bool for each of some layers, which are refined as one layer of all their heads."""
    counts = [policy.allocation.head_counts(*own, protected) for own in zip(scores, shares, strict=True)]
    layer, every_score, every_count = layers[0], torch.cat(scores), torch.cat(counts)
    if len(layers) > 1:
        keys, values = (torch.cat([getattr(one, name) for one in layers]) for name in ("keys", "values"))
        layer = replace(layer, keys=keys, values=values)
    refined = policy.scorer.refine(layer, every_score, every_count, protected)
    return keep(refined, every_count, protected).split([len(score) for score in scores])


def _whole(layer: LayerState, bits: int = 16) -> RetainedLayer:
    heads, stored, d = layer.keys.shape
    first = 0 if not layer.sliding else max(0, layer.total_tokens - stored)
    positions = torch.arange(first, first + stored, device=layer.keys.device).repeat(heads)
    flat = (layer.keys.reshape(-1, d), layer.values.reshape(-1, d))
    if bits == 4 and not layer.sliding:
        flat = tuple(Quantized.of(each) for each in flat)
    return RetainedLayer(*flat, positions, (stored,) * heads, sliding=layer.sliding)


def _cut(layer: LayerState, policy: Policy, mask: Tensor) -> RetainedLayer:
    keys, values = layer.keys[mask], layer.values[mask]
    if policy.bits == 4:
        keys, values = Quantized.of(keys), Quantized.of(values)
    moments = None
    if policy.correction is not None:
        heads, _, d = layer.keys.shape
        moments = Moments(heads, d, scaling=layer.scaling, second=policy.partition > 0, device=layer.keys.device)
        moments.add(layer.keys, layer.values, mask=~mask)
    return RetainedLayer(
        keys=keys,
        values=values,
        positions=mask.nonzero()[:, 1],
        counts=tuple(mask.sum(dim=1).tolist()),
        moments=moments,
    )
