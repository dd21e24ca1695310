"""What a run leaves: plain numbers and text for each policy, ready to be drawn, saved as JSON and loaded again."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvviz.evict import Retained

VERSION = 1


@dataclass
class Row:
    """One policy's part of a run.

    Attributes:
        policy, label: registry name, and name with options.
        text, token_ids, pieces: the output as text, ids, and text token by token.
        finish: "end" (the model ended), "length" (the limit), or "" while it is writing.
        first_difference: index of the first token that differs from the full cache's; None if none does.
        kl: nats, KL(full cache || this policy) at each step along the full cache's own output.
        top: at each such step the three likeliest tokens, as (text, probability).
        entries: KV entries a head, mean over the layers that can be evicted.
        bytes: of keys, values and moment statistics; kv_bytes and moments_bytes are its parts.
        sinks, recent: protected entries a head.
        head_counts: entries of each layer and head.
        seconds: prefill, evict, decode. Rows decode together: decode is the time until this row ended.
        settings: all of the policy's options.
        entries_by_step, bytes_by_step: what the row held when each token was chosen; only with eviction while decoding.
        raster_steps, raster: at some steps, the share of heads that hold each of up to RASTER_BINS equal parts of the
            sequence (of `config["raster_tokens"]` tokens); only with eviction while decoding.
    """

    policy: str
    label: str
    budget: int
    settings: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish: str = ""
    first_difference: int | None = None
    kl: list[float] = field(default_factory=list)
    top: list[list[tuple[str, float]]] = field(default_factory=list)
    entries: float = 0.0
    bytes: int = 0
    kv_bytes: int = 0
    moments_bytes: int = 0
    sinks: int = 0
    recent: int = 0
    head_counts: list[list[int]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    entries_by_step: list[float] = field(default_factory=list)
    bytes_by_step: list[int] = field(default_factory=list)
    raster_steps: list[int] = field(default_factory=list)
    raster: list[list[float]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Tokens written a second of decoding."""
        decode = self.seconds.get("decode", 0.0)
        return len(self.token_ids) / decode if decode else 0.0

    @property
    def mean_kl(self) -> float | None:
        """Mean of `kl` in nats a token, or None before it was measured."""
        return sum(self.kl) / len(self.kl) if self.kl else None

    def keeps(self, kept: Retained) -> None:
        """Note what was really kept."""
        self.entries, self.bytes = kept.entries, kept.bytes
        self.kv_bytes, self.moments_bytes = kept.kv_bytes, kept.moments_bytes
        self.sinks, self.recent = kept.policy.protection(kept.n_tokens, kept.budget)
        self.head_counts = [list(layer.counts) for layer in kept.layers]


@dataclass
class Run:
    """A whole run: its configuration, and one row a policy. Row `reference` is the full cache."""

    config: dict[str, Any]
    rows: list[Row]
    version: int = VERSION

    @property
    def reference(self) -> Row:
        """The full cache's row."""
        return next(row for row in self.rows if row.policy == "full")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for json.dump."""
        return asdict(self)
