"""MomentKV (arXiv:2606.01563): evict what little attention goes to and the statistics of the evicted already predict.

score(j) = alpha_j ||r_j|| with the moment residual r_j of eq. 10, the lowest goes first. The residual depends on what was
evicted before, so `score` gives the first step (nothing evicted yet, r_j = v_j) and `refine` does the rest once it is known
how many entries each head loses. alpha is the observation window's attention over the whole prompt (mean over its queries and
the query heads of a group), the paper's prefill protocol; it stays the same while entries leave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvviz.gather import take
from kvviz.moments import Moments
from kvviz.policies.attention_scores import by_group, check_window, precise, window_attention
from kvviz.policies.base import Published, Scorer, require
from kvviz.sequential import evict_in_order
from kvviz.state import LayerState

ORDERS = ("one batch", "rounds", "sequential")


@dataclass(frozen=True)
class MomentKV(Scorer):
    """Keep what is attended to and is not predicted by the moments of what was evicted.

    Attributes:
        window: last queries that are asked.
        block: adjacent entries that are scored (by their mean) and evicted together. Blocks are counted from the first
            unprotected entry. Heads lose an exact number of entries, so the last block that goes may go in part: its members of
            lowest score. In sequential order entries leave one by one.
        order_of_eviction: "sequential" is algorithm 1, new statistics after every entry (seconds for a long prompt); "rounds"
            evicts in equal parts with new statistics in between, its affordable approximation and the default; "one batch"
            never renews them, which leaves alpha_j ||v_j||.
        rounds: how many parts.
    """

    window: int = 32
    block: int = 4
    order_of_eviction: str = "rounds"
    rounds: int = 16

    name = "momentkv"
    title = "MomentKV"
    summary = "Evicts what is little attended to and predicted by the statistics of what went before."
    paper = "2606.01563"
    uses_moments = True
    together = 3
    formula = r"s_j = \alpha_j \Bigl\lVert v_j - \bar v - \tfrac{c}{n_e} \tilde S (k_j - \bar k) \Bigr\rVert"

    def __post_init__(self) -> None:
        check_window(self.window)
        for option in ("block", "rounds"):
            value = getattr(self, option)
            require(isinstance(value, int) and value >= 1, f"{option} is a whole number, 1 or more; got {value!r}.")
        require(
            self.order_of_eviction in ORDERS,
            f"order_of_eviction is one of {', '.join(ORDERS)}; got {self.order_of_eviction!r}.",
        )

    @property
    def published(self) -> Published:
        """The paper's protocol: first token and window protected, head budgets as in Ada-KV, correction of order 1."""
        return Published(sinks=1, recent=self.window, allocation="adaptive", correction=1)

    def score(self, layer: LayerState) -> Tensor:
        """alpha_j ||r_j||, [Hkv, N], which is alpha_j ||v_j|| while nothing is evicted."""
        left = precise(layer.values) if layer.moments is None else layer.moments.residual(layer.keys, layer.values)
        return self._attention(layer) * left.norm(dim=-1)

    def while_decoding(self, every: int) -> MomentKV:
        """Algorithm 1: one entry a step goes by the current query's attention; several at once by the window's."""
        return replace(self, window=1 if every == 1 else self.window, order_of_eviction="one batch", block=1)

    def refine(self, layer: LayerState, scores: Tensor, counts: Tensor, protected: Tensor) -> Tensor:
        """The order in which entries leave, as scores [Hkv, N].

        Evicted entries get whole numbers below 0, from the first to leave (the lowest) to the last (-1). The others keep theirs.
        In one batch without blocks the scores are that order already, and come back as they are.
        """
        if self.order_of_eviction == "one batch" and self.block == 1:
            return scores
        free = (~protected).nonzero()[:, 0]
        losses = (layer.n_tokens - counts).clamp(max=len(free))  # [Hkv]; beyond that only protected entries are left
        if not int(losses.max()):
            return scores
        length = precise(layer.values).norm(dim=-1)
        alpha = torch.where(length > 0, scores / length, 0)  # nothing is evicted yet: scores are alpha_j ||v_j||
        if self.order_of_eviction == "sequential":
            order = evict_in_order(
                layer.keys, layer.values, alpha[:, None], losses, protected=protected, scaling=layer.scaling
            )
            rank = torch.arange(order.shape[1], device=order.device) - losses[:, None]
            return scores.index_put(_cells(order >= 0, order), rank[order >= 0].to(scores))
        rounds = 1 if self.order_of_eviction == "one batch" else self.rounds
        run = _Blocks(layer, alpha, free, self.block)
        parts = [run.evict(losses * part // rounds, split=part == rounds) for part in range(1, rounds + 1)]
        leaving, position, rank = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
        return scores.index_put(_cells(leaving, position), (rank - losses[:, None])[leaving].to(scores))

    def _attention(self, layer: LayerState) -> Tensor:
        """alpha [Hkv, N], mean over the window's queries and the group's heads."""
        return by_group(window_attention(layer, self.window).mean(1), layer).mean(1)


class _Blocks:
    """The unprotected entries of one layer as blocks [H, blocks, block], the last one padded, and which of them are still there.

    Residuals are computed for a shrinking selection, `open`, of the blocks: all that are left, and some that have gone.
    """

    def __init__(self, layer: LayerState, alpha: Tensor, free: Tensor, block: int) -> None:
        heads, _, self.d = layer.keys.shape
        index = torch.cat((free, free[-1:].expand(-len(free) % block)))
        self.position = index.view(-1, block)
        self.real = (torch.arange(len(index), device=free.device) < len(free)).view(-1, block)
        self.size = self.real.sum(1).repeat(heads, 1)  # [H, blocks], 0 once a block has gone
        self.alpha = alpha[:, self.position] * self.real
        pairs = torch.cat((precise(layer.keys), precise(layer.values)), dim=-1).index_select(1, index)
        self.pairs = pairs.view(heads, *self.position.shape, -1)  # keys and values, [H, blocks, block, d + dv]
        self.open = torch.arange(len(self.position), device=free.device).expand(heads, -1)
        self.open_pairs, self.open_alpha, self.score = self.pairs, self.alpha, torch.empty_like(self.alpha)
        self.gone = torch.zeros(heads, 1, dtype=torch.int64, device=free.device)
        self.moments = Moments(heads, self.d, scaling=layer.scaling, dtype=pairs.dtype, device=free.device)
        self.started = False

    def evict(self, target: Tensor, split: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Go on, lowest blocks first, until `target` [H] entries have left each head, or rather the last whole block before.

        Args:
            split: whether the next block goes in part, so that the target is met exactly; nothing can leave after that.

        Returns leaving [H, m] bool, position [H, m] and rank [H, m] (0 is the first that ever left) of m candidates.
        """
        self._update_scores()
        mean = (self.score.sum(2) / self.size).masked_fill(self.size == 0, torch.inf)
        order = mean.argsort(dim=1, stable=True)
        size = self.size.gather(1, order)
        end = size.cumsum(1)
        quota = target[:, None] - self.gone
        if not split:
            quota = end.masked_fill(end > quota, 0).amax(1, keepdim=True)
        start = end - size
        goes = start < quota
        most = int(goes.sum(1).max())
        taken, start, goes = order[:, :most], start[:, :most], goes[:, :most]
        real = self.real[taken]
        rank = start[..., None] + _ranks(take(self.score, taken).masked_fill(~real, torch.inf))
        leaving = (real & (rank < quota[..., None])).flatten(1)
        self.moments.add(*self._entries(take(self.pairs, taken)), mask=leaving)
        result = leaving, self.position[taken].flatten(1), (rank + self.gone[..., None]).flatten(1)
        self.gone = self.gone + quota
        self.size.scatter_(1, taken, size[:, :most].masked_fill(goes, 0))
        return result

    def _update_scores(self) -> None:
        """alpha_j ||r_j|| of the open blocks with the statistics as they are; blocks that have gone are closed first."""
        left = self.size > 0
        most = int(left.sum(1).max())
        if most < 0.8 * self.open.shape[1]:
            self.open = left.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
            self.open_pairs, self.open_alpha = take(self.pairs, self.open), take(self.alpha, self.open)
        keys, values = self._entries(self.open_pairs)
        residual = self.moments.residual(keys, values) if self.started else values
        score = self.open_alpha * residual.norm(dim=-1).view(self.open_alpha.shape)
        self.score.scatter_(1, self.open[..., None].expand_as(score), score)
        self.started = True

    def _entries(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks [H, m, block, d + dv] -> keys [H, m block, d] and values [H, m block, dv]."""
        pairs = blocks.flatten(1, 2)
        return pairs[..., : self.d], pairs[..., self.d :]


def _ranks(score: Tensor) -> Tensor:
    """Place of each score among those of its block [..., block], 0 the lowest; of equal ones the first comes first."""
    one, other = score.unsqueeze(-1), score.unsqueeze(-2)
    before = torch.ones(score.shape[-1], score.shape[-1], dtype=torch.bool, device=score.device).tril(-1)
    return ((other < one) | ((other == one) & before)).sum(-1)


def _cells(mask: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """(heads, positions) of what mask [H, m] selects of position [H, m]."""
    return mask.nonzero()[:, 0], position[mask]
