"""Everything that the pages Values, Heads and Capacity show, as plain numbers: no Streamlit, no Plotly, no forward.

    numbers = kvviz.analysis.of(state)
    view = numbers.head(policy, budget=256, layer=12, head=4)
    print(view.angle, view.relative_error, view.kept.sum())

All of it comes from the cached state. Errors are averages over the probe queries: those of the question and of the full
cache's own continuation once a run has left them, the prompt's last query before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np

from kvviz.analysis.capacities import budgets_of, capacity_curves, spearman
from kvviz.analysis.core import Pace, Setting, Store, checked_budgets, in_time, shared
from kvviz.analysis.head import error_curves, head_view, order_of
from kvviz.analysis.maps import error_maps
from kvviz.analysis.views import CAPACITIES, MEASURES, CapacityCurves, ErrorCurves, ErrorMap, HeadView
from kvviz.policies.policy import Policy
from kvviz.prefill import Progress
from kvviz.state import PromptState

__all__ = [
    "CAPACITIES",
    "MEASURES",
    "SHARES",
    "Analysis",
    "CapacityCurves",
    "ErrorCurves",
    "ErrorMap",
    "HeadView",
    "Pace",
    "Setting",
    "budgets_of",
    "of",
    "spearman",
    "steps",
]

SHARES = (0.0, 0.25, 0.5, 0.65, 0.75, 0.85, 0.9, 0.95, 0.975, 0.99)
"""Shares removed at which the capacity curves are worked out."""

TOGETHER = 8
"""Error maps that are worked out at once, for the positions of a slider."""


class Analysis(Store):
    """The numbers of one prompt state. Use `of(state)`, so that all pages and sessions share what was worked out."""

    def head(self, policy: Policy, budget: int, layer: int, head: int) -> HeadView:
        """One query head under a policy: the plane, the kept set, the arrows and the parts of the error."""
        return self.result(
            ("head", policy, budget, layer, head),
            lambda: head_view(self, policy, budget, layer, head, steps(self.state.n_tokens)),
        )

    def heads(self, settings: Iterable[Setting], layer: int, head: int, pace: Pace) -> dict[Setting, HeadView]:
        """The same query head under several settings; see `in_time`."""
        get, holds = (lambda s: self.head(*s, layer, head)), (lambda s: self.holds(("head", *s, layer, head)))
        return in_time(settings, get, holds, pace)

    def error_by_budget(
        self, policies: Sequence[Policy], budgets: Sequence[int] | None, layer: int, head: int
    ) -> ErrorCurves:
        """Relative error of one query head against the budget; `steps(N)` by default, clipped to 1 ... N."""
        chosen = steps(self.state.n_tokens) if budgets is None else checked_budgets(budgets, self.state.n_tokens)
        make = lambda: error_curves(self, policies, chosen, layer, head)  # noqa: E731
        return self.result(("curves", tuple(policies), tuple(chosen), layer, head), make)

    def errors_by_budget(
        self, choices: Iterable[tuple[Policy, ...]], layer: int, head: int, pace: Pace
    ) -> dict[tuple[Policy, ...], ErrorCurves]:
        """The same of several choices of policies; see `in_time`."""
        budgets = tuple(steps(self.state.n_tokens))
        get = lambda policies: self.error_by_budget(policies, None, layer, head)  # noqa: E731
        return in_time(choices, get, lambda policies: self.holds(("curves", policies, budgets, layer, head)), pace)

    def error_map(self, policy: Policy, budget: int) -> ErrorMap:
        """All measures of every layer and query head."""
        return self.result(("map", policy, budget), lambda: error_maps(self, [(policy, budget)])[0])

    def error_maps(self, settings: Iterable[Setting], pace: Pace) -> dict[Setting, ErrorMap]:
        """The same under several settings; see `in_time`."""

        def prepare(some: list[Setting]) -> None:
            some = sorted(some, key=lambda setting: (correction(setting), setting[1]))  # the smaller budget first
            for _, alike in groupby(some, correction):
                alike = list(alike)
                for setting, made in zip(alike, error_maps(self, alike, pace), strict=True):
                    self.result(("map", *setting), lambda made=made: made)

        correction = lambda setting: (order_of(setting[0]), setting[0].partition)  # noqa: E731
        get, holds = (lambda s: self.error_map(*s)), (lambda s: self.holds(("map", *s)))
        return in_time(settings, get, holds, pace, prepare, TOGETHER)

    def capacity(
        self, policies: Sequence[Policy], shares: Sequence[float] = SHARES, progress: Progress | None = None
    ) -> CapacityCurves:
        """Capacities of every layer and KV head against the share removed.

        Policies that evict step by step (MomentKV in rounds) have every second point only; the others are NaN.
        """
        make = lambda: capacity_curves(self, policies, shares, progress=progress)  # noqa: E731
        return self.result(("capacities", tuple(policies), tuple(shares), None), make)

    def capacity_at(self, policy: Policy, budget: int) -> np.ndarray:
        """Share [3] of the full cache's capacities that a policy keeps at one budget, mean over layers and KV heads."""
        n = self.state.n_tokens
        return capacity_curves(self, [policy], [1 - min(budget, n) / n]).mean(policy.label)[:, 0]

    def head_capacity(
        self, policies: Sequence[Policy], shares: Sequence[float], layer: int, kv_head: int
    ) -> CapacityCurves:
        """The same of one KV head alone: a few milliseconds."""
        head = layer, kv_head
        make = lambda: capacity_curves(self, policies, shares, only=head)  # noqa: E731
        return self.result(("capacities", tuple(policies), tuple(shares), head), make)

    def capacities(
        self, choices: Iterable[tuple[Policy, ...]], pace: Pace, only: tuple[int, int] | None = None
    ) -> dict[tuple[Policy, ...], CapacityCurves]:
        """`capacity`, or `head_capacity` of the one (layer, KV head), of several choices of policies; see `in_time`."""

        def get(policies: tuple[Policy, ...]) -> CapacityCurves:
            if only is not None:
                return self.head_capacity(policies, SHARES, *only)
            return self.capacity(policies, progress=lambda *_: pace())

        return in_time(choices, get, lambda policies: self.holds(("capacities", policies, SHARES, only)), pace)


def of(state: PromptState) -> Analysis:
    """The analysis of a prompt state, the same object every time."""
    return shared(state, Analysis)


def steps(n_tokens: int, count: int = 11, smallest: int = 16) -> list[int]:
    """Budgets evenly spaced on a log scale from `smallest` to N, for `error_by_budget`."""
    low = min(smallest, n_tokens)
    ratio = (n_tokens / low) ** (1 / max(count - 1, 1))
    return checked_budgets([round(low * ratio**i) for i in range(count)], n_tokens)
