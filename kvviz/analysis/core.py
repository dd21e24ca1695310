"""Everything that a prompt state tells without another forward: scores, kept sets, errors, capacities.

An `Analysis` belongs to one PromptState and keeps what it has worked out, within bounds: moving a slider only redoes what
depends on it. It may be used from several threads at once. It holds no strong reference to its state, so that a prompt
which the engine drops leaves memory at once; whoever calls it holds the state.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvviz.analysis.bounded import Bounded
from kvviz.evict import keep_mask, layer_budgets
from kvviz.policies.policy import Policy
from kvviz.state import LayerState, PromptState

SCORE_BYTES = 256 << 20
MASK_BYTES = 64 << 20
RESULT_BYTES = 64 << 20
BULKY_BYTES = 128 << 20

MAX_PROBES = 128
"""Probe queries that are averaged at most; of more, evenly spaced ones are taken."""

PIECE = 1 << 25
"""Attention logits held at once, in numbers."""


Setting = tuple[Policy, int]
"""A policy and its budget."""


class Store:
    """What the parts of an Analysis share: the state, and the bounded caches of scores, kept sets and results."""

    def __init__(self, state: PromptState) -> None:
        self._state = weakref.ref(state)
        self._scores, self._masks = Bounded(SCORE_BYTES), Bounded(MASK_BYTES)
        self._results, self._bulky = Bounded(RESULT_BYTES), Bounded(BULKY_BYTES)

    @property
    def state(self) -> PromptState:
        """The prompt state."""
        state = self._state()
        if state is None:
            raise RuntimeError("The prompt has left memory. Read it again.")
        return state

    def held(self) -> PromptState | None:
        """The prompt state, as long as somebody holds it."""
        return self._state()

    @property
    def open_layers(self) -> list[int]:
        """Numbers of the layers that can be evicted."""
        return [i for i, layer in enumerate(self.state.layers) if not layer.sliding]

    def result(self, key: tuple, make: Callable):
        """A finished result, from memory if it is there."""
        return self._results.get(key, make)

    def bulky(self, key: tuple, make: Callable):
        """The same for what takes so much room that it would push the other results out."""
        return self._bulky.get(key, make)

    def holds(self, key: tuple) -> bool:
        """Whether a result is in memory."""
        return key in self._results

    def texts(self, decode: Callable[[list[int]], str]) -> list[str]:
        """The prompt's tokens one by one as people read them: a space is "·", a line break "↵".

        Args:
            decode: ids -> text, such as the tokenizer's `decode`.
        """
        return self.result(("texts",), lambda: [visible(decode([i])) for i in self.state.ids])

    def scores(self, policy: Policy, layer: int) -> Tensor:
        """Scores [Hkv, N] of one layer.

        Raises:
            ValueError: the state lacks what the method needs; the message says how to get it.
        """
        return self._scores.get((policy.scorer, layer), lambda: policy.scorer.score(self.state.layers[layer]))

    def mask(self, policy: Policy, budget: int, layer: int) -> Tensor:
        """Which entries of one layer stay, [Hkv, N] bool on the state's device: what `evict` keeps."""
        return self._masks.get(_key(policy, budget, layer), lambda: self._mask(policy, budget, layer))

    def _mask(self, policy: Policy, budget: int, layer: int) -> Tensor:
        state = self.state
        own = state.layers[layer]
        if own.sliding or policy.keeps_all or budget >= state.n_tokens:
            return own.keys.new_ones(own.keys.shape[:2], dtype=torch.bool)
        protected = policy.protected(state.n_tokens, budget, own.keys.device)
        share = self._results.get(
            ("layer budgets", policy.allocation, policy.sinks, policy.recent, budget),
            lambda: layer_budgets(state, policy, budget),
        )[layer]
        return keep_mask(own, policy, self.scores(policy, layer), share, protected)

    def kept(self, policy: Policy, budget: int, layer: int) -> np.ndarray:
        """`mask` as numpy."""
        return self.mask(policy, budget, layer).cpu().numpy()

    def probes(self, layer: LayerState) -> Tensor:
        """Queries [Hq, P, d] to average over, P <= MAX_PROBES: later ones if a run left some, else the prompt's last."""
        if not self.real_probes:
            return layer.queries[:, -1:]
        count = layer.probes.shape[1]
        if count <= MAX_PROBES:
            return layer.probes
        return layer.probes[:, torch.linspace(0, count - 1, MAX_PROBES).round().long()]

    @property
    def real_probes(self) -> bool:
        """Whether a run has left queries of the question and of the full cache's own continuation."""
        return all(layer.probes is not None and layer.probes.shape[1] > 0 for layer in self.state.layers)


class Pace:
    """How long work that can wait may go on: call it now and then.

    Attributes:
        over: the time was up before all was done; the next call may go on from there.
    """

    def __init__(self, seconds: float, pause: Callable[[], None] = lambda: None) -> None:
        """`pause`: called with every call; it may raise to end it all."""
        self._end, self._pause, self.over = time.perf_counter() + seconds, pause, False

    def __call__(self) -> None:
        """Raises TimeoutError when the time is up."""
        if time.perf_counter() >= self._end:
            self.over = True
            raise TimeoutError
        self._pause()


def in_time(
    wanted: Iterable[Any],
    make: Callable[[Any], Any],
    holds: Callable[[Any], bool],
    pace: Pace,
    prepare: Callable[[list], Any] | None = None,
    together: int = 1,
) -> dict[Any, Any]:
    """What can be had of what is wanted, in this order; without what the method cannot do on this state.

    Args:
        make, holds: gives one of them; says whether it is in memory.
        pace: once it is over, what is not in memory is left out.
        prepare, together: brings some into memory at once, at most so many, where that is faster than one by one.
    """
    wanted = dict.fromkeys(wanted)
    missing = [each for each in wanted if not holds(each)]
    size = 1 if together == 1 else 2  # the first few soon, then more and more together
    with suppress(TimeoutError):
        while missing:
            pace()
            group, missing = missing[:size], missing[size:]
            with suppress(ValueError):
                prepare(group) if prepare else make(group[0])
            size = min(2 * size, together)
    return {each: make(each) for each in wanted if holds(each)}


def _key(policy: Policy, budget: int, layer: int) -> tuple:
    """What a kept set depends on."""
    return policy.scorer, policy.allocation, policy.sinks, policy.recent, budget, layer


def visible(text: str) -> str:
    """A token with its spaces and line breaks made visible."""
    return text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍") or "∅"


def checked_budgets(budgets: Sequence[int], n_tokens: int) -> list[int]:
    """Different budgets from 1 to N, ascending."""
    return sorted({min(max(int(b), 1), n_tokens) for b in budgets})


_KNOWN: dict[int, object] = {}
_LOCK = threading.Lock()


def shared(state: PromptState, make: Callable[[PromptState], object]):
    """The one object that `make` gave for this very state; it is forgotten with the state."""
    with _LOCK:
        if id(state) not in _KNOWN:
            _KNOWN[id(state)] = make(state)
            weakref.finalize(state, _KNOWN.pop, id(state), None)
        return _KNOWN[id(state)]
