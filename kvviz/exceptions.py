"""Errors that a person can do something about. Every message says what."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class KvvizError(Exception):
    """Base of kvviz's own errors."""


class Cancelled(KvvizError):
    """The work was cancelled; nothing of it is kept."""


class OutOfMemory(KvvizError):
    """The device's memory did not suffice; what the work held is freed."""


@contextmanager
def memory_advice(doing: str) -> Iterator[None]:
    """Turn the device's out-of-memory errors into OutOfMemory, which says the remedy; what was held is freed."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "allocate memory" not in str(error):
            raise
    else:
        return
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise OutOfMemory(
        f"Out of memory while {doing}. Use a shorter prompt, fewer policies, a shorter answer, or a smaller model."
    )
