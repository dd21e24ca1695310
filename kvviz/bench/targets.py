"""What is measured, in the words of the table, and what must and may be reached."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A line of the table. `must` and `hoped` are limits in `unit`; `more` says whether more is better."""

    key: str
    what: str
    unit: str
    must: float
    hoped: float
    more: bool = False
    digits: int = 2

    def reached(self, value: float) -> bool:
        """Whether the middle column holds."""
        return value >= self.must if self.more else value <= self.must


TARGETS = [
    Target(
        "sweep", "sweep of 8 policies x 4 budgets against the same 32 runs in kvpress", "times faster", 8, 12, more=True
    ),
    Target("lockstep", "4 policies side by side, decode time against one alone", "times", 2.0, 1.5),
    Target(
        "decode", "decode tokens a second at budget 256 against `generate`, full cache", "times", 1.3, 1.6, more=True
    ),
    Target("end_to_end", "one policy end to end against kvpress", "times faster", 1.0, 1.2, more=True),
    Target("correction", "a decode step with MomentKV's correction against without", "times", 1.10, 1.03),
    Target("capkv", "CapKV's eviction against the prefill", "%", 6, 3, digits=1),
    Target("rounds", "MomentKV's eviction, 16 rounds, against the prefill", "%", 15, 6, digits=1),
    Target("sequential", "MomentKV's sequential eviction", "s", 20, 8, digits=1),
    Target("mass", "H2O's attention mass, added to the prefill", "%", 60, 25, digits=1),
    Target("capture", "capturing queries during the prefill, added to a plain prefill", "%", 5, 2, digits=1),
    Target("slider_values", "moving the budget on Values, to the finished figures", "ms", 200, 80, digits=0),
    Target("slider_capacity", "moving tau on Capacity (one head), to the finished figure", "ms", 200, 80, digits=0),
    Target("bytes", "KV bytes after eviction, off the formula", "%", 2, 0, digits=2),
    Target("peak", "peak memory of a run against model + full KV of the prompt", "times", 1.5, 1.2),
]
