"""How cost grows: prefill, eviction and a decode step at several lengths and numbers of rows, beside the floor.

The floor of a decode step is the bytes that it must read (weights once, every row's cache) over the measured bandwidth; that
of a prefill is its arithmetic over the measured rate of matrix products.
"""

from __future__ import annotations

import math

import torch

import kvviz
from kvviz.bench.timing import in_turn, once
from kvviz.cache import RowCache
from kvviz.decode import forward
from kvviz.engine import Engine
from kvviz.evict import evict
from kvviz.prefill import prefill

LENGTHS = (512, 1024, 2048, 4096, 8192)
ROWS = (1, 4, 16, 32)


def bandwidth() -> float:
    """Bytes a second that one sum over a large tensor reads."""
    x = torch.ones(1 << 26)
    return x.nbytes / min(once(x.sum) for _ in range(5))


def matmul_rate() -> float:
    """Floating-point operations a second of a large matrix product."""
    a, b = torch.randn(2048, 1536), torch.randn(1536, 1536)
    return 2 * 2048 * 1536 * 1536 / min(once(lambda: a @ b) for _ in range(5))


def by_length(engine: Engine, ids: list[int], lengths=LENGTHS, repeats: int = 2) -> list[dict]:
    """Seconds of prefill, CapKV's eviction and a decode step, for each length."""
    rows, rate, speed = [], matmul_rate(), bandwidth()
    weights = engine.loaded.parameters * 4
    embedding = engine.model.get_input_embeddings().weight.numel()
    most = min(len(ids), engine.loaded.positions - 64)
    for n in sorted({min(n, most) for n in lengths}):
        state = prefill(engine.model, ids[:n])
        full = evict(state, kvviz.policy("full"), n)
        cache = RowCache([full], 64)
        functions = {
            "prefill": lambda n=n: prefill(engine.model, ids[:n]),
            "evict": lambda s=state: evict(s, kvviz.policy("capkv"), 256),
            "step": lambda c=cache: forward(engine.model, c, torch.tensor([[5]], device=engine.loaded.device)),
        }
        times = in_turn(functions, repeats)
        heads, layers = engine.loaded.n_heads * engine.loaded.head_dim, engine.loaded.n_layers
        operations = 2 * n * (engine.loaded.parameters - embedding) + 2 * layers * n * n * heads
        rows.append(
            {"tokens": n}
            | {name: t.median for name, t in times.items()}
            | {"prefill_floor": operations / rate, "step_floor": (weights + state.bytes) / speed}
        )
    return rows


def by_rows(engine: Engine, ids: list[int], counts=ROWS, repeats: int = 5) -> list[dict]:
    """Seconds of a decode step at budget 256 for each number of rows."""
    state = prefill(engine.model, ids[:2048])
    kept, speed = evict(state, kvviz.policy("snapkv"), 256), bandwidth()
    caches = {count: RowCache([kept] * count, 64) for count in counts}
    functions = {
        str(count): lambda c=cache, k=count: forward(
            engine.model, c, torch.full((k, 1), 5, device=engine.loaded.device)
        )
        for count, cache in caches.items()
    }
    weights = engine.loaded.parameters * 4
    return [
        {"rows": int(count), "step": t.median, "step_floor": (weights + int(count) * kept.kv_bytes) / speed}
        for count, t in in_turn(functions, repeats).items()
    ]


def exponent(rows: list[dict], x: str, y: str) -> float:
    """Slope of log y against log x by least squares: 1 is proportional, 2 quadratic."""
    points = [(math.log(row[x]), math.log(row[y])) for row in rows]
    mean_x, mean_y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    spread = sum((a - mean_x) ** 2 for a, _ in points)
    return sum((a - mean_x) * (b - mean_y) for a, b in points) / spread if spread else 0.0
