"""CapKV's capacities of what every policy keeps, against the share removed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from kvviz.analysis.core import Store
from kvviz.analysis.views import CapacityCurves
from kvviz.capacity import capacity_of_sets
from kvviz.policies.base import Scorer
from kvviz.policies.policy import Policy
from kvviz.prefill import Progress

COARSE = 2
"""Policies that evict step by step get every second point of the mean curve: each costs an eviction of its own."""

WORKERS = 4
"""Layers that are worked out side by side, at most."""


def capacity_curves(
    store: Store,
    policies: Sequence[Policy],
    shares: Sequence[float],
    only: tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> CapacityCurves:
    """See `CapacityCurves`.

    Args:
        only: (layer, KV head): work out this head alone, the rest is NaN.
        progress: told the share done of a policy, and the policy, while something is not in memory yet.
    """
    n = store.state.n_tokens
    budgets = budgets_of(shares, n)
    found = {policy.label: _shares(store, policy, budgets, only, progress) for policy in policies}
    names = {policy.label: policy.name for policy in policies}
    return CapacityCurves(n, 1 - np.array(budgets) / n, np.array(budgets), found, names)


def budgets_of(shares: Sequence[float], n_tokens: int) -> list[int]:
    """Shares removed -> different budgets, the largest first, at least one entry."""
    return sorted({min(max(round(n_tokens * (1 - share)), 1), n_tokens) for share in shares}, reverse=True)


def stepwise(policy: Policy) -> bool:
    """Whether the policy evicts step by step, anew for every budget, so that a curve costs much more."""
    return (
        type(policy.scorer).refine is not Scorer.refine
        and getattr(policy.scorer, "order_of_eviction", "") != "one batch"
    )


def _shares(
    store: Store, policy: Policy, budgets: list[int], only: tuple[int, int] | None, progress: Progress | None
) -> np.ndarray:
    """[3, S, L, Hkv] shares of the full cache's capacity; the full cache itself is not worked out again."""
    layers = store.state.layers
    heads = max(layer.keys.shape[0] for layer in layers)
    found = np.full((3, len(budgets), len(layers), heads), np.nan)
    wanted = [i for i, budget in enumerate(budgets) if budget < store.state.n_tokens]
    if stepwise(policy) and only is None:
        wanted = sorted({*wanted[::COARSE], *wanted[-1:]})
    chosen = [budgets[i] for i in wanted]
    key = (policy.scorer, policy.allocation, policy.sinks, policy.recent, tuple(chosen))
    which = slice(None) if only is None else slice(only[1], only[1] + 1)
    indices = [index for index in store.open_layers if only is None or index == only[0]]
    whole = np.where(np.array(budgets) >= store.state.n_tokens, 1.0, np.nan)
    for index in indices:
        found[:, :, index, which] = 1.0 if policy.keeps_all else whole[None, :, None]
    if policy.keeps_all or not chosen:
        return found

    def work(index: int) -> np.ndarray:
        full = store.result(("full capacity", index, only), lambda: _full(store, index, which))
        return store.result(("capacity", key, index, only), lambda: _layer(store, policy, chosen, index, which)) / full

    missing = [index for index in indices if not store.holds(("capacity", key, index, only))]
    for number, _ in enumerate(_in_parallel(work, missing), start=1):
        if progress is not None:
            progress(number / len(missing), policy.label)
    for index in indices:
        found[:, wanted, index, which] = work(index)
    return found


def _in_parallel(work: Callable[[int], np.ndarray], indices: list[int]) -> Iterator[np.ndarray]:
    """The layers' results in order. Each is many small steps, so layers side by side use the cores better than PyTorch can."""
    if len(indices) < 2:
        yield from map(work, indices)
        return
    with ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
        yield from pool.map(work, indices)


def _layer(store: Store, policy: Policy, budgets: list[int], index: int, which: slice) -> np.ndarray:
    """[3, S, heads] in nats; the smallest set comes first, so that each mostly adds to the one before."""
    own = store.state.layers[index]
    masks = torch.stack([store.mask(policy, budget, index)[which] for budget in reversed(budgets)])
    return capacity_of_sets(own.keys[which], own.values[which], masks).flip(1).cpu().numpy()


def _full(store: Store, index: int, which: slice) -> np.ndarray:
    """[3, 1, heads] of the full cache."""
    own = store.state.layers[index]
    everything = torch.ones(1, *own.keys[which].shape[:2], dtype=torch.bool, device=own.keys.device)
    return capacity_of_sets(own.keys[which], own.values[which], everything).cpu().numpy()


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation, equal values at their mean rank; NaN for fewer than three points or a constant."""
    if len(x) < 3:
        return float("nan")
    a, b = (_ranks(np.asarray(values, dtype=float)) for values in (x, y))
    a, b = a - a.mean(), b - b.mean()
    size = np.sqrt((a**2).sum() * (b**2).sum())
    return float((a * b).sum() / size) if size else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[inverse]
