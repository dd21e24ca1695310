"""Where the time of a prefill and of a decode step goes, by kind of operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

import kvviz
from kvviz.cache import RowCache
from kvviz.decode import forward
from kvviz.engine import Engine
from kvviz.evict import evict
from kvviz.prefill import prefill

KINDS = {
    "linear layers": ("linear", "addmm", "aten::mm", "gemm"),
    "attention": ("bmm", "softmax", "attention", "flash"),
    "element-wise, norms, rotation": (
        "mul",
        "add",
        "sub",
        "silu",
        "rsqrt",
        "mean",
        "pow",
        "neg",
        "exp",
        "div",
        "sum",
        "amax",
    ),
    "copies and layout": ("copy", "cat", "index", "clone", "contiguous", "fill", "empty", "embedding", "stack"),
}
"""What the table shows -> parts of the operations' names; the first that fits counts."""

REST = "views, Python and waiting"


def profiles(engine: Engine, ids: list[int]) -> dict[str, dict[str, float]]:
    """Shares of the time, by kind of operation, of a prefill of 2,048 tokens and of 16 decode steps of one and of four rows."""
    state = prefill(engine.model, ids[:2048])
    kept = evict(state, kvviz.policy("snapkv", correction=1), 256)

    def steps(rows: int) -> Callable[[], None]:
        cache, token = RowCache([kept] * rows, 40), torch.full((rows, 1), 5, device=engine.loaded.device)
        return lambda: [forward(engine.model, cache, token) for _ in range(16)]

    functions = {
        "prefill, 2,048 tokens": lambda: prefill(engine.model, ids[:2048]),
        "decode step, 1 row with the correction": steps(1),
        "decode step, 4 rows with the correction": steps(4),
    }
    return {name: shares(function) for name, function in functions.items()}


def shares(function: Callable[[], object]) -> dict[str, float]:
    """Kind of operation -> its share of the time that all operations of one call took, after one call that does not count."""
    function()
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profiler(activities=[ProfilerActivity.CPU, *gpu]) as seen:
        function()
    spent: Counter[str] = Counter()
    for event in seen.key_averages():
        time = event.self_device_time_total if gpu else event.self_cpu_time_total
        spent[kind(event.key)] += time
    return {name: spent[name] / max(1, spent.total()) for name in (*KINDS, REST)}


def kind(operation: str) -> str:
    """The kind that an operation counts to."""
    return next((name for name, parts in KINDS.items() if any(part in operation for part in parts)), REST)
