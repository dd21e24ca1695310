"""Small pieces of sentences for findings."""

from __future__ import annotations

from collections.abc import Iterable


def listed(words: Iterable[object]) -> str:
    """ "a, b and c"."""
    texts = [str(word) for word in words]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + f" and {texts[-1]}" if texts else "none"


def signed(value: float, digits: int = 2) -> str:
    """A difference with its sign: "+0.34"."""
    return f"{value:+.{digits}f}".replace("-", "−")


def percent(value: float) -> str:
    """A share of 1 in percent, two significant digits: "23%"."""
    return f"{100 * value:.2g}%"
