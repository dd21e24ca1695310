"""What a run reports while it goes on: plain Python values, never tensors, so that they can travel."""

from __future__ import annotations

from dataclasses import dataclass

from kvviz.runs import Row, Run


@dataclass(frozen=True)
class Doing:
    """What is going on, and the share done of it in [0, 1]."""

    share: float
    text: str


@dataclass(frozen=True)
class Evicted:
    """Row `row` was cut down; `facts` holds what it keeps (no output yet)."""

    row: int
    facts: Row


@dataclass(frozen=True)
class Token:
    """Row `row` wrote a token; `text` is what it adds to the readable output."""

    row: int
    id: int
    text: str


@dataclass(frozen=True)
class Compared:
    """Row `row` was measured along the full cache's output; `agrees`: at each step, whether it would write the same token."""

    row: int
    agrees: tuple[bool, ...]


@dataclass(frozen=True)
class Finished:
    """The run is complete."""

    run: Run


Event = Doing | Evicted | Token | Compared | Finished
