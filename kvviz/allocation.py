"""How a budget is spread: over the layers, over the heads of a layer, and at last over the entries.

A budget is a number of entries a head, averaged over heads and layers, protected entries included. Every split is exact: totals
are rounded by largest remainders, every head keeps at least one entry and none more than there are.

Sources: uniform is what most methods do; pyramid is PyramidKV (arXiv:2406.02069), adaptive is Ada-KV (arXiv:2407.11550,
algorithm 1). `compatible=True` reproduces the numbers of kvpress 0.5.5, the peer, for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Uniform:
    """The same budget for every layer and head."""

    name: ClassVar[str] = "uniform"

    def layer_budgets(self, budget: int, n_layers: int, n_tokens: int, window: int = 0) -> list[int]:
        """Entries a head for each of n_layers layers, n_layers * min(budget, n_tokens) in all.

        Leave layers with a sliding window out of n_layers. `window` (recent entries that are never evicted) plays no part here.
        """
        _check(budget, n_layers, n_tokens)
        return [min(budget, n_tokens)] * n_layers

    def head_counts(self, scores: Tensor, budget: int, protected: Tensor) -> Tensor:
        """Entries to keep in each head of a layer, [H] int64, H * min(budget, N) in all.

        Args:
            scores: [H, N], higher = keep.
            budget: entries a head of this layer.
            protected: [N] bool, entries that are never evicted.
        """
        _check(budget, 1, scores.shape[1])
        return torch.full((len(scores),), min(budget, scores.shape[1]), device=scores.device)


@dataclass(frozen=True)
class Pyramid(Uniform):
    """Budgets that fall in equal steps from the first layer to the last, around b = budget - window.

    The lowest is b / beta and the highest 2 b - lowest, or N - window and 2 b - highest where it would exceed N - window; the
    window comes on top in every layer. A budget within the window leaves nothing to spread, so every layer gets the budget.

    Attributes:
        beta: how many times smaller than the mean the last layer's share is, 1 (flat) or more.
        compatible: the peer's numbers: b = budget and no window on top; a flat budget where the lowest falls below the window;
            each layer rounded on its own, so that the total may be off by a few entries.
    """

    name: ClassVar[str] = "pyramid"
    beta: float = 20
    compatible: bool = False

    def __post_init__(self) -> None:
        if not self.beta >= 1:
            raise ValueError(f"beta is {self.beta}: 1 is flat, larger is steeper (20 in the paper)")

    def layer_budgets(self, budget: int, n_layers: int, n_tokens: int, window: int = 0) -> list[int]:
        """As `Uniform.layer_budgets`, with `window` entries on top of each layer's share."""
        _check(budget, n_layers, n_tokens)
        budget, window = min(budget, n_tokens), min(window, n_tokens)
        mean = budget if self.compatible else max(budget - window, 0)
        lowest = mean / self.beta
        highest = 2 * mean - lowest
        if highest > n_tokens - window:
            highest = n_tokens - window
            lowest = 2 * mean - highest
        step = (highest - lowest) / max(n_layers - 1, 1)
        if self.compatible:
            falls_back = not n_tokens >= highest >= lowest >= window
            return [budget if falls_back else round(highest - layer * step) for layer in range(n_layers)]
        shares = [highest - layer * step if n_layers > 1 else mean for layer in range(n_layers)]
        base = budget - mean
        return split([base + share for share in shares], n_layers * budget, n_tokens)


@dataclass(frozen=True)
class Adaptive(Uniform):
    """The heads of a layer compete: pool their scores, keep the best, and count how many are whose.

    Protected entries stand outside the competition, which is for b = budget - protected entries a head.

    Attributes:
        alpha: the safeguard, in [0, 1]; each head is sure of its best alpha * b entries (1 is uniform).
        compatible: the peer's safeguard, alpha * budget entries, which protected entries fill first.
    """

    name: ClassVar[str] = "adaptive"
    alpha: float = 0.2
    compatible: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(
                f"alpha is {self.alpha}: 0 lets heads compete for everything, 1 gives each the same (0.2 in the paper)"
            )

    def head_counts(self, scores: Tensor, budget: int, protected: Tensor) -> Tensor:
        """As `Uniform.head_counts`; equal scores are taken from the heads in turn."""
        even = super().head_counts(scores, budget, protected)
        heads, n = scores.shape
        held = int(protected.sum())
        share = min(budget, n) - held
        if share <= 0 or budget >= n:
            return even
        sure = max(int(self.alpha * budget) - held, 0) if self.compatible else int(self.alpha * share)
        sure = max(sure, 1 - held)
        contested = scores[:, ~protected].sort(dim=1, descending=True).values[:, sure:]
        order = (
            contested.mT.flatten().sort(descending=True, stable=True).indices
        )  # column by column: ties go round the heads
        won = torch.bincount(order[: heads * (share - sure)] % heads, minlength=heads)
        return won + sure + held


