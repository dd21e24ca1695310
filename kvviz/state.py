"""What a prefill leaves behind: everything that a policy may look at, layer by layer, and nothing evicted yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvviz.moments import Moments
from kvviz.rotary import Rotary

SKIPPED_QUERIES = 4
"""The first tokens are attention sinks whose queries are unlike all others; query statistics leave them out."""

STORED_QUERIES = 128
"""How many of the prompt's last queries are kept: the largest observation window that a policy can ask for."""


@dataclass(frozen=True)
class LayerState:
    """One layer after the prefill of N tokens. Hq query heads, Hkv KV heads, g = Hq / Hkv, head size d.

    Attributes:
        keys, values: [Hkv, N, d], keys after RoPE, in the model's dtype.
        queries: [Hq, w, d], the last w <= STORED_QUERIES queries, after RoPE.
        query_mean: [Hq, d] float32, mean query before RoPE, without the first SKIPPED_QUERIES tokens.
        query_cov: [Hq, d, d] float32, covariance of the same queries (divided by their count).
        scaling: c, the model's own attention scaling (1 / sqrt(d) for most).
        rotary: the layer's rotations.
        projection: gives `o_proj`, the output projection's weight [hidden, Hq * d]; None where formulas run without a model.
        attention_mass: [Hkv, N] float32, attention that each key received, summed over the queries that can see it and
            averaged over the g query heads; only when the prefill was asked for it.
        probes: [Hq, P, d], real later queries (of the question and of the full cache's own continuation), after RoPE;
            only after a run. The oracle and the error measures need them.
        sliding: a sliding-window layer. It is never evicted; keys and values are its last `window` tokens.
        index: the layer's number in the model.
        total_tokens: tokens that the layer has read; more than N where some have left (sliding window, live eviction).
        positions: [Hkv, N] true positions of the entries; None where they are 0 ... N - 1.
        moments: statistics of what was evicted before, where a policy evicts again while decoding.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    query_mean: Tensor
    query_cov: Tensor
    scaling: float
    rotary: Rotary
    projection: Callable[[], Tensor] | None = None
    attention_mass: Tensor | None = None
    probes: Tensor | None = None
    sliding: bool = False
    index: int = 0
    total_tokens: int = 0
    positions: Tensor | None = None
    moments: Moments | None = None

    @property
    def o_proj(self) -> Tensor | None:
        """[hidden, Hq * d], or None where there is no model."""
        return None if self.projection is None else self.projection()

    @property
    def groups(self) -> int:
        """g, the query heads that share one KV head."""
        return self.queries.shape[0] // self.keys.shape[0]

    @property
    def n_tokens(self) -> int:
        """N, the tokens stored."""
        return self.keys.shape[1]

    @classmethod
    def from_tensors(cls, keys: Tensor, values: Tensor, queries: Tensor, rotary: Rotary, **more) -> LayerState:
        """A layer from plain tensors: keys, values [Hkv, N, d] and all N queries [Hq, N, d], keys and queries after RoPE.

        `more` are further fields (`scaling`, `attention_mass`, ...), or `o_proj` itself.
        """
        o_proj = more.pop("o_proj", None)
        more["projection"] = None if o_proj is None else lambda: o_proj
        positions = torch.arange(queries.shape[1], device=queries.device)
        statistics = QueryStatistics(queries.shape[1])
        statistics.add(rotary.unrotate(queries.float(), positions), start=0)
        mean, cov = statistics.result()
        more.setdefault("scaling", keys.shape[-1] ** -0.5)
        return cls(keys, values, queries[:, -STORED_QUERIES:].clone(), mean, cov, rotary=rotary, **more)


class QueryStatistics:
    """Mean and covariance of the queries before RoPE, gathered chunk by chunk (Chan's pairwise update), float32.

    The first SKIPPED_QUERIES tokens are left out unless the prompt has no others.
    """

    def __init__(self, n_tokens: int) -> None:
        self.first = SKIPPED_QUERIES if n_tokens > SKIPPED_QUERIES else 0
        self.count = 0
        self.mean: Tensor | None = None
        self.scatter: Tensor | None = None

    def add(self, queries: Tensor, start: int) -> None:
        """queries [Hq, n, d] before RoPE, of the tokens start ... start + n - 1; they are overwritten."""
        queries = queries[:, max(0, self.first - start) :]
        n = queries.shape[1]
        if n == 0:
            return
        mean = queries.mean(dim=1)
        centred = queries.sub_(mean[:, None])
        scatter = centred.mT @ centred
        if self.count == 0:
            self.count, self.mean, self.scatter = n, mean, scatter
            return
        total = self.count + n
        gap = mean - self.mean
        self.scatter += scatter + gap[:, :, None] * gap[:, None, :] * (self.count * n / total)
        self.mean += gap * (n / total)
        self.count = total

    def result(self) -> tuple[Tensor, Tensor]:
        """mean [Hq, d] and covariance [Hq, d, d] (divided by the count)."""
        return self.mean, self.scatter / self.count


@dataclass(frozen=True)
class PromptState:
    """A prompt that the model has read: per-layer caches, the next-token logits, and how a question is to be appended.

    Attributes:
        ids: the N prompt token ids.
        layers: one LayerState a layer.
        logits: [vocabulary] float32, of the last prompt token.
        tail: text that ends the user's turn and opens the assistant's (empty for plain text, or once it was read).
        seconds: how long the prefill took.
        model: name of the model that read it.
    """

    ids: tuple[int, ...]
    layers: tuple[LayerState, ...]
    logits: Tensor
    tail: str = ""
    seconds: float = 0.0
    model: str = ""
    key: tuple = field(default=(), compare=False)

    @property
    def n_tokens(self) -> int:
        """N, the prompt's length in tokens."""
        return len(self.ids)

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(t.nbytes for layer in self.layers for t in (layer.keys, layer.values))

    def with_probes(self, probes: list[Tensor]) -> PromptState:
        """The same state with later queries [Hq, P, d] for each layer (unchanged where there are none)."""
        if not probes:
            return self
        layers = tuple(replace(layer, probes=p) for layer, p in zip(self.layers, probes, strict=True))
        return replace(self, layers=layers)
