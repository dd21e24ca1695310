"""How many rows of a prompt go through the model together: as many as the memory holds, since weights are read once a step."""

from __future__ import annotations

import torch

from kvviz.engine import Engine
from kvviz.state import PromptState

CPU_BYTES = 2 << 30
"""What a batch may take on a CPU."""

MAX_ROWS = 64


def split(
    engine: Engine, state: PromptState, budgets: list[int], new_tokens: int, limit: int | None = None
) -> list[int]:
    """Sizes of the batches that rows of these budgets are decoded in, in their order.

    Args:
        new_tokens: question and answer.
        limit: bytes; by default half of what a GPU has free, or CPU_BYTES.
    """
    limit = room(engine) if limit is None else limit
    most = min(MAX_ROWS, engine.limits.policies or MAX_ROWS)
    sizes, used = [], 0
    for entries in budgets:
        need = row_bytes(engine, state, entries, new_tokens)
        if not sizes or sizes[-1] == most or used + need > limit:
            sizes.append(0)
            used = 0
        sizes[-1] += 1
        used += need
    return sizes


def row_bytes(engine: Engine, state: PromptState, entries: int, new_tokens: int) -> int:
    """What one row takes: what it kept, its copy in the batch with room for new tokens, and the work of a forward."""
    each = state.bytes / sum(layer.keys.shape[1] for layer in state.layers) * len(state.layers)
    kept = min(entries, state.n_tokens)
    forward = min(new_tokens, 256)
    logits = 8 * engine.loaded.n_heads * forward * (kept + new_tokens)
    words = 8 * engine.model.config.get_text_config().vocab_size
    return round(each * (2 * kept + new_tokens)) + logits + words


def room(engine: Engine) -> int:
    """Bytes that a batch may take on the engine's device."""
    device = engine.loaded.device
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else CPU_BYTES
