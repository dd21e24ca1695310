"""Times of functions that are run in turn, so that a noisy machine is noisy for all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Times:
    """Seconds of the repeats of one function."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the fastest and the slowest, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / 2 / self.median


def in_turn(functions: dict[str, Callable[[], object]], repeats: int, warm_up: int = 1) -> dict[str, Times]:
    """Run all functions one after another, `repeats` times round, after `warm_up` rounds that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warm_up + repeats):
        for name, function in functions.items():
            took = once(function)
            if turn >= warm_up:
                seconds[name].append(took)
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def once(function: Callable[[], object]) -> float:
    """Seconds of one call, the device's work included. A function may time itself and return a float of seconds."""
    _wait()
    began = time.perf_counter()
    result = function()
    _wait()
    return result if isinstance(result, float) else time.perf_counter() - began


def ratio(numerator: Times, denominator: Times) -> tuple[float, float]:
    """Median of the ratios of the same rounds, and half their range as a share of it."""
    ratios = [a / b for a, b in zip(numerator.seconds, denominator.seconds, strict=True)]
    middle = statistics.median(ratios)
    return middle, (max(ratios) - min(ratios)) / 2 / middle


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
