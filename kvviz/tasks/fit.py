"""The largest size that fits: a few probes by interpolation, since a probe means tokenising the whole text."""

from __future__ import annotations

from collections.abc import Callable


class TooSmall(ValueError):
    """Not even size 0 fits; `least` is what it costs."""

    def __init__(self, least: int) -> None:
        super().__init__(least)
        self.least = least


def largest(cost: Callable[[int], int], limit: int, most: int = 10**9) -> int:
    """The largest size up to `most` whose cost is within the limit, for a cost that grows with the size.

    Raises:
        TooSmall: size 0 costs more.
    """
    first = spent = cost(0)
    if spent > limit:
        raise TooSmall(spent)
    low, high, over, halve = 0, None, 0, False
    while low < most and (high is None or high - low > 1):
        if high is None:
            pace = (spent - first) / low if low else 0
            guess = low + max(1, int((limit - spent) / pace)) + 1 if pace else 4 * low + 8
        elif halve:
            guess = (low + high) // 2
        else:
            guess = low + int((limit - spent) * (high - low) / (over - spent))
        guess = max(low + 1, min(guess, most if high is None else high - 1))
        price = cost(guess)
        if price <= limit:
            low, spent = guess, price
        else:
            high, over = guess, price
        halve = not halve
    return low
