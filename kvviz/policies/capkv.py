"""CapKV (arXiv:2604.25975): keep the entries that carry most of the cache's information capacity.

The capacity is log det A with A = I + sum_i w_i u_i u_i' (equation 6); what an entry adds to it is, to first
order, its ridge leverage s_i = w_i u_i' A^-1 u_i (equations 7 and 8), with weights from the expected query
(equation 9).

The authors' code and the printed equations differ, and both are here. "published", the code and the default,
takes the cosine of key and expected query, divides the weights by their maximum, and leaves the first tokens
out of A. "paper" is w_i = exp(tau k_i . mu) as printed; the identity stays fixed, so that dividing by the
maximum is not neutral.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvviz.policies.attention_scores import by_group, precise, with_unscored
from kvviz.policies.base import Published, Scorer, require
from kvviz.policies.future_queries import check_future, future_covariance, future_mean
from kvviz.policies.leverage import log_leverage, quadratic_forms
from kvviz.state import LayerState

CHOICES = {"variant": ("published", "paper"), "output": ("value", "exact"), "gating": ("mean", "covariance")}
"""The options that are one of several words."""

FLOOR = 1e-6
"""Added to every weight inside A by the published code."""

SMALLEST = -69.0
"""log of the smallest score that the "paper" variant gives as it is, 1e-30; see `_in_order`."""


@dataclass(frozen=True)
class CapKV(Scorer):
    """Keep the entries of largest weighted ridge leverage.

    Attributes:
        tau: how much the expected query counts; 0 is plain ridge leverage of the values.
        variant: "published" (the authors' code) or "paper" (the printed equations).
        output: what an entry writes: "value" (u = v, the default) or "exact" (u = W_O v, section 4.4).
        gating: query statistic in the weights: "mean", or "covariance" (its diagonal, section 4.4).
        sinks: first tokens that the published variant leaves out of A; the method protects them in both.
        future_positions: how many next positions the expected query is averaged over.
    """

    tau: float = 5.0
    variant: str = "published"
    output: str = "value"
    gating: str = "mean"
    sinks: int = 4
    future_positions: int = 512

    name = "capkv"
    title = "CapKV"
    summary = "Keeps the entries that add most to the cache's information capacity: relevant, not redundant."
    paper = "2604.25975"
    formula = (
        r"s_i = w_i\, u_i^\top \Bigl(I + \sum_j w_j u_j u_j^\top\Bigr)^{-1} u_i,"
        r" \quad w_i = e^{\tau k_i^\top \mu_q}"
    )

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.tau) and self.tau >= 0,
            f"tau is 0 (no query weighting) or more, and finite; got {self.tau}. The paper's value is 5.",
        )
        for option, allowed in CHOICES.items():
            chosen = getattr(self, option)
            require(chosen in allowed, f"{option} is one of {', '.join(allowed)}; got {chosen!r}.")
        check_future(self.future_positions, self.sinks)

    @property
    def published(self) -> Published:
        """The sinks are protected."""
        return Published(sinks=self.sinks)

    @property
    def unscored(self) -> tuple[int, int]:
        """The sinks; the printed formula scores them too."""
        return (0 if self.variant == "paper" else self.sinks), 0

    def score(self, layer: LayerState) -> Tensor:
        """[Hkv, N]; the published variant gives the sinks, which it does not score, the row's maximum."""
        if self.variant == "paper":
            return self._paper(layer)
        first = min(self.sinks, layer.n_tokens)
        if first == layer.n_tokens:
            return with_unscored(precise(layer.values[..., 0])[:, :0], first=first)
        weights = self.weights(layer)  # [Hkv, g, n]
        outputs = self.outputs(layer)[:, first:]
        forms = quadratic_forms(outputs, (weights + FLOOR).view(outputs.shape[0], -1, weights.shape[-1]))
        return with_unscored((weights * forms.reshape(weights.shape)).mean(dim=1), first=first)

    def weights(self, layer: LayerState) -> Tensor:
        """Published weights exp(tau cos) over their maximum, of the tokens after the sinks, [Hkv, g, n].

        The cosine is that of the key with mu, or of the key's squares with the diagonal of the covariance.
        """
        cosine = self._alignment(layer, normalised=True)[..., self.sinks :]
        return (self.tau * (cosine - cosine.amax(dim=-1, keepdim=True))).exp()

    def outputs(self, layer: LayerState) -> Tensor:
        """u, or anything with the same inner products, d wide: [Hkv, N, d], or [Hq, N, d] where it is W_O v.

        With W_O one head's slice of the output projection, u'u = v' G v, G = W_O' W_O. So G^(1/2) v stands
        for u and costs little more than v itself (the paper's ablation works in the whole model's width).
        """
        values = precise(layer.values)
        if self.output == "value":
            return values
        require(layer.o_proj is not None, 'output="exact" needs o_proj, the output weight [hidden, Hq * d].')
        heads, d = layer.queries.shape[0], values.shape[-1]
        projection = layer.o_proj.to(values.dtype).T.unflatten(0, (heads, d))  # [Hq, d, hidden]
        size, direction = torch.linalg.eigh(projection @ projection.mT)
        root = direction * size.clamp_min(0).sqrt()[:, None]  # root root' = G
        return (values[:, None] @ by_group(root, layer)).flatten(0, 1)

    def _paper(self, layer: LayerState) -> Tensor:
        log_weights = self.tau * self._alignment(layer, normalised=False).flatten(0, 1)  # equation 9, [Hq, N]
        outputs = self.outputs(layer)
        outputs = outputs.repeat_interleave(log_weights.shape[0] // outputs.shape[0], dim=0)
        scores = _in_order(log_leverage(outputs, log_weights))
        return by_group(scores, layer).mean(dim=1).to(log_weights)

    def _alignment(self, layer: LayerState, normalised: bool) -> Tensor:
        """k.mu, or k' Diag(Sigma) k, [Hkv, g, N]; normalised: the cosine of the two factors."""
        keys = precise(layer.keys)
        if self.gating == "covariance":
            keys = keys.square()
            statistic = future_covariance(layer, self.future_positions).diagonal(dim1=-2, dim2=-1)
        else:
            statistic = future_mean(layer, self.future_positions)
        if normalised:
            keys, statistic = F.normalize(keys, dim=-1), F.normalize(statistic, dim=-1)
        return by_group(statistic, layer) @ keys.mT


def _in_order(log_scores: Tensor) -> Tensor:
    """exp, but below 1e-30 scores go on as 1e-30 * 69 / -log s, where ties at 0 would lose the order."""
    small = math.exp(SMALLEST) * (SMALLEST / log_scores)
    return torch.where(log_scores > SMALLEST, log_scores.exp(), small)
