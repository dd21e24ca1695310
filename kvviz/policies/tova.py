"""TOVA (arXiv:2401.06104): what the last query attends to, one choice for all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvviz.policies.attention_scores import window_attention
from kvviz.policies.base import Published, Scorer
from kvviz.state import LayerState


@dataclass(frozen=True)
class TOVA(Scorer):
    """Keep what the last query attends to."""

    name = "tova"
    title = "TOVA"
    summary = "Keeps what the last query attends to, the same entries in every head of a layer."
    paper = "2401.06104"
    formula = r"s_i = \tfrac1{H_q} \sum_h \alpha^h_{N i}"
    published = Published(recent=1)

    def score(self, layer: LayerState) -> Tensor:
        """The last query's attention, mean over all heads, [Hkv, N] with equal rows."""
        return window_attention(layer, 1).mean(dim=(0, 1)).expand(layer.keys.shape[0], -1)
