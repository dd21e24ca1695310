"""Errors that a person can do something about. Every message says what."""

from __future__ import annotations


class KvvizError(Exception):
    """Base of kvviz's own errors."""


class Cancelled(KvvizError):
    """The work was cancelled; nothing of it is kept."""


class OutOfMemory(KvvizError):
    """The device's memory did not suffice; what the work held is freed."""
