"""H2O's attention mass (arXiv:2306.14048) over the number of queries that can see the key, as kvpress has it.

Nothing is protected: early keys lose the advantage of having been seen by more queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvviz.policies.base import Scorer
from kvviz.policies.h2o import received_mass
from kvviz.state import LayerState


@dataclass(frozen=True)
class ObservedAttention(Scorer):
    """Keep the entries with the largest mean attention."""

    name = "observed_attention"
    title = "Observed attention"
    summary = "Keeps the keys that gathered most attention per query that could see them."
    paper = "2306.14048"
    formula = r"s_i = \tfrac1g \sum_h \tfrac1{N - i + 1} \sum_{t \ge i} \alpha^h_{t i}"
    needs = frozenset({"attention_mass"})

    def score(self, layer: LayerState) -> Tensor:
        """The mass over the queries that can see the key, N for the first and 1 for the last, [Hkv, N]."""
        mass = received_mass(layer)
        if layer.positions is None:
            return mass / torch.arange(mass.shape[-1], 0, -1, device=mass.device)
        return mass / (layer.total_tokens - layer.positions)
