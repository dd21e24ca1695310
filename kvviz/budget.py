"""One budget, three ways to say it: entries a head, the share removed (the papers' compression ratio), or bytes.

Entries are per head, averaged over the model, sinks and window included. In bytes MomentKV's statistics count too: at a budget
of 128 and d = 128, kept in float32 beside a bfloat16 cache, they cost as much as 130 more entries a head.
"""

from __future__ import annotations

import math


def check_entries(entries: float) -> int:
    """A budget in entries, as an int; ValueError unless it is a whole number of at least 1."""
    if not math.isfinite(entries) or entries < 1 or entries != int(entries):
        raise ValueError(f"the budget is {entries} entries: give a whole number of at least 1")
    return int(entries)


def from_share(n_tokens: int, share: float) -> int:
    """Entries a head that stay of n_tokens when `share` of them, in [0, 1), is removed; rounded down, at least 1."""
    if not 0 <= share < 1:
        raise ValueError(
            f"the share removed is {share}: choose from 0 (keep everything) to below 1 (1 would leave nothing)"
        )
    return max(1, math.floor(n_tokens * (1 - share) + 1e-6))


def to_share(n_tokens: int, entries: int) -> float:
    """The share of n_tokens that is removed under a budget; 0 where the budget covers all of them."""
    return 1 - min(check_entries(entries), n_tokens) / n_tokens


def entry_bytes(head_dim: int, itemsize: float) -> float:
    """Bytes of one entry of one head: a key and a value; itemsize is 2 for bfloat16, 4 for float32."""
    return 2 * head_dim * itemsize


def moments_bytes(head_dim: int, second: bool = False, itemsize: int = 4) -> int:
    """Bytes of MomentKV's statistics for one head: d^2 + 2 d + 1 values, and d^2 more with the keys' second moment."""
    return itemsize * (head_dim**2 * (2 if second else 1) + 2 * head_dim + 1)


def to_bytes(entries: float, layers: int, kv_heads: int, head_dim: int, itemsize: float, moments_bytes: int = 0) -> int:
    """Bytes of `entries` entries a head over all layers and KV heads; `moments_bytes` are the statistics of one head."""
    return round(layers * kv_heads * (entries * entry_bytes(head_dim, itemsize) + moments_bytes))


def from_bytes(size: float, layers: int, kv_heads: int, head_dim: int, itemsize: float, moments_bytes: int = 0) -> int:
    """The largest budget, in entries a head, that fits into `size` bytes, statistics included.

    Raises ValueError where not even one entry a head fits; the message says how many bytes would do.
    """
    if not math.isfinite(size) or size <= 0:
        raise ValueError(f"the budget is {size} bytes: give a positive number")
    entries = math.floor((size / (layers * kv_heads) - moments_bytes) / entry_bytes(head_dim, itemsize) + 1e-9)
    if entries < 1:
        least = to_bytes(1, layers, kv_heads, head_dim, itemsize, moments_bytes)
        what = ", the moments' statistics included" if moments_bytes else ""
        raise ValueError(f"{size:,.0f} bytes hold no entry a head: give at least {least:,} bytes{what}")
    return entries
