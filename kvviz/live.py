"""Eviction while decoding: the second stage again, on the live cache, every few steps.

CapKV's setting evicts every 512 steps, MomentKV's one entry a step. Scores come from the queries of the last steps, kept in
a ring; positions go on counting; what is evicted joins the moments. So memory stays bounded however long the generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvviz.allocation import keep
from kvviz.evict import Retained
from kvviz.moments import Moments
from kvviz.policies.policy import Policy
from kvviz.state import STORED_QUERIES, LayerState, PromptState, QueryStatistics

if TYPE_CHECKING:
    from kvviz.cache import LayerCache


@dataclass(frozen=True)
class Live:
    """When to evict while decoding.

    Attributes:
        every: tokens between two evictions; 1 is one entry a step.
        budgets: entries a head to cut back to, one for each row.
        piece: the longest forward of several tokens (a question) that there will be.
    """

    every: int
    budgets: tuple[int, ...] = ()
    piece: int = 1

    def __post_init__(self) -> None:
        if self.every != int(self.every) or self.every < 1:
            raise ValueError(f"Eviction while decoding happens every 1 or more tokens; got {self.every}.")

    @property
    def room(self) -> int:
        """Entries that a row may hold beyond its budget."""
        return self.every + self.piece


@dataclass
class LiveRow:
    """What one layer of one row remembers between evictions.

    Attributes:
        counts: [Hkv] entries to keep a head; None until it is first decided.
        positions: true positions of each head's entries, as of the last eviction.
        read: tokens read at that time.
        moments: of everything evicted; None where nobody asks for them.
        mass: attention that each head's entries had received at the start; None where nobody asks.
    """

    policy: Policy
    budget: int
    counts: Tensor | None
    positions: list[Tensor]
    read: int
    moments: Moments | None
    mass: list[Tensor] | None

    @property
    def room(self) -> int:
        """Entries that a head may gain before the budget is reached for the first time."""
        return max(0, self.budget - self.read) if self.counts is None else 0


@dataclass
class LayerLive:
    """One layer of all rows that evict while decoding."""

    live: Live
    state: PromptState
    index: int
    kept: list[Retained]
    rows: dict[int, LiveRow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layer = self.state.layers[self.index]
        self.read = self.last = self.state.n_tokens
        device = self.layer.keys.device
        for number, kept in enumerate(self.kept):
            if kept.policy.keeps_all:
                continue
            part = kept.layers[self.index]
            cut = sum(part.counts) < self.layer.keys.shape[0] * self.state.n_tokens
            positions = list(part.positions.split(part.counts))
            counts = torch.tensor(part.counts, device=device) if cut else None
            moments = _moments(self.layer, kept, positions)
            mass = None
            if "attention_mass" in kept.policy.scorer.needs:
                mass = [self.layer.attention_mass[h, where] for h, where in enumerate(positions)]
            self.rows[number] = LiveRow(
                kept.policy, self.live.budgets[number], counts, positions, self.read, moments, mass
            )
        self.kept = []
        past = self.layer.queries[None].expand(len(self.live.budgets), -1, -1, -1)
        self.ring = past.new_empty(*past.shape[:2], STORED_QUERIES, past.shape[-1])
        self.seen = past.shape[
            2
        ]  # queries written to the ring so far; the newest stands at (seen - 1) % STORED_QUERIES
        self.ring[:, :, : self.seen] = past

    def saw(self, q: Tensor) -> None:
        """Queries [R, Hq, T, d] after RoPE of the new tokens."""
        t = q.shape[2]
        recent = q[:, :, -STORED_QUERIES:]
        where = torch.arange(self.seen + t - recent.shape[2], self.seen + t, device=q.device) % STORED_QUERIES
        self.ring[:, :, where] = recent
        self.seen += t
        self.read += t

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, renumbered."""
        self.rows = {new: self.rows[old] for new, old in enumerate(rows) if old in self.rows}
        self.ring = self.ring[rows]

    def evict(self, cache: LayerCache) -> None:
        """Cut every row back to its budget, if it is time."""
        if self.read - self.last < self.live.every:
            return
        self.last = self.read
        segments = {}
        for number, row in self.rows.items():
            kept = self._cut(cache, number, row)
            if kept is not None:
                segments |= {number * cache.n_heads + head: segment for head, segment in enumerate(kept)}
        if segments:
            changed = {number // cache.n_heads for number in segments}
            cache.remove(changed)
            cache.add(segments, [self.live.room] * cache.n_rows)
            for number in changed & {n for n, row in self.rows.items() if row.policy.correction is not None}:
                row = self.rows[number]
                cache.corrections[number] = row.moments.finalise(row.policy.correction, row.policy.partition)
            cache.stack()

    def positions(self, number: int) -> list[Tensor]:
        """True positions of the entries of each head of a row, as of now."""
        row = self.rows[number]
        new = torch.arange(row.read, self.read, device=self.ring.device)
        return [torch.cat((old, new)) for old in row.positions]

    def _cut(self, cache: LayerCache, number: int, row: LiveRow):
        """The segments that a row keeps, head by head, or None if it is within its budget."""
        heads = cache.row(number)
        total = sum(block.length for block, _ in heads)
        target = len(heads) * row.budget if row.counts is None else int(row.counts.sum())
        if total <= target:
            return None
        queries, mean, cov = self._queries(number)
        positions = self.positions(number)
        kept = []
        for members in _equal(heads):
            layer = self._layer(cache, heads, members, positions, queries, mean, cov, row)
            mask = self._mask(row, layer, members)
            if row.moments is not None:
                _add(row.moments, members, layer, ~mask)
            kept += [(head, mask[i].nonzero()[:, 0]) for i, head in enumerate(members)]
        kept.sort(key=lambda each: each[0])
        row.read = self.read
        row.positions = [positions[head][index] for head, index in kept]
        return [heads[head][0].take(heads[head][1], index) for head, index in kept]

    def _queries(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """The last queries [Hq, w, d] of a row in order, and mean and covariance before RoPE of the same."""
        w = min(self.seen, STORED_QUERIES)
        where = torch.arange(self.seen - w, self.seen, device=self.ring.device)
        queries = self.ring[number][:, where % STORED_QUERIES]
        statistics = QueryStatistics(0)
        at = where - self.seen + self.read
        statistics.add(self.layer.rotary.unrotate(queries.float(), at), start=0)
        return queries, *statistics.result()

    def _layer(self, cache, heads, members, positions, queries, mean, cov, row) -> LayerState:
        """What a policy looks at: the live entries of some heads, as if they were a prompt's."""
        g = queries.shape[0] // len(heads)
        own = [h * g + i for h in members for i in range(g)]
        contents = [tuple(part[i] for part in block.contents()) for block, i in (heads[h] for h in members)]
        mass = [
            _fair(block.mass[i, : block.length]) for block, i in (heads[h] for h in members) if block.mass is not None
        ]
        d = queries.shape[-1]
        columns = [c for q in own for c in range(q * d, (q + 1) * d)]
        return replace(
            self.layer,
            keys=torch.stack([k for k, _ in contents]),
            values=torch.stack([v for _, v in contents]),
            queries=queries[own],
            query_mean=mean[own],
            query_cov=cov[own],
            projection=None if self.layer.projection is None else lambda: self.layer.o_proj[:, columns],
            attention_mass=torch.stack(mass) if mass else None,
            probes=None,
            total_tokens=self.read,
            positions=torch.stack([positions[h] for h in members]),
            moments=None if row.moments is None else row.moments[members],
        )

    def _mask(self, row: LiveRow, layer: LayerState, members: list[int]) -> Tensor:
        scorer = row.policy.scorer.while_decoding(self.live.every)
        scores = scorer.score(layer)
        n = layer.n_tokens
        if row.counts is None:
            always = sum(row.policy.protection(n, row.budget))
            open_layers = [i for i, other in enumerate(self.state.layers) if not other.sliding]
            shares = row.policy.allocation.layer_budgets(row.budget, len(open_layers), n, always)
            own = shares[open_layers.index(self.index)]
            row.counts = row.policy.allocation.head_counts(scores, own, row.policy.protected(n, own, scores.device))
        counts = row.counts[members]
        protected = row.policy.protected(n, int(counts.max()), scores.device)
        return keep(scorer.refine(layer, scores, counts, protected), counts, protected)


def _fair(mass: Tensor) -> Tensor:
    """An entry that no query has seen yet counts as much as the heaviest: it cannot be judged."""
    return torch.where(mass > 0, mass, mass.max())


def _equal(heads) -> list[list[int]]:
    """Heads of equal length together."""
    groups: dict[int, list[int]] = {}
    for head, (block, _) in enumerate(heads):
        groups.setdefault(block.length, []).append(head)
    return list(groups.values())


def _moments(layer: LayerState, kept: Retained, positions: list[Tensor]) -> Moments | None:
    """Statistics of what the prefill's eviction dropped, for a row that corrects or scores with them."""
    policy = kept.policy
    if policy.correction is None and not policy.scorer.uses_moments:
        return None
    stored = kept.layers[layer.index].moments
    if stored is not None:
        return stored.clone()
    heads, n, d = layer.keys.shape
    gone = torch.ones(heads, n, dtype=torch.bool, device=layer.keys.device)
    for head, where in enumerate(positions):
        gone[head, where] = False
    moments = Moments(heads, d, scaling=layer.scaling, second=policy.partition > 0, device=layer.keys.device)
    return moments.add(layer.keys, layer.values, mask=gone)


def _add(moments: Moments, members: list[int], layer: LayerState, gone: Tensor) -> None:
    """Count the entries `gone` [len(members), n] of these heads as evicted."""
    columns = gone.any(dim=0).nonzero()[:, 0]
    shape = (moments.lead[0], len(columns))
    keys = layer.keys.new_zeros(*shape, layer.keys.shape[-1])
    values, mask = torch.zeros_like(keys), torch.zeros(shape, dtype=torch.bool, device=keys.device)
    keys[members], values[members], mask[members] = layer.keys[:, columns], layer.values[:, columns], gone[:, columns]
    moments.add(keys, values, mask=mask)
