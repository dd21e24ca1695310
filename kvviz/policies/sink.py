"""Attention sinks and the most recent tokens (StreamingLLM, arXiv:2309.17453, section 3.2).

Entries keep their true positions here; the paper re-rotates keys to their slot in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvviz.policies.attention_scores import precise
from kvviz.policies.base import Published, Scorer, require
from kvviz.state import LayerState


@dataclass(frozen=True)
class Sink(Scorer):
    """Keep the first tokens and the most recent ones.

    Attributes:
        sinks: how many first tokens the method protects.
    """

    sinks: int = 4

    name = "sink"
    title = "Sink"
    summary = "Keeps the first tokens and the most recent ones, whatever they say."
    paper = "2309.17453"
    formula = "s_i = i / N"

    def __post_init__(self) -> None:
        require(self.sinks == int(self.sinks) and self.sinks >= 0, f"sinks is 0 or more; got {self.sinks}.")

    @property
    def published(self) -> Published:
        """The sinks are protected."""
        return Published(sinks=self.sinks)

    def score(self, layer: LayerState) -> Tensor:
        """The position over N, [Hkv, N]: the later the better."""
        heads, n, _ = layer.keys.shape
        position = torch.arange(n, device=layer.keys.device, dtype=precise(layer.keys[:0]).dtype)
        return (position / n).expand(heads, n)
