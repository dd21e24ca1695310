"""What the pages Values, Heads and Capacity look at: plain numpy, ready to be drawn, saved or checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Measure(NamedTuple):
    """A number of each layer and query head: its name, its symbol, and what it says in one sentence.

    `signed` measures are drawn around zero.
    """

    title: str
    symbol: str
    help: str
    signed: bool = False


MEASURES: dict[str, Measure] = {
    "relative_error": Measure(
        "Relative error",
        "w<sub>E</sub> γ",
        "Length of the error over the length of the full output, $\\lVert f - f_R\\rVert / \\lVert f\\rVert = w_E\\gamma$.",
    ),
    "w_E": Measure(
        "Attention lost", "w<sub>E</sub>", "Share $w_E$ of the attention that falls on evicted entries, 0 to 1."
    ),
    "cos": Measure(
        "Directional gap (cosine)",
        "cos(f<sub>E</sub>, f<sub>R</sub>)",
        "Cosine of $f_E$ and $f_R$; 1 means that the evicted part's output points where the kept part's points.",
        signed=True,
    ),
    "gamma": Measure(
        "Gap γ",
        "γ",
        "How far the evicted part's output is from the kept part's, $\\gamma = \\lVert f_E - f_R\\rVert / \\lVert f\\rVert$.",
    ),
    "corrected_error": Measure(
        "Error after correction",
        "‖f − f̂‖ / ‖f‖",
        "Relative error when the evicted part is put back from its moments, as MomentKV does.",
    ),
    "log_z_gap": Measure(
        "Lost mass beyond its estimate",
        "log Z<sub>E</sub> − log Ẑ<sub>E</sub>",
        "$\\log Z_E - \\log \\hat Z_E$ in nats: how far the estimate of the lost attention mass is too low; 3 nats are a "
        "factor of 20.",
        signed=True,
    ),
}
"""The measures of `Analysis.error_map`, by key."""


@dataclass(frozen=True, eq=False)
class HeadView:
    """One query head under one policy and budget, on the PCA plane of its KV head's values.

    The plane is fitted once on all N values, so it does not depend on policy or budget. Numbers are means over the `probes`
    queries of each query's own number; arrows are the means of the vectors, projected.

    Attributes:
        policy, label: registry name, and name with options.
        budget: entries a head, on average over the model; kept.sum() is what this head got.
        layer, head, kv_head: which; `head` is a query head.
        points: [N, 2] float32, the values on the plane. positions: [N], of their tokens in the prompt.
        explained: share of the values' variance along each of the two axes.
        x_range, y_range: fixed ranges that hold every value and the origin.
        kept: [N] bool. scores: [N] float32, higher = keep.
        origin: [2], the zero vector on the plane.
        arrows: name -> [2], where "f", "f_R", "f_E" and "estimate" end, true to length.
        scale: how many times longer they are to be drawn, since averages are short beside the values; the same for all
            budgets but very small and very large ones.
        lengths: name -> mean norm of the same vectors in all d dimensions.
        angle: degrees between f_R and f_E, mean of the probes' angles.
        w_E, gamma, cos, relative_error, corrected_error, log_z_gap, cos_estimate: see MEASURES and kvviz.errors.
        order, partition: of the estimate. `corrects`: the policy applies it; otherwise it only shows what order 1 would do.
        probes: how many queries are averaged.
        real_probes: they are of the question and of the full cache's continuation; otherwise the prompt's last query.
        sliding: a layer with a sliding window, never evicted.
    """

    policy: str
    label: str
    budget: int
    layer: int
    head: int
    kv_head: int
    points: np.ndarray
    positions: np.ndarray
    explained: tuple[float, float]
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    kept: np.ndarray
    scores: np.ndarray
    origin: np.ndarray
    arrows: Mapping[str, np.ndarray]
    scale: int
    lengths: Mapping[str, float]
    angle: float
    w_E: float
    cos: float
    gamma: float
    relative_error: float
    corrected_error: float
    log_z_gap: float
    cos_estimate: float
    order: int
    partition: float
    corrects: bool
    probes: int
    real_probes: bool = True
    sliding: bool = False

    @property
    def n_tokens(self) -> int:
        """N, values of the head."""
        return len(self.points)

    @property
    def n_kept(self) -> int:
        """Entries that this head keeps."""
        return int(self.kept.sum())


@dataclass(frozen=True, eq=False)
class ErrorCurves:
    """Error of one head against the budget. `errors` and `corrected`: label -> [len(budgets)] float64.

    `policies` has the registry name of each label; mean over `probes` queries.
    """

    layer: int
    head: int
    n_tokens: int
    budgets: np.ndarray
    policies: Mapping[str, str]
    errors: Mapping[str, np.ndarray]
    corrected: Mapping[str, np.ndarray]
    probes: int


@dataclass(frozen=True, eq=False)
class ErrorMap:
    """Measures of every layer and query head: key of MEASURES -> [L, Hq] float32, means over `probes` queries.

    NaN where there is none: layers with a sliding window (`sliding`, [L] bool), and log Z_E where nothing was evicted.
    """

    label: str
    policy: str
    budget: int
    groups: int
    sliding: np.ndarray
    measures: Mapping[str, np.ndarray]
    probes: int

    def __getitem__(self, measure: str) -> np.ndarray:
        return self.measures[measure]

    def minus(self, other: ErrorMap) -> dict[str, np.ndarray]:
        """The difference map: this policy's measures minus another's."""
        return {key: values - other.measures[key] for key, values in self.measures.items()}


CAPACITIES: dict[str, Measure] = {
    "K": Measure(
        "K capacity", "log det(I + KKᵀ)", "How many query directions the kept keys can tell apart (equation 10)."
    ),
    "U": Measure(
        "U capacity", "log det(I + UUᵀ)", "How many output directions the kept values can write (equation 11)."
    ),
    "KU": Measure(
        "KU capacity",
        "log det(I + SSᵀ), S = UKᵀ",
        "How much of the channel from query to output is left (equation 12).",
    ),
}
"""CapKV's capacities in the order of the first axis of `CapacityCurves.shares`."""


@dataclass(frozen=True, eq=False)
class CapacityCurves:
    """Capacities of what is kept, as a share of the full cache's.

    Attributes:
        removed: [S] shares of the entries removed, ascending, as they really are. budgets: [S] entries a head.
        shares: label -> [3, S, L, Hkv]; 1 is the full cache. NaN in layers with a sliding window, and where left out.
        policies: label -> registry name.
    """

    n_tokens: int
    removed: np.ndarray
    budgets: np.ndarray
    shares: Mapping[str, np.ndarray]
    policies: Mapping[str, str]

    def mean(self, label: str) -> np.ndarray:
        """[3, S], mean over layers and KV heads."""
        return self._open(label).mean(axis=-1)

    def quantiles(self, label: str, low: float = 0.1, high: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """[3, S] each, over layers and KV heads."""
        below, above = np.quantile(self._open(label), (low, high), axis=-1)
        return below, above

    def _open(self, label: str) -> np.ndarray:
        """[3, S, heads of all layers that can be evicted]."""
        values = self.shares[label]
        sliding = np.isnan(values).all(axis=(0, 1, 3))
        return values[:, :, ~sliding].reshape(*values.shape[:2], -1)

    def at(self, label: str, layer: int, kv_head: int) -> np.ndarray:
        """[3, S] of one layer and KV head."""
        return self.shares[label][:, :, layer, kv_head]
