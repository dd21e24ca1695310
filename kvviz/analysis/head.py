"""One query head: its values on a plane, its error taken apart, and its error against the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvviz.analysis.core import PIECE, Store
from kvviz.analysis.views import ErrorCurves, HeadView
from kvviz.errors import Decomposition, decompose_sets
from kvviz.policies.policy import Policy
from kvviz.projection import Projection, fit

MEANS = ("w_E", "gamma", "cos", "relative_error", "corrected_error", "cos_estimate")
"""Parts of the decomposition that are shown as they are, each the mean over the probes."""

VECTORS = {"f": "f", "f_R": "f_R", "f_E": "f_E", "estimate": "fhat_E"}
"""Arrow -> part of the decomposition."""

SCALES = (1, 2, 5, 10, 20, 50, 100)
"""How many times longer arrows may be drawn."""

BORDER = 0.1
"""Share of each axis at either end that longer arrows leave free, for their labels."""


def order_of(policy: Policy) -> int:
    """Order of the estimate that is shown: the policy's own, or 1 where it does not correct."""
    return 1 if policy.correction is None else policy.correction


def projection(store: Store, layer: int, kv_head: int) -> Projection:
    """The plane of a KV head's values, fitted on all of them once."""
    return store.result(("plane", layer, kv_head), lambda: fit(store.state.layers[layer].values[kv_head]))


def parts_of(store: Store, policy: Policy, budgets: Sequence[int], layer: int, head: int) -> Decomposition:
    """The error of one query head under several budgets at once, [B, P]."""
    own = store.state.layers[layer]
    kv_head = head // own.groups
    which = slice(kv_head, kv_head + 1)
    parts = decompose_sets(
        store.probes(own)[head : head + 1],
        own.keys[which],
        own.values[which],
        torch.stack([store.mask(policy, budget, layer)[which] for budget in budgets]),
        scaling=own.scaling,
        order=order_of(policy),
        partition=policy.partition,
    )
    return Decomposition(**{name: part[:, 0] for name, part in parts.items()})


def head_view(store: Store, policy: Policy, budget: int, layer: int, head: int, budgets: Sequence[int]) -> HeadView:
    """See `HeadView`. `budgets` are those of the policy's error curve, over which the arrows keep one scale."""
    own = store.state.layers[layer]
    kv_head = head // own.groups
    plane = projection(store, layer, kv_head)
    parts = parts_of(store, policy, [budget], layer, head)
    tips = plane.transform(_vectors(parts)[0])
    room = _room(tips[:3], plane)
    if not own.sliding:
        usual = [own.n_tokens / 32 <= b <= own.n_tokens / 2 for b in budgets]
        room = min(room, curve(store, policy, budgets, layer, head).room[usual].min(initial=np.inf))
    first = max(own.total_tokens - own.n_tokens, 0) if own.sliding else 0
    return HeadView(
        policy=policy.name,
        label=policy.label,
        budget=budget,
        layer=layer,
        head=head,
        kv_head=kv_head,
        points=plane.points,
        positions=np.arange(first, first + own.n_tokens),
        explained=tuple(plane.explained.tolist()),
        x_range=plane.x_range,
        y_range=plane.y_range,
        kept=store.mask(policy, budget, layer)[kv_head].cpu().numpy(),
        scores=_scores(store, policy, layer, kv_head, own.n_tokens),
        origin=plane.origin,
        arrows=dict(zip(VECTORS, tips, strict=True)),
        scale=max((scale for scale in SCALES if scale <= room), default=1),
        lengths={name: float(parts[part].norm(dim=-1).mean()) for name, part in VECTORS.items()},
        probes=parts.w_E.shape[1],
        real_probes=store.real_probes,
        sliding=own.sliding,
        order=order_of(policy),
        partition=policy.partition,
        corrects=policy.correction is not None,
        **averages(parts),
    )


def _vectors(parts: Decomposition) -> Tensor:
    """The arrows [B, 4, d], means over the probes."""
    return torch.stack([parts[part].mean(dim=1) for part in VECTORS.values()], dim=1)


def _room(tips: np.ndarray, plane: Projection) -> float:
    """How many times longer f, f_R and f_E can be and still end inside the axes."""
    room = np.inf
    for axis, (low, high) in enumerate((plane.x_range, plane.y_range)):
        border = BORDER * (high - low)
        way = tips[:, axis] - plane.origin[axis]
        space = np.where(way > 0, high - border - plane.origin[axis], low + border - plane.origin[axis])
        ratio = np.divide(space, way, out=np.full(len(way), np.inf), where=np.abs(way) > 1e-9)
        room = min(room, ratio.min(initial=np.inf))
    return float(max(room, 0))


def _scores(store: Store, policy: Policy, layer: int, kv_head: int, n: int) -> np.ndarray:
    """A head's scores [N] float32, NaN where the method gives none."""
    if policy.keeps_all or store.state.layers[layer].sliding:
        return np.full(n, np.nan, dtype=np.float32)
    return store.scores(policy, layer)[kv_head].float().cpu().numpy()


def averages(parts: Decomposition) -> dict[str, float]:
    """Means over the probes [1, P] of every number, the angle in degrees among them."""
    means = {name: float(parts[name].mean()) for name in MEANS}
    means["angle"] = float(parts.cos.clamp(-1, 1).arccos().rad2deg().mean())
    means["log_z_gap"] = float((parts.log_Z_E - parts.log_Zhat_E).mean())  # NaN where nothing was evicted
    return means


class Curve(NamedTuple):
    """One policy's error [B] before and after correction, and how much longer its arrows could be [B]."""

    errors: np.ndarray
    corrected: np.ndarray
    room: np.ndarray


def curve(store: Store, policy: Policy, budgets: Sequence[int], layer: int, head: int) -> Curve:
    """A policy's curve for one query head, a few budgets at a time where the prompt is long."""

    def make() -> Curve:
        """Mean errors before and after the correction, and how long arrows may be drawn, [len(budgets)] each."""
        own = store.state.layers[layer]
        plane = projection(store, layer, head // own.groups)
        size = max(1, PIECE // (store.probes(own).shape[1] * own.n_tokens))
        errors, corrected, room = [], [], []
        for start in range(0, len(budgets), size):
            parts = parts_of(store, policy, budgets[start : start + size], layer, head)
            errors += parts.relative_error.mean(dim=1).tolist()
            corrected += parts.corrected_error.mean(dim=1).tolist()
            room += [_room(tips[:3], plane) for tips in plane.transform(_vectors(parts))]
        return Curve(np.array(errors), np.array(corrected), np.array(room))

    return store.result(("curve", policy, tuple(budgets), layer, head), make)


def error_curves(
    store: Store, policies: Sequence[Policy], budgets: Sequence[int], layer: int, head: int
) -> ErrorCurves:
    """See `ErrorCurves`."""
    curves = {policy.label: curve(store, policy, budgets, layer, head) for policy in policies}
    return ErrorCurves(
        layer=layer,
        head=head,
        n_tokens=store.state.n_tokens,
        budgets=np.asarray(budgets),
        policies={policy.label: policy.name for policy in policies},
        errors={label: found.errors for label, found in curves.items()},
        corrected={label: found.corrected for label, found in curves.items()},
        probes=store.probes(store.state.layers[layer]).shape[1],
    )
