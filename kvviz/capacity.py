"""CapKV's capacities: how much of the query-to-output channel a set of retained entries can carry, in nats.

Source: CapKV, equations 5 and 10 to 12. With K_C [n, d] the retained keys, U_C [dv, n] the output directions (the values, or
W_O v), and S = U_C K_C = sum u_i k_i' [dv, d]:

    K-capacity  = log det(I + K_C K_C')                                  eq. 10
    U-capacity  = log det(I + U_C U_C')                                  eq. 11
    KU-capacity = log det(I + U_C K_C K_C' U_C') = log det(I + S S')     eq. 12
    I(q; Y)     = 1/2 log det(I + Sigma_noise^-1 S Lambda_Q S')          eq. 5

By Sylvester's identity, log det(I + K K') = log det(I + K'K), so all matrices are d x d, whatever n. Computed in float64: the
eigenvalues reach far beyond the identity that is added to them. Entries that are zero vectors add nothing, so sets of unequal
size can be padded with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvviz.gather import take

CURVES = ("K", "U", "KU")
"""The capacities in the order of the first axis of `capacity_curve`."""


def key_capacity(K: Tensor) -> Tensor:
    """Equation 10, in nats, float64: keys [..., n, d] -> [...]."""
    return _log_det(_gram(K, K))


def output_capacity(V: Tensor) -> Tensor:
    """Equation 11, in nats, float64: output directions [..., n, dv] -> [...]."""
    return _log_det(_gram(V, V))


def joint_capacity(K: Tensor, V: Tensor) -> Tensor:
    """Equation 12, in nats, float64: keys [..., n, d] and output directions [..., n, dv] -> [...]."""
    S = _gram(V, K)
    return _log_det(S @ S.mT)


def mutual_information(K: Tensor, V: Tensor, query_cov: Tensor, noise: float | Tensor = 1.0) -> Tensor:
    """Equation 5, in nats, float64.

    Args:
        K, V: [..., n, d] and [..., n, dv].
        query_cov: Lambda_Q, [..., d, d], positive semi-definite.
        noise: Sigma_noise, a variance (noise times the identity) or a [..., dv, dv] covariance.

    Returns [...].
    """
    S = _gram(V, K)
    noise = torch.as_tensor(noise, dtype=torch.float64, device=S.device)
    if noise.dim() < 2:
        if not bool((noise > 0).all()):
            raise ValueError(f"noise is {noise.tolist()}: it is a variance, above 0")
        noise = noise[..., None, None] * torch.eye(S.shape[-2], dtype=torch.float64, device=S.device)
    root = torch.linalg.cholesky(noise)  # Sigma_noise = root root'
    S = torch.linalg.solve_triangular(root, S, upper=False)
    return 0.5 * _log_det(S @ exact(query_cov) @ S.mT)


def capacity_curve(K: Tensor, V: Tensor, order: Tensor, budgets: Sequence[int]) -> Tensor:
    """The three capacities of the first b entries of an order, for every budget b.

    Args:
        K, V: [H, N, d] and [H, N, dv].
        order: [H, N] (or [H, M], M >= the largest budget) positions, the entry to be kept longest first.
        budgets: entries kept, in any order.

    Returns [3, len(budgets), H] float64, in nats, along the first axis as `CURVES`.
    """
    wanted = [int(b) for b in budgets]
    if not wanted or min(wanted) < 0 or max(wanted) > order.shape[1]:
        raise ValueError(f"budgets {wanted} must lie between 0 and the {order.shape[1]} ordered entries")
    cuts = sorted(set(wanted))
    sets = torch.zeros(len(cuts), *K.shape[:2], dtype=torch.bool, device=K.device)
    for kept, cut in zip(sets, cuts, strict=True):
        kept.scatter_(1, order[:, :cut], True)
    return capacity_of_sets(K, V, sets)[:, [cuts.index(b) for b in wanted]]


def capacity_of_sets(K: Tensor, V: Tensor, sets: Tensor) -> Tensor:
    """The three capacities of any sets of entries, which need not be nested (budgets by head, evictions in rounds).

    The sums go from one set to the next by the entries that come and go, so similar sets in a row cost little.

    Args:
        K, V: [H, N, d] and [H, N, dv].
        sets: [S, H, N] bool.

    Returns [3, S, H] float64, in nats, along the first axis as `CURVES`.
    """
    both = exact(torch.cat((K, V), dim=-1))  # [H, N, d + dv]: its Gram matrix holds K'K, V'V and S
    sets = sets.to(both.device)
    gram = both.new_zeros(len(both), both.shape[-1], both.shape[-1])
    grams, before = [], torch.zeros_like(sets[0])
    for now in sets:
        for changed, sign in ((now & ~before, 1), (before & ~now, -1)):
            count = changed.sum(dim=1)
            most = int(count.max())
            if most == 0:
                continue
            index = changed.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
            entries = take(both, index)
            if int(count.min()) < most:
                entries = entries * changed.gather(1, index)[..., None]
            gram.baddbmm_(entries.mT, entries, alpha=sign)
        grams.append(gram.clone())
        before = now
    gram, d = torch.stack(grams), K.shape[-1]  # [S, H, d + dv, d + dv]
    S = gram[..., d:, :d]
    return torch.stack([_log_det(gram[..., :d, :d]), _log_det(gram[..., d:, d:]), _log_det(S @ S.mT)])


def effective_rank(X: Tensor) -> Tensor:
    """exp of the entropy of the normalised singular values (Roy and Vetterli, 2007): [..., n, d] -> [...], 1 to min(n, d).

    How many directions the rows really use; 0 for the zero matrix.
    """
    values = torch.linalg.eigvalsh(_gram(X, X)).clamp_min(0).sqrt()
    total = values.sum(-1, keepdim=True)
    share = values / total.clamp_min(torch.finfo(values.dtype).tiny)
    return torch.special.entr(share).sum(-1).exp() * (total[..., 0] > 0)


def _gram(left: Tensor, right: Tensor) -> Tensor:
    """sum over the entries of left_i right_i': [..., n, a], [..., n, b] -> [..., a, b] float64."""
    return exact(left).mT @ exact(right)


def exact(x: Tensor) -> Tensor:
    """x in float64, on the CPU where the device has none (MPS)."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def _log_det(positive: Tensor) -> Tensor:
    """log det(I + positive) of symmetric positive semi-definite [..., m, m]."""
    eye = torch.eye(positive.shape[-1], dtype=positive.dtype, device=positive.device)
    root = torch.linalg.cholesky(eye + (positive + positive.mT) / 2)
    return 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
