"""Ridge leverage w_i v_i' A^-1 v_i, A = I + sum_j w_j v_j v_j' (CapKV, arXiv:2604.25975, equations 6 and 8).

Two ways to it. `quadratic_forms` is fast and takes weights of ordinary size. `log_leverage` takes the
logarithms of weights that differ by any power, as the printed exp(tau k.mu) does: with tau = 5, a model's
can span hundreds of powers of e, and A, in any floating-point format, would forget all but the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvviz.capacity import exact

DEPENDENT = 1e-10
"""A value is a combination of others when less than this share of it is left after they are eliminated."""


def quadratic_forms(values: Tensor, weights: Tensor) -> Tensor:
    """v_i' A^-1 v_i, with one A for each weighting of a head's values.

    One Cholesky factor each. Its d x d inverse makes the N solves one product of matrices, three times as
    fast as a triangular solve on a CPU, and leaves a sum of squares, never negative.

    Args:
        values: [H, N, d]
        weights: [H, g, N], not negative.

    Returns:
        [H, g, N]
    """
    g, d = weights.shape[1], values.shape[-1]
    identity = torch.eye(d, device=values.device, dtype=values.dtype)
    weighted = values.mT[:, None] * weights[:, :, None]  # [H, g, d, N]
    capacity = (weighted.flatten(1, 2) @ values).unflatten(1, (g, d)) + identity
    factor, failed = torch.linalg.cholesky_ex(capacity, check_errors=values.dtype == torch.float64)
    if failed.any():  # so large a sum that the identity was rounded away
        return quadratic_forms(exact(values), exact(weights)).to(values)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    halves = values @ inverse.flatten(1, 2).mT  # [H, N, g d]
    return halves.unflatten(-1, (g, d)).square().sum(dim=-1).mT


def log_leverage(values: Tensor, log_weights: Tensor) -> Tensor:
    """log(w_i v_i' A^-1 v_i) for weights of any size: nothing overflows, and no light entry is lost.

    The identity is d more entries, e_1 ... e_d of weight 1; then A = R' W R with R = [V; I]. Gaussian elimination
    gives R = L U, and the leverage is that of L: l_i' (L' W L)^-1 l_i w_i. Its pivots are the largest of W^(1/2) R
    that is left, so with w_k the weight of pivot row k, every L_ik (w_i / w_k)^(1/2) is of ordinary size.

    Args:
        values: [H, N, d]
        log_weights: [H, N], finite.

    Returns:
        [H, N] float64, at most 0; -inf where the value is zero.
    """
    heads, n, d = values.shape
    values, log_weights = exact(values), exact(log_weights)
    rows = torch.cat((values, torch.eye(d).to(values).expand(heads, d, d)), dim=1)
    log_weights = torch.cat((log_weights, log_weights.new_zeros(heads, d)), dim=1)
    order = (log_weights + 2 * rows.abs().amax(dim=-1).log()).argsort(dim=1, descending=True)
    rows, log_w = rows.gather(1, order[..., None].expand(-1, -1, d)), log_weights.gather(1, order)
    lower, pivot_log_w = _factorise(rows, log_w)
    half_ratio = (log_w[..., None] - pivot_log_w[:, None]) / 2
    half_ratio.masked_fill_(lower == 0, float("-inf"))
    scale = half_ratio.amax(dim=-1, keepdim=True).clamp_min(-1e300)  # apart, so that no leverage underflows
    relative = lower * (half_ratio - scale).exp()
    scaled = relative * scale.exp()
    factor = torch.linalg.cholesky(scaled.mT @ scaled)
    halves = relative @ torch.linalg.inv(factor).mT
    leverage = (halves.square().sum(dim=-1).log() + 2 * scale[..., 0]).clamp_max(0)
    return torch.empty_like(leverage).scatter_(1, order, leverage)[:, :n]


def _factorise(rows: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
    """L [H, M, d] of rows [H, M, d], in order of weighted size, and the log weights of its pivot rows [H, d]."""
    tried = 2 * rows.shape[-1]
    while True:  # the first 2 d rows mostly have d independent ones among them
        lower, upper, chosen, complete = _eliminate(rows[:, :tried].clone(), log_w[:, :tried])
        if complete or tried >= rows.shape[1]:
            lower = torch.cat((lower, rows[:, tried:] @ torch.linalg.inv(upper)), dim=1)
            return lower, log_w.gather(1, chosen)
        tried *= 2


def _eliminate(left: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Gaussian elimination of [H, M, d] in place: L [H, M, d], U [H, d, d], pivot rows [H, d]; were all found?"""
    heads = torch.arange(left.shape[0], device=left.device)
    negligible = DEPENDENT * left.abs().amax(dim=-1)
    lower, upper, chosen = [], [], []
    for _ in range(left.shape[-1]):
        largest = left.abs().amax(dim=-1)
        spent = largest <= negligible  # what is left of such a row is rounding
        row = (log_w + 2 * largest.log()).masked_fill(spent, float("-inf")).argmax(dim=-1)
        pivot = left[heads, row]  # [H, d]
        column = pivot.abs().argmax(dim=-1)
        share = (left[heads, :, column] / pivot[heads, column][:, None]).masked_fill(spent, 0)
        left.baddbmm_(share[..., None], pivot[:, None], alpha=-1)
        left[heads, row] = 0
        lower.append(share)
        upper.append(pivot)
        chosen.append(row)
    complete = not spent.all(dim=-1).any()  # a head without a pivot stays without one
    return torch.stack(lower, dim=2), torch.stack(upper, dim=1), torch.stack(chosen, dim=1), bool(complete)
