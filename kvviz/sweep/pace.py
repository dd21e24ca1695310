"""How long a sweep will still take, from how long reading and writing took so far."""

from __future__ import annotations

GUESS = {"read": 1.0, "write": 3.0}
"""Relative seconds a token, before they are measured."""


class Pace:
    """Counts tokens that are read and written. `begin` a stage, tell how far it is with `at`, and `end` it."""

    def __init__(self, to_read: int, to_write: int) -> None:
        self.left = {"read": to_read, "write": to_write}
        self.done = {"read": 0, "write": 0}
        self.seconds = {"read": 0.0, "write": 0.0}
        self.kind, self.units, self.fraction = "read", 0, 0.0
        self.best = 0.0

    def begin(self, kind: str, units: int) -> None:
        """A stage of so many tokens begins."""
        self.kind, self.units, self.fraction = kind, units, 0.0

    def at(self, fraction: float) -> None:
        """So much of the stage is done."""
        self.fraction = min(max(fraction, self.fraction), 1.0)

    def end(self, seconds: float) -> None:
        """The stage is over and took so long (0 where its result came from memory)."""
        self.left[self.kind] -= self.units
        self.done[self.kind] += self.units
        self.seconds[self.kind] += seconds
        self.units = 0

    @property
    def seconds_left(self) -> float | None:
        """An estimate, or None before both reading and writing have been measured (or are over)."""
        if any(self._left(kind) and not self.seconds[kind] for kind in self.left):
            return None
        return sum(self._left(kind) * self._rate(kind) for kind in self.left)

    @property
    def share(self) -> float:
        """The share done, in [0, 1]; it never goes back."""
        left = sum(self._left(kind) * self._rate(kind) for kind in self.left)
        total = sum((self.left[kind] + self.done[kind]) * self._rate(kind) for kind in self.left)
        self.best = max(self.best, 1 - left / total if total else 1.0)
        return self.best

    def _left(self, kind: str) -> float:
        return self.left[kind] - (self.units * self.fraction if kind == self.kind else 0)

    def _rate(self, kind: str) -> float:
        """Seconds a token: measured, or guessed from the other kind, or a guess."""
        if self.seconds[kind]:
            return self.seconds[kind] / self.done[kind]
        other = "write" if kind == "read" else "read"
        if self.seconds[other]:
            return self.seconds[other] / self.done[other] * GUESS[kind] / GUESS[other]
        return GUESS[kind]


def in_words(seconds: float) -> str:
    """ "40 s", "3 min", "2 h 10 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
