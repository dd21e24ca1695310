"""Greedy log-determinant, ours: the capacity that CapKV's one-shot scores approximate, entry by entry.

Each pick is the entry with the largest true gain log(1 + w_i v_i' A^-1 v_i) of log det A (CapKV,
arXiv:2604.25975, left side of equation 7), averaged over the g query heads. A then grows by it, and its near
copies lose their worth at once. Gains are positive and never grow, so the capacity is at least 1 - 1/e of
what the best subset of that size has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvviz.policies.attention_scores import precise, with_unscored
from kvviz.policies.base import Published, Scorer, require
from kvviz.policies.capkv import CapKV
from kvviz.policies.future_queries import check_future
from kvviz.state import LayerState


@dataclass(frozen=True)
class GreedyLogDet(Scorer):
    """Keep the entries that a greedy search for capacity takes first.

    Attributes:
        tau: how much the expected query counts, as in CapKV's published variant.
        sinks: first tokens that are left out, and protected, as there.
        future_positions: how many next positions the expected query is averaged over.
        picks: entries that `score` picks one by one, O(N d) each; the rest follow by their gain then.
            A larger budget picks on (`refine`).
    """

    tau: float = 5.0
    sinks: int = 4
    future_positions: int = 512
    picks: int = 256

    name = "greedy_logdet"
    title = "Greedy log-det"
    summary = "Keeps what a step-by-step search for the largest information capacity takes first."
    paper = "2604.25975"
    formula = (
        r"s_i = -\text{order of pick}, \quad"
        r" \arg\max_i \tfrac1g \sum_h \log\bigl(1 + w_i\, v_i^\top A_C^{-1} v_i\bigr)"
    )

    def __post_init__(self) -> None:
        require(math.isfinite(self.tau) and self.tau >= 0, f"tau is 0 or more, and finite; got {self.tau}.")
        check_future(self.future_positions, self.sinks)
        require(self.picks == int(self.picks) and self.picks >= 1, f"picks is 1 or more; got {self.picks}.")

    @property
    def published(self) -> Published:
        """CapKV's."""
        return Published(sinks=self.sinks)

    @property
    def unscored(self) -> tuple[int, int]:
        """The sinks."""
        return self.sinks, 0

    def score(self, layer: LayerState) -> Tensor:
        """-(order of pick), [Hkv, N]; the sinks, which are not ranked, get the row's maximum, -1."""
        values = precise(layer.values)[:, self.sinks :]
        if values.shape[1] == 0:
            return with_unscored(values[..., 0], first=layer.n_tokens)
        capkv = CapKV(tau=self.tau, sinks=self.sinks, future_positions=self.future_positions)
        return with_unscored(rank_greedily(values, capkv.weights(layer), self.picks), first=self.sinks)

    def refine(self, layer: LayerState, scores: Tensor, counts: Tensor, protected: Tensor) -> Tensor:
        """The same ranking, picked on to the largest head's budget where `score` stopped before it."""
        wanted = int(counts.max())
        return scores if wanted <= self.picks else replace(self, picks=wanted).score(layer)


def rank_greedily(values: Tensor, weights: Tensor, picks: int) -> Tensor:
    """Rank entries by greedy gain of log det(I + sum w v v').

    Sherman-Morrison, all heads at once: each pick brings A^-1 and the forms v_i' A^-1 v_i up to date.

    Args:
        values: [H, N, d]
        weights: [H, g, N]; one A for each.
        picks: how many are picked; those left are ranked by the gain that they would bring next.

    Returns:
        [H, N]: -1 for the first pick, -2 for the second, ...
    """
    heads, n, d = values.shape
    inverse = torch.eye(d, device=values.device, dtype=values.dtype).repeat(heads, weights.shape[1], 1, 1)
    forms = values.square().sum(dim=-1)[:, None].expand_as(weights).clone()  # [H, g, N]
    head = torch.arange(heads, device=values.device)
    taken = torch.zeros(heads, n, dtype=torch.bool, device=values.device)
    order = []
    for _ in range(min(picks, n)):
        best = _gain(weights, forms, taken).argmax(dim=-1)  # [H]
        taken[head, best] = True
        order.append(best)
        direction = inverse @ values[head, best][:, None, :, None]  # A^-1 v, [H, g, d, 1]
        weight, form = weights[head, :, best], forms[head, :, best]  # [H, g]
        share = (weight / (1 + weight * form))[..., None]
        overlap = direction[..., 0] @ values.mT  # v' A^-1 v_i, [H, g, N]
        forms.addcmul_(overlap.square(), share, value=-1).clamp_min_(0)
        inverse -= share[..., None] * direction * direction.mT
    rest = _gain(weights, forms, taken).argsort(dim=-1, descending=True)[:, : n - len(order)]
    ranking = torch.cat((torch.stack(order, dim=1), rest), dim=1)
    places = -torch.arange(1, n + 1, device=values.device, dtype=values.dtype)
    return torch.empty_like(values[..., 0]).scatter_(1, ranking, places.expand(heads, n))


def _gain(weights: Tensor, forms: Tensor, taken: Tensor) -> Tensor:
    """Mean gain of log det A over the g weightings, [H, N]; never again for what was taken."""
    return torch.log1p(weights * forms).mean(dim=1).masked_fill(taken, float("-inf"))
