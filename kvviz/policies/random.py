"""Entries drawn by lot: the floor that every method must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvviz.policies.attention_scores import precise
from kvviz.policies.base import Scorer, require
from kvviz.state import LayerState


@dataclass(frozen=True)
class Random(Scorer):
    """Keep entries drawn by lot.

    Attributes:
        seed: the same seed gives the same entries, on any device and whatever else draws random numbers.
    """

    seed: int = 0

    name = "random"
    title = "Random"
    summary = "Keeps entries drawn by lot: the floor."
    formula = r"s_i \sim \mathcal U(0, 1)"

    def __post_init__(self) -> None:
        require(self.seed == int(self.seed) and self.seed >= 0, f"seed is 0 or more; got {self.seed}.")

    def score(self, layer: LayerState) -> Tensor:
        """Uniform in [0, 1), [Hkv, N]; every head, layer and position draws its own."""
        lot = torch.Generator().manual_seed(1009 * self.seed + layer.index)
        heads = layer.keys.shape[0]
        drawn = torch.rand(heads, max(layer.total_tokens, layer.n_tokens), generator=lot)
        if layer.positions is not None:
            drawn = drawn.gather(1, layer.positions.cpu())
        drawn = drawn[:, : layer.n_tokens]
        return drawn.to(layer.keys.device, precise(layer.keys[:0]).dtype)
