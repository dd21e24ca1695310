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
        """Uniform in [0, 1), [Hkv, N]; every head and layer draws its own."""
        lot = torch.Generator().manual_seed(self.seed + layer.index)
        drawn = torch.rand(layer.keys.shape[:2], generator=lot)
        return drawn.to(layer.keys.device, precise(layer.keys[:0]).dtype)
