"""Reading on: every row reads the text that really follows, from what it kept. The loss needs no labels, and one pass."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from kvviz import metrics
from kvviz.cache import RowCache
from kvviz.decode import teacher_force
from kvviz.engine import Engine
from kvviz.events import Doing
from kvviz.evict import Retained, evict
from kvviz.policies.policy import Policy, policy
from kvviz.state import PromptState


@dataclass
class Followed:
    """One row along the text: at each token its loss and the divergence from row 0 in nats, and whether both would have
    written the same."""

    kept: Retained
    loss: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    seconds: float = 0.0


def follow(
    engine: Engine, state: PromptState, chosen: Sequence[tuple[Policy, int]], ids: list[int]
) -> Iterator[Doing | list[Followed]]:
    """Read `ids`, which follow the prompt, under every (policy, budget); the first is compared with.

    Yields:
        Doing, and at last the rows.
    """
    if any("probes" in each.scorer.needs for each, _ in chosen) and state.layers[0].probes is None:
        yield Doing(0.0, "Recording the queries of the text for the oracle")
        state = _with_probes(engine, state, ids)
    rows = []
    for number, (each, entries) in enumerate(chosen):
        yield Doing(0.2 * number / len(chosen), f"Evicting with {each.title}")
        rows.append(Followed(evict(state, each, entries)))
    began, done = time.perf_counter(), 0
    cache = RowCache([row.kept for row in rows], len(ids))
    for logits in teacher_force(engine.model, cache, [], state.logits, ids):
        t = logits.shape[1]
        true = torch.tensor(ids[done : done + t], device=logits.device).expand(len(rows), -1)
        likeliest = logits.argmax(dim=-1)
        measured = (
            metrics.token_loss(logits, true).tolist(),
            metrics.kl_divergence(logits[:1], logits).tolist(),
            (likeliest == likeliest[:1]).tolist(),
        )
        for row, loss, kl, agrees in zip(rows, *measured, strict=True):
            row.loss += loss
            row.kl += kl
            row.agrees += agrees
        done += t
        yield Doing(0.2 + 0.8 * done / len(ids), "Reading what follows")
    for row in rows:
        row.seconds = time.perf_counter() - began
    yield rows


def _with_probes(engine: Engine, state: PromptState, ids: list[int]) -> PromptState:
    """The oracle looks at the real queries of what follows."""
    cache = RowCache([evict(state, policy("full"), state.n_tokens)], len(ids))
    cache.record()
    for _ in teacher_force(engine.model, cache, [], state.logits, ids):
        pass
    return state.with_probes(cache.recorded())
