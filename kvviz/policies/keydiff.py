"""KeyDiff (arXiv:2504.15364): keep the keys that differ most from the rest.

One-shot, over the whole prompt; the paper evicts block by block while it reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kvviz.policies.attention_scores import precise
from kvviz.policies.base import Scorer
from kvviz.state import LayerState


@dataclass(frozen=True)
class KeyDiff(Scorer):
    """Keep the entries whose keys point away from the mean direction."""

    name = "keydiff"
    title = "KeyDiff"
    summary = "Keeps the entries whose keys point away from the mean key direction."
    paper = "2504.15364"
    formula = r"s_i = -\cos\Bigl(k_i, \tfrac1N \sum_j k_j / \lVert k_j \rVert\Bigr)"

    def score(self, layer: LayerState) -> Tensor:
        """-cos(k_i, mean of the normalised keys), [Hkv, N]."""
        keys = precise(layer.keys)
        anchor = F.normalize(keys, dim=-1).mean(dim=1, keepdim=True)
        return -F.cosine_similarity(keys, anchor, dim=-1)
