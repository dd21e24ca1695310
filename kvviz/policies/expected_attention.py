"""Expected Attention (arXiv:2510.00636): what a Gaussian of future queries attends to, in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from kvviz.policies.attention_scores import by_group, precise, with_unscored
from kvviz.policies.base import Published, Scorer, require
from kvviz.policies.future_queries import check_future, future_covariance, future_mean
from kvviz.state import LayerState


@dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """Keep the entries that future queries are expected to attend to, weighed by the norm of their values.

    Attributes:
        epsilon: added to the attention before the value norm counts (1e-2 in kvpress' leaderboard entry).
        covariance: use the second moment of the queries, too.
        sinks: first tokens that are left out of the softmax; the method protects them.
        future_positions: how many next positions the queries are averaged over.
    """

    epsilon: float = 0.0
    covariance: bool = True
    sinks: int = 4
    future_positions: int = 512

    name = "expected_attention"
    title = "Expected Attention"
    summary = "Keeps what a Gaussian model of the coming queries would attend to, weighed by value norm."
    paper = "2510.00636"
    formula = (
        r"s_i = \Bigl(\tfrac1g \sum_h \mathrm{softmax}_i"
        r"\bigl(c\, k_i^\top \mu_h + \tfrac{c^2}{2} k_i^\top \Sigma_h k_i\bigr)"
        r" + \epsilon\Bigr) \lVert v_i \rVert"
    )

    def __post_init__(self) -> None:
        check_future(self.future_positions, self.sinks)
        require(
            math.isfinite(self.epsilon) and self.epsilon >= 0,
            f"epsilon is added to a probability and must be 0 or more; got {self.epsilon}.",
        )

    @property
    def published(self) -> Published:
        """The sinks are protected."""
        return Published(sinks=self.sinks)

    @property
    def unscored(self) -> tuple[int, int]:
        """The sinks."""
        return self.sinks, 0

    def score(self, layer: LayerState) -> Tensor:
        """[Hkv, N]; the sinks, which the method does not score, get the row's maximum."""
        first = min(self.sinks, layer.n_tokens)
        keys = layer.scaling * precise(layer.keys[:, first:])  # [Hkv, n, d]
        mu = by_group(future_mean(layer, self.future_positions), layer)  # [Hkv, g, d]
        logits = mu @ keys.mT  # [Hkv, g, n]
        if self.covariance:
            sigma = by_group(future_covariance(layer, self.future_positions), layer)  # [Hkv, g, d, d]
            moved = (keys @ sigma.flatten(1, 2).mT).unflatten(-1, sigma.shape[1:3])  # [Hkv, n, g, d]
            logits = logits + 0.5 * (moved * keys[:, :, None]).sum(dim=-1).mT
        probability = logits.softmax(dim=-1).mean(dim=1)  # [Hkv, n]
        scores = (probability + self.epsilon) * precise(layer.values[:, first:]).norm(dim=-1)
        return with_unscored(scores, first=first)
