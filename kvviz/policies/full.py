"""The full cache: nothing is evicted. The row that all others are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvviz.policies.attention_scores import precise
from kvviz.policies.base import Scorer
from kvviz.state import LayerState


@dataclass(frozen=True)
class Full(Scorer):
    """Keep every entry."""

    name = "full"
    title = "Full cache"
    summary = "Keeps everything: the reference."
    formula = "s_i = 1"

    def score(self, layer: LayerState) -> Tensor:
        """All alike, [Hkv, N]."""
        return torch.ones(layer.keys.shape[:2], device=layer.keys.device, dtype=precise(layer.keys[:0]).dtype)
