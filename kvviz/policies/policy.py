"""A policy: scorer x allocation x protection x correction x bits, each chosen on its own."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvviz.allocation import Adaptive, Pyramid, Uniform, allocation
from kvviz.policies.base import Scorer
from kvviz.policies.registry import scorer

PUBLISHED = "published"
"""Stands for the setting that a method was published with."""


@dataclass(frozen=True)
class Policy:
    """How a prompt's cache is cut down, and how the loss is made good.

    Attributes:
        scorer: gives every entry a score.
        allocation: spreads the budget over layers and heads.
        sinks, recent: first and last entries that are never evicted; recent in (0, 1) is a share of the budget.
        correction: order of MomentKV's correction (0 or 1), or None.
        partition: p in [0, 1] of the corrected partition function; 0 is the paper's Jensen bound.
        bits: 16 keeps the model's dtype, 4 stores what is kept in 4-bit HQQ.
    """

    scorer: Scorer
    allocation: Uniform | Pyramid | Adaptive
    sinks: int = 0
    recent: float = 0
    correction: int | None = None
    partition: float = 0.0
    bits: int = 16

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sinks) and self.sinks >= 0 and self.sinks == int(self.sinks)):
            raise ValueError(f"sinks is a number of entries, 0 or more; got {self.sinks}.")
        if not (
            math.isfinite(self.recent) and self.recent >= 0 and (self.recent < 1 or self.recent == int(self.recent))
        ):
            raise ValueError(f"recent is a number of entries, or a share of the budget below 1; got {self.recent}.")
        if self.correction not in (None, 0, 1):
            raise ValueError(f"correction is None, 0 or 1 (the order of the moments); got {self.correction!r}.")
        if not 0 <= self.partition <= 1:
            raise ValueError(f"partition is a number from 0 (the paper's bound) to 1; got {self.partition}.")
        if self.bits not in (16, 4):
            raise ValueError(f"bits is 16 (the model's dtype) or 4 (HQQ); got {self.bits!r}.")

    @property
    def name(self) -> str:
        """The scorer's name in the registry."""
        return self.scorer.name

    @property
    def title(self) -> str:
        """The name that people read."""
        return self.scorer.title

    @property
    def label(self) -> str:
        """The title and what differs from the published setting: "CapKV (tau 2, adaptive)"."""
        words = [_words(key, value) for key, value in self.changes().items()]
        return self.title + (f" ({', '.join(words)})" if words else "")

    def changes(self) -> dict[str, Any]:
        """The settings that are not as published: `policy(self.name, **changes)` makes this policy again."""
        own = policy(self.name, **asdict(self.scorer))  # protection may follow the scorer's window
        usual = own.settings() | asdict(policy(self.name).scorer)
        return {key: value for key, value in self.settings().items() if usual.get(key, ...) != value}

    def settings(self) -> dict[str, Any]:
        """Everything that `policy(self.name, **settings)` needs to make this policy again, as plain values."""
        options = asdict(self.scorer)
        options |= {key: value for key, value in asdict(self.allocation).items() if key in ("alpha", "beta")}
        return options | {
            "allocation": self.allocation.name,
            "sinks": self.sinks,
            "recent": self.recent,
            "correction": self.correction,
            "partition": self.partition,
            "bits": None if self.bits == 16 else self.bits,
        }

    @property
    def keeps_all(self) -> bool:
        """The full cache: nothing is evicted at any budget."""
        return self.name == "full"

    def protection(self, n_tokens: int, budget: int) -> tuple[int, int]:
        """(sinks, recent) entries that really are protected under a budget: sinks first, then the most recent.

        What the method leaves unscored is protected too, even if less was asked for (SnapKV's window).
        """
        first, last = self.scorer.unscored
        sinks = min(max(int(self.sinks), first), budget, n_tokens)
        recent = max(round(self.recent * budget) if 0 < self.recent < 1 else int(self.recent), last)
        return sinks, min(recent, budget - sinks, n_tokens - sinks)

    def protected(self, n_tokens: int, budget: int, device: torch.device | str = "cpu") -> Tensor:
        """The entries that are never evicted, [N] bool."""
        sinks, recent = self.protection(n_tokens, budget)
        index = torch.arange(n_tokens, device=device)
        return (index < sinks) | (index >= n_tokens - recent)

    def with_protection(self, sinks: int, recent: float) -> Policy:
        """The same policy with other protected entries: all methods on an equal footing."""
        if self.keeps_all:
            return self
        return replace(self, scorer=_with_sinks(self.scorer, sinks), sinks=sinks, recent=recent)


def policy(
    name: str,
    *,
    sinks: int | str = PUBLISHED,
    recent: float | str = PUBLISHED,
    allocation: str | Uniform | Pyramid | Adaptive = PUBLISHED,
    correction: int | str | None = PUBLISHED,
    partition: float = 0.0,
    bits: int | None = None,
    **options: Any,
) -> Policy:
    """Make a policy by name; what is left out is as published.

    Args:
        name: of the registry, see `kvviz.policies.names()`.
        sinks, recent: protected entries; recent in (0, 1) is a share of the budget.
        allocation: "uniform", "pyramid", "adaptive", or an object of kvviz.allocation.
        correction: None, 0 or 1.
        partition: p in [0, 1].
        bits: 4, or None for the model's dtype.
        options: the scorer's (`tau`, `variant`, `window`, ...) and the allocation's (`alpha`, `beta`).

    Raises:
        ValueError: unknown name or option, or a value out of range; the message says what is allowed.
    """
    shares = {key: options.pop(key) for key in ("alpha", "beta") if key in options}
    chosen = scorer(name, **options)
    published = chosen.published
    kind = published.allocation if allocation == PUBLISHED else allocation
    return Policy(
        scorer=chosen if sinks == PUBLISHED else _with_sinks(chosen, sinks),
        allocation=_allocation(kind, shares),
        sinks=published.sinks if sinks == PUBLISHED else sinks,
        recent=published.recent if recent == PUBLISHED else recent,
        correction=published.correction if correction == PUBLISHED else correction,
        partition=partition,
        bits=16 if bits is None else bits,
    )


def _with_sinks(chosen: Scorer, sinks: int) -> Scorer:
    """The scorer, leaving as many first tokens out of its own sums as are protected, where it leaves any out."""
    return replace(chosen, sinks=sinks) if hasattr(chosen, "sinks") else chosen


def _allocation(kind, shares: dict[str, float]):
    if not isinstance(kind, str):
        return kind
    stray = set(shares) - {{"pyramid": "beta", "adaptive": "alpha"}.get(kind)}
    if stray:
        owner = {"alpha": "adaptive", "beta": "pyramid"}[stray.pop()]
        raise ValueError(f"{' and '.join(shares)} need another allocation: choose allocation={owner!r}, not {kind!r}.")
    wanted = {"pyramid": "beta", "adaptive": "alpha"}.get(kind)
    return allocation(kind, **({wanted: shares[wanted]} if wanted in shares else {}))


def _words(key: str, value: Any) -> str:
    name = key.replace("_", " ")
    match key, value:
        case "correction", None:
            return "no correction"
        case "correction", order:
            return f"correction of order {order}"
        case "allocation", kind:
            return f"{kind} allocation"
        case "bits", bits:
            return f"{bits or 16} bits"
        case _, bool():
            return name if value else f"no {name}"
        case _, int() | float():
            return f"{name} {value:g}"
        case _:
            return f"{name} {value}"
