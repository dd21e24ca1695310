"""Two outputs token by token: what is equal, what only one of them has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

EQUAL, REMOVED, ADDED, REPLACED = "equal", "delete", "insert", "replace"


@dataclass(frozen=True)
class Part:
    """A stretch: tokens start ... end of the first output against start ... end of the second."""

    kind: str
    first: range
    second: range


def parts(first: Sequence[int], second: Sequence[int]) -> list[Part]:
    """The stretches in order; together they cover both outputs."""
    matcher = SequenceMatcher(None, list(first), list(second), autojunk=False)
    return [Part(kind, range(a, b), range(c, d)) for kind, a, b, c, d in matcher.get_opcodes()]


def shared(first: Sequence[int], second: Sequence[int]) -> float:
    """Share of tokens, 0 to 1, that two outputs have in common in the same order (difflib's ratio)."""
    return SequenceMatcher(None, list(first), list(second), autojunk=False).ratio()
