"""MomentKV's algorithm 1, phase 1, to the letter: one entry leaves at a time, and the statistics change after each.

Source: MomentKV (arXiv:2606.01563), algorithm 1. Read as printed, a step costs O(N d^2) for the residuals. Here it costs O(N d):
with n, k_, v_, C the count, means and centred covariance of the evicted, and a = c / n,

    ||r_j||^2 = ||v_j||^2 + ||b||^2 - 2 (v_j.b - a k_j.C'b) - 2 a x_j + a^2 y_j,    b = v_ - a C k_,
    x_j = v_j' C k_j,    y_j = ||C k_j||^2.

Evicting (k*, v*) adds one product of rank one, C += rho w u' with u = k* - k_, w = v* - v_, rho = n / (n + 1), so that

    x_j += rho (v_j.w) (k_j.u),    y_j += 2 rho (k_j.u) k_j.(D'w),    D halfway between the old C and the new.

All products with the entries are the rows of one thin matrix product, [4, d + dv] @ [K V]'. Entries that have left are dropped
from the arrays, and x and y computed afresh, each time an eighth of them has gone. All heads take their steps together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvviz.gather import take


def evict_sequential(
    K: Tensor,
    V: Tensor,
    queries: Tensor,
    budget: int | Tensor,
    *,
    protected: Tensor | None = None,
    scaling: float | None = None,
) -> Tensor:
    """Positions in the order in which algorithm 1 evicts them.

    Args:
        K, V: [N, d] or [H, N, d], keys after RoPE.
        queries: [d] or [Q, d] for K [N, d]; [H, Q, d] or [H, g, w, d] for K [H, N, d]. The attention of an entry is the
            mean over them, each query's renormalised over what is retained at every step.
        budget: entries to keep, one number or [H].
        protected: [N] or [H, N] bool, entries that never leave; as many in every head.
        scaling: c, 1 / sqrt(d) by default.

    Returns int64 [N - budget], or [H, N - budget]; where heads keep different numbers, rows end in -1.
    """
    if K.dim() == 2:
        rows = queries.reshape(1, -1, K.shape[-1])
        return evict_sequential(K[None], V[None], rows, budget, protected=protected, scaling=scaling)[0]
    heads, n, d = K.shape
    c = d**-0.5 if scaling is None else scaling
    count = torch.as_tensor(budget, device=K.device).expand(heads)
    if bool((count < 1).any()):
        raise ValueError(f"budget is {budget}: keep at least one entry a head")
    dtype = torch.promote_types(K.dtype, torch.float32)
    attention = (c * queries.reshape(heads, -1, d).to(dtype) @ K.to(dtype).mT).softmax(dim=-1)
    return evict_in_order(K, V, attention, (n - count).clamp_min(0), protected=protected, scaling=c)


@torch.no_grad()
def evict_in_order(
    keys: Tensor, values: Tensor, attention: Tensor, steps: Tensor, *, protected: Tensor | None, scaling: float
) -> Tensor:
    """Algorithm 1, phase 1, from given attention.

    Args:
        keys, values: [H, N, d].
        attention: [H, Q, N], rows that add up to 1. An entry's weight is the mean over the rows, each renormalised over what
            is retained (which changes nothing for Q = 1).
        steps: [H] int64, evictions in each head.
        protected: [N] or [H, N] bool or None.

    Returns [H, max(steps)] int64 positions, -1 beyond a head's own number of steps.
    """
    heads, n = keys.shape[:2]
    free = torch.arange(n, device=keys.device).expand(heads, n)
    if protected is not None:
        free = free[~protected.expand(heads, n)].view(heads, -1)
    most = int(steps.max())
    if most > free.shape[1]:
        raise ValueError(
            f"{most} entries cannot leave, only {free.shape[1]} are unprotected: raise the budget or protect fewer"
        )
    run = _Run(keys, values, attention, free, scaling)
    order = torch.cat([free[:, :0], *(run.evict() for _ in range(most))], dim=1)
    return order.masked_fill(torch.arange(most, device=order.device) >= steps[:, None], -1)


class _Run:
    """The state between two steps. Arrays hold the entries still retained and unprotected, and for a while some that left.

    Vectors are rows [H, 1, .]; d + dv is the length of a key and its value side by side.
    """

    def __init__(self, keys: Tensor, values: Tensor, attention: Tensor, free: Tensor, scaling: float) -> None:
        dtype = torch.promote_types(keys.dtype, torch.float32)
        k, v = take(keys, free).to(dtype), take(values, free).to(dtype)
        heads, _, self.d = k.shape
        self.c, self.n, self.position = scaling, 0, free
        pairs = torch.cat((k, v), dim=-1)
        size = pairs.shape[-1]
        self.pairs = pairs - pairs.mean(
            1, keepdim=True
        )  # r_j is the same from any origin, and the sums more exact from here
        self.mean = pairs.new_zeros(heads, 1, size)  # (k_, v_)
        self.cov = pairs.new_zeros(heads, size - self.d, self.d)  # C
        attention = attention.to(dtype)
        self.mass = attention.sum(-1, keepdim=True).mT  # [H, 1, Q], what is retained of each row
        self.rows = attention.gather(2, free[:, None].expand(-1, attention.shape[1], -1))
        self.first = v.norm(dim=-1)  # n = 0: r_j = v_j
        self.products = pairs.new_zeros(heads, 4, size)  # (-a C'b, b), (u, 0), (D'w, 0), (0, w)
        self.halves = pairs.new_zeros(2, size)
        self.halves[0, : self.d] = self.halves[1, self.d :] = 1
        self._refresh()

    def evict(self) -> Tensor:
        """One step of every head; the positions that left, [H, 1]."""
        index = torch.addcmul(self.gone, self._attention(), self._residual()).argmin(dim=1, keepdim=True)
        position = self.position.gather(1, index)
        self.gone.scatter_(1, index, torch.inf)
        if self.mass.shape[2] > 1:
            self.mass -= self.rows.gather(2, index[:, None].expand(-1, self.rows.shape[1], 1)).mT
        flat = self.pairs.view(-1, self.pairs.shape[-1])
        self._count(flat.index_select(0, (index + self.base).view(-1))[:, None])
        self.left += 1
        if self.left * 8 >= self.position.shape[1]:
            self._compact()
        return position

    def _attention(self) -> Tensor:
        """alpha_j [H, n], up to a factor that all entries of a head share."""
        if self.mass.shape[2] == 1:
            return self.rows[:, 0]
        return torch.bmm(self.mass.reciprocal(), self.rows)[:, 0]

    def _residual(self) -> Tensor:
        """||r_j|| [H, n], once x and y have seen the last eviction."""
        if self.n == 0:
            return self.first
        a, rho = self.c / self.n, (self.n - 1) / self.n
        b = self.products[:, :1, self.d :]
        linear, ku, kt, vw = torch.bmm(self.products, self.pairs.mT).unbind(1)
        self.x.addcmul_(vw, ku, value=rho)
        self.y.addcmul_(kt, ku, value=2 * rho)
        square = torch.add(self.square, linear, alpha=-2).add_(self.x, alpha=-2 * a).add_(self.y, alpha=a * a)
        return square.add_(torch.bmm(b, b.mT)[:, 0]).clamp_min_(0).sqrt_()

    def _count(self, pair: Tensor) -> None:
        """Add pair [H, 1, d + dv] to n, k_, v_ and C, and set the rows that the next residuals are made from."""
        d, products = self.d, self.products
        rho = self.n / (self.n + 1)
        self.n += 1
        step = pair - self.mean
        self.mean.add_(step, alpha=1 / self.n)
        u, w = step[..., :d], step[..., d:]
        torch.mul(step, self.halves, out=products[:, 1::2])
        self.cov.baddbmm_(w.mT, u, alpha=rho / 2)
        torch.bmm(w, self.cov, out=products[:, 2:3, :d])
        self.cov.baddbmm_(w.mT, u, alpha=rho / 2)
        b = torch.baddbmm(self.mean[..., d:], self.mean[..., :d], self.cov.mT, alpha=-self.c / self.n)
        products[:, :1, d:] = b
        torch.mul(torch.bmm(b, self.cov), -self.c / self.n, out=products[:, :1, :d])

    def _compact(self) -> None:
        """Drop what has left from the arrays."""
        stay = (self.gone == 0).nonzero()[:, 1].view(len(self.gone), -1)
        self.position = self.position.gather(1, stay)
        self.pairs = take(self.pairs, stay)
        self.rows = self.rows.gather(2, stay[:, None].expand(-1, self.rows.shape[1], -1))
        self._refresh()

    def _refresh(self) -> None:
        """x, y and ||v||^2 from their definitions, with every eviction so far in them."""
        k, v = self.pairs[..., : self.d], self.pairs[..., self.d :]
        seen = k @ self.cov.mT
        self.x, self.y, self.square = (v * seen).sum(-1), seen.square().sum(-1), v.square().sum(-1)
        self.products[:, 1:] = 0
        self.gone, self.left = torch.zeros_like(self.x), 0
        self.base = torch.arange(len(k), device=k.device)[:, None] * k.shape[1]