ALLOCATIONS: dict[str, type[Uniform]] = {kind.name: kind for kind in (Uniform, Pyramid, Adaptive)}


def allocation(name: str, **options: float | bool) -> Uniform | Pyramid | Adaptive:
    """An allocation by name, "uniform", "pyramid" (beta, compatible) or "adaptive" (alpha, compatible).

    Raises ValueError for a name or an option that does not exist.
    """
    if name not in ALLOCATIONS:
        raise ValueError(f"there is no allocation {name!r}; choose from {', '.join(ALLOCATIONS)}")
    kind = ALLOCATIONS[name]
    known = [field.name for field in fields(kind)]
    if unknown := [option for option in options if option not in known]:
        raise ValueError(f"allocation {name!r} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return kind(**options)


def split(shares: Sequence[float], total: int, most: int) -> list[int]:
    """Whole numbers near `shares` (whose sum is about `total`), each from 1 to `most`, that add up to `total` exactly.

    Largest remainders first, the earlier of equals; what the bounds push away comes off the largest shares.
    """
    counts = [min(max(math.floor(share + 1e-9), 1), most) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    while (missing := total - sum(counts)) > 0:
        for i in [i for i in by_remainder if counts[i] < most][:missing]:
            counts[i] += 1
    while sum(counts) > total:
        counts[max(range(len(counts)), key=counts.__getitem__)] -= 1
    return counts


def keep(scores: Tensor, counts: Tensor, protected: Tensor, *, sinks: int | None = None) -> Tensor:
    """Which entries stay, [H, N] bool: all protected ones, and of the rest the best of each head.

    Args:
        scores: [H, N], higher = keep; of equal scores the earlier entry stays.
        counts: [H] int64, entries to keep in each head, exactly.
        protected: [N] bool. Where a head keeps fewer, its sinks stay first (the earliest first), then the most recent.
        sinks: how many of the protected entries are sinks. By default those before the first unprotected entry, or only the
            very first where everything is protected.

    Raises ValueError where scores are NaN or a count is not from 1 to N.
    """
    heads, n = scores.shape
    if bool(torch.isnan(scores).any()):
        raise ValueError("scores hold NaN: nothing can be ranked; check the scorer's input (float16 overflow?)")
    if bool(((counts < 1) | (counts > n)).any()):
        raise ValueError(f"counts {counts.tolist()} must lie between 1 and {n}, the entries that there are")
    fixed, free = protected.nonzero()[:, 0], (~protected).nonzero()[:, 0]
    if sinks is None:
        sinks = int(free[0]) if len(free) else 1
    fixed = torch.cat((fixed[:sinks], fixed[sinks:].flip(0)))
    best = scores[:, free].sort(dim=1, descending=True, stable=True).indices
    order = torch.cat((fixed.expand(heads, -1), free[best]), dim=1)
    stays = torch.arange(n, device=scores.device) < counts[:, None]
    return torch.zeros_like(stays).scatter_(1, order, stays)


def positions(mask: Tensor) -> tuple[Tensor, Tensor]:
    """mask [H, N] bool -> the kept positions head after head, sorted in each, [sum] int64, and their counts [H] int64."""
    return mask.nonzero()[:, 1], mask.sum(dim=1)


def _check(budget: int, n_layers: int, n_tokens: int) -> None:
    if not budget >= 1:
        raise ValueError(f"budget is {budget}: keep at least one entry a head")
    if n_layers < 0 or n_tokens < 1:
        raise ValueError(f"there are {n_layers} layers and {n_tokens} tokens: nothing to spread the budget over")
