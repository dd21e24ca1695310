"""The one error of this package, and the progress that its slow parts report."""

from __future__ import annotations

from collections.abc import Callable

from kvviz.exceptions import KvvizError

Progress = Callable[[float, str], None]
"""progress(fraction in [0, 1], what is being done). It may raise to cancel: nothing half done is left behind."""


class ModelError(KvvizError, ValueError):
    """A model cannot be loaded. The message says why, and what to do about it."""


def brief(error: BaseException) -> str:
    """The first line of another library's message."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def steady(progress: Progress | None) -> Progress:
    """The same callback, made safe: never backwards, never beyond 1, and None does nothing."""
    reached = 0.0

    def report(fraction: float, text: str) -> None:
        nonlocal reached
        reached = max(reached, min(fraction, 1.0))
        if progress is not None:
            progress(reached, text)

    return report


def part(progress: Progress, start: float, end: float) -> Progress:
    """A callback whose 0 ... 1 is `start` ... `end` of `progress`."""
    return lambda fraction, text: progress(start + (end - start) * fraction, text)
