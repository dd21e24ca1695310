"""The oracle: attention that real later queries pay to the prompt. The ceiling of importance scores.

The queries are those of the question and of the full cache's own continuation; they exist only after a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvviz.policies.attention_scores import attention_logits, by_group
from kvviz.policies.base import Scorer, require
from kvviz.state import LayerState


@dataclass(frozen=True)
class Oracle(Scorer):
    """Keep what later queries will attend to."""

    name = "oracle"
    title = "Oracle"
    summary = "Keeps what the full cache's continuation really attends to: the ceiling of importance scores."
    formula = r"s_i = \tfrac1g \sum_h \tfrac1P \sum_{t > N} \alpha^h_{t i}"
    needs = frozenset({"probes"})

    def score(self, layer: LayerState) -> Tensor:
        """Mean attention of the probes over the prompt's keys, [Hkv, N]."""
        require(
            layer.probes is not None and layer.probes.shape[1] > 0,
            "The oracle needs later queries: run the full cache first, then use state.with_probes(...).",
        )
        attention = attention_logits(layer, layer.probes).softmax(dim=-1)  # [Hq, P, N]
        return by_group(attention.mean(dim=1), layer).mean(dim=1)
