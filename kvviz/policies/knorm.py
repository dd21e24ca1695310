"""Knorm (arXiv:2406.11430): keys of small norm are attended to most.

CapKV's appendix B.2 describes it with the opposite sign; the method keeps small norms.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvviz.policies.attention_scores import precise
from kvviz.policies.base import Scorer
from kvviz.state import LayerState


@dataclass(frozen=True)
class Knorm(Scorer):
    """Keep the entries whose keys are shortest."""

    name = "knorm"
    title = "Knorm"
    summary = "Keeps the entries whose keys have the smallest norm."
    paper = "2406.11430"
    formula = r"s_i = -\lVert k_i \rVert"

    def score(self, layer: LayerState) -> Tensor:
        """-||k_i||, [Hkv, N]."""
        return -precise(layer.keys).norm(dim=-1)
