"""Everything that the pages Values, Heads and Capacity show, as plain numbers: no Streamlit, no Plotly, no forward.

    numbers = kvviz.analysis.of(state)
    view = numbers.head(policy, budget=256, layer=12, head=4)
    print(view.angle, view.relative_error, view.kept.sum())

All of it comes from the cached state. Errors are averages over the probe queries: those of the question and of the full
cache's own continuation once a run has left them, the prompt's last query before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvviz.analysis.capacities import budgets_of, capacity_curves, spearman
from kvviz.analysis.core import Store, checked_budgets, in_time, shared
from kvviz.analysis.head import error_curves, head_view
from kvviz.analysis.maps import Setting, error_maps
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

    def sides(
        self,
        settings: Sequence[Setting],
        layer: int,
        head: int,
        seconds: float,
        pause: Callable[[], None] = lambda: None,
    ) -> dict[Setting, np.ndarray]:
        """What a query head's KV head keeps under each (policy, budget): [N] bool; those that cannot be scored are left out.

        Args:
            seconds, pause: see `kvviz.analysis.core.in_time`.
        """
        kv_head = head // self.state.layers[layer].groups
        return in_time(
            settings,
            lambda setting: self.mask(*setting, layer)[kv_head].cpu().numpy(),
            lambda setting: self.holds_mask(*setting, layer),
            seconds,
            pause,
        )

    def error_by_budget(
        self, policies: Sequence[Policy], budgets: Sequence[int] | None, layer: int, head: int
    ) -> ErrorCurves:
        """Relative error of one query head against the budget; `steps(N)` by default, clipped to 1 ... N."""
        chosen = steps(self.state.n_tokens) if budgets is None else checked_budgets(budgets, self.state.n_tokens)
        return error_curves(self, policies, chosen, layer, head)

    def error_map(self, policy: Policy, budget: int) -> ErrorMap:
        """All measures of every layer and query head."""
        return self.result(("map", policy, budget), lambda: error_maps(self, [(policy, budget)])[0])

    def error_maps(
        self, settings: Sequence[Setting], seconds: float, pause: Callable[[], None] = lambda: None
    ) -> dict[Setting, ErrorMap]:
        """The same for all positions of a slider, the nearest first; those that cannot be scored are left out.

        Args:
            settings: of policies with the same correction.
            seconds, pause: see `kvviz.analysis.core.in_time`.
        """

        def prepare(some: list[Setting], go_on: Callable[[], None]) -> None:
            some = sorted(
                some, key=lambda setting: setting[1]
            )  # the smaller budget first, as `decompose_sets` wants it
            for setting, made in zip(some, error_maps(self, some, go_on), strict=True):
                self.result(("map", *setting), lambda made=made: made)

        get, holds = (lambda s: self.error_map(*s)), (lambda s: self.holds(("map", *s)))
        return in_time(settings, get, holds, seconds, pause, prepare, TOGETHER)

    def capacity(
        self, policies: Sequence[Policy], shares: Sequence[float] = SHARES, progress: Progress | None = None
    ) -> CapacityCurves:
        """Capacities of every layer and KV head against the share removed.

        Policies that evict step by step (MomentKV in rounds) have every second point only; the others are NaN.
        """
        return capacity_curves(self, policies, shares, progress=progress)

    def capacity_at(self, policy: Policy, budget: int) -> np.ndarray:
        """Share [3] of the full cache's capacities that a policy keeps at one budget, mean over layers and KV heads."""
        n = self.state.n_tokens
        return capacity_curves(self, [policy], [1 - min(budget, n) / n]).mean(policy.label)[:, 0]

    def head_capacity(
        self, policies: Sequence[Policy], shares: Sequence[float], layer: int, kv_head: int
    ) -> CapacityCurves:
        """The same of one KV head alone: a few milliseconds."""
        return capacity_curves(self, policies, shares, only=(layer, kv_head))


def of(state: PromptState) -> Analysis:
    """The analysis of a prompt state, the same object every time."""
    return shared(state, Analysis)


def steps(n_tokens: int, count: int = 11, smallest: int = 16) -> list[int]:
    """Budgets evenly spaced on a log scale from `smallest` to N, for `error_by_budget`."""
    low = min(smallest, n_tokens)
    ratio = (n_tokens / low) ** (1 / max(count - 1, 1))
    return checked_budgets([round(low * ratio**i) for i in range(count)], n_tokens)
