"""H2O (arXiv:2306.14048): heavy hitters, the keys that gathered most attention, beside the most recent ones.

Half of the budget goes to the heaviest and half to the most recent entries. Both shares can be adjusted: the
policy's `recent` in (0, 1) is the recent share, and what is left belongs to the heavy ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvviz.policies.base import Published, Scorer, require
from kvviz.state import LayerState


def received_mass(layer: LayerState) -> Tensor:
    """Attention that each key received from all queries that can see it, mean over g, [Hkv, N]."""
    require(
        layer.attention_mass is not None,
        "This method needs the attention that each key received. "
        "Prefill the prompt with attention_mass=True, or give LayerState an attention_mass.",
    )
    return layer.attention_mass


@dataclass(frozen=True)
class H2O(Scorer):
    """Keep the entries with the largest sum of attention."""

    name = "h2o"
    title = "H2O"
    summary = "Keeps the heavy hitters, keys that gathered most attention, and the most recent entries."
    paper = "2306.14048"
    formula = r"s_i = \tfrac1g \sum_h \sum_{t \ge i} \alpha^h_{t i}"
    published = Published(recent=0.5)
    needs = frozenset({"attention_mass"})

    def score(self, layer: LayerState) -> Tensor:
        """The attention mass, [Hkv, N]."""
        return received_mass(layer)
