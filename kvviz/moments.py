"""What MomentKV remembers of the entries that it evicts: four sums a head, and the output correction that they give.

Source: MomentKV (arXiv:2606.01563), sections 4.1 and 4.2. For one head with evicted set E, c the attention scaling:

    n = |E|, s_k = sum k_i, s_v = sum v_i, S = sum v_i k_i'          the statistics ("efficient updates")
    k_ = s_k / n, v_ = s_v / n, C = S - s_v s_k' / n                 means and centred value-key covariance
    f_E^(q)   = v_ + (c / n) C q                                     eq. 9 (order 1); v_ alone is order 0
    r_j       = v_j - v_ - (c / n) C (k_j - k_)                      eq. 10, the moment residual; v_j while n = 0
    log Z_E^  = log n + c q.k_                                       eq. 11, Jensen's lower bound of log Z_E
    f^        = (Z_R f_R + Z_E^ f_E^) / (Z_R + Z_E^)                 eq. 12

Ours: `partition` p in [0, 1] adds p c^2 / 2 q' Sigma_k q to log Z_E^, with Sigma_k the covariance of the evicted keys. p = 0 is
the paper's bound; p = 1 is exact for Gaussian keys.

Sums are float32 whatever the cache's dtype (in bfloat16, 256 + 1 == 256); float64 input makes them float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from kvviz.sequential import evict_sequential

__all__ = ["Correction", "Moments", "evict_sequential"]


@dataclass(frozen=True)
class Correction:
    """The correction of fixed statistics, ready for the decode loop: one matrix product and a few element-wise operations.

    Attributes:
        weight: [B, d, dv + 1], columns (c / n) C' and, last, c k_; B is the product of the leading shape.
        bias: [B, 1, dv + 1], v_ and, last, log n (-inf while n = 0).
        curvature: [B, d, d], p c^2 / 2 Sigma_k, or None where every p is 0.
        lead: the leading shape of the statistics, such as (Hkv,) or (rows, Hkv).
    """

    weight: Tensor
    bias: Tensor
    curvature: Tensor | None
    lead: tuple[int, ...]

    def estimate(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """query [*lead, ..., d] -> f_E^ [*lead, ..., dv] (zero while n = 0) and log Z_E^ [*lead, ...] (-inf while n = 0)."""
        f_E, log_z = self._estimate(query)
        return f_E, log_z.squeeze(-1)

    def _estimate(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """The same, with log Z_E^ [*lead, ..., 1]."""
        depth = len(self.lead)
        if query.shape[:depth] != self.lead or query.shape[-1] != self.weight.shape[1]:
            raise ValueError(
                f"query has shape {tuple(query.shape)}, expected {self.lead} + (..., {self.weight.shape[1]}): "
                "reshape query heads [Hq, T, d] to [Hkv, g, T, d] first"
            )
        q = query.to(self.weight.dtype).reshape(self.weight.shape[0], -1, self.weight.shape[1])
        both = torch.baddbmm(self.bias, q, self.weight)  # [B, m, dv + 1]
        f_E, log_z = both.view(*query.shape[:-1], -1).split((both.shape[-1] - 1, 1), dim=-1)
        if self.curvature is not None:
            log_z = log_z + (torch.bmm(q, self.curvature) * q).sum(-1).view(log_z.shape)
        return f_E, log_z

    def apply(self, query: Tensor, f_R: Tensor, log_Z_R: Tensor, in_place: bool = False) -> Tensor:
        """Equation 12 in the log domain.

        Args:
            query: [*lead, ..., d], after RoPE.
            f_R: [*lead, ..., dv], attention output over what was kept.
            log_Z_R: [*lead, ...], natural log of the sum of exp(c q.k) over what was kept.
            in_place: write into f_R where its dtype allows.

        Returns the corrected output [*lead, ..., dv] in f_R's dtype; f_R itself where nothing was evicted.
        """
        f_E, log_Z_E = self._estimate(query)
        w_E = log_Z_E.sub(log_Z_R.to(log_Z_E.dtype).unsqueeze(-1)).sigmoid_()
        if in_place and f_R.dtype == f_E.dtype:
            return f_R.lerp_(f_E, w_E)
        return torch.lerp(f_R.to(f_E.dtype), f_E, w_E).to(f_R.dtype)

    @staticmethod
    def stack(corrections: Sequence[Correction]) -> Correction:
        """Corrections of equal leading shape -> one of leading shape (len(corrections), ...), each with its order and p."""
        first = corrections[0]
        curvature = None
        if any(one.curvature is not None for one in corrections):
            none = torch.zeros_like(first.weight[..., :1]).expand(-1, -1, first.weight.shape[1])  # p = 0
            curvature = torch.cat([none if one.curvature is None else one.curvature for one in corrections])
        weight = torch.cat([one.weight for one in corrections])
        bias = torch.cat([one.bias for one in corrections])
        return Correction(weight, bias, curvature, (len(corrections), *first.lead))


class Moments:
    """Running sums over evicted entries, one set for each head of any leading shape (usually [Hkv]).

    Attributes (lead = the leading shape):
        count: lead, n. key_sum: [*lead, d]. value_sum: [*lead, dv]. outer_sum: [*lead, dv, d].
        key_outer_sum: [*lead, d, d] when made with `second=True` (a partition above 0 needs it), else None.
        scaling: c.
    """

    _SUMS = ("count", "key_sum", "value_sum", "outer_sum", "key_outer_sum")

    def __init__(
        self,
        heads: int | tuple[int, ...],
        head_dim: int,
        *,
        value_dim: int | None = None,
        scaling: float | None = None,
        second: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """Nothing evicted yet. `heads`: an int, a tuple, or () for one head without a leading dimension."""
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"statistics cannot be summed in {dtype}: use float32 or float64")
        lead = (heads,) if isinstance(heads, int) else tuple(heads)
        value_dim = head_dim if value_dim is None else value_dim
        new = {"dtype": dtype, "device": device}
        self.count = torch.zeros(lead, **new)
        self.key_sum = torch.zeros(*lead, head_dim, **new)
        self.value_sum = torch.zeros(*lead, value_dim, **new)
        self.outer_sum = torch.zeros(*lead, value_dim, head_dim, **new)
        self.key_outer_sum = torch.zeros(*lead, head_dim, head_dim, **new) if second else None
        self._finish(head_dim**-0.5 if scaling is None else scaling)

    def _finish(self, scaling: float) -> None:
        if not (isfinite(scaling) and scaling > 0):
            raise ValueError(f"scaling is {scaling}: give the model's own attention scaling, 1/sqrt(d) for most")
        self.scaling = scaling
        self._ready: dict[tuple[int, float], Correction] = {}

    def _map(self, change) -> Moments:
        """The same statistics with every sum changed by `change(tensor)`."""
        other = object.__new__(type(self))
        for name in self._SUMS:
            tensor = getattr(self, name)
            setattr(other, name, None if tensor is None else change(tensor))
        other._finish(self.scaling)
        return other

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading shape."""
        return tuple(self.count.shape)

    @property
    def second(self) -> bool:
        """Whether the keys' second moment is kept, which a partition above 0 needs."""
        return self.key_outer_sum is not None

    @property
    def bytes(self) -> int:
        """Bytes of the sums: d dv + d + dv + 1 values a head (and d^2 more with the second moment)."""
        return sum(t.nbytes for name in self._SUMS if (t := getattr(self, name)) is not None)

    def __repr__(self) -> str:
        return f"Moments(lead={self.lead}, d={self.key_sum.shape[-1]}, entries={int(self.count.sum())}, second={self.second})"

    def clone(self) -> Moments:
        """An independent copy."""
        return self._map(Tensor.clone)

    def to(self, *args, **kwargs) -> Moments:
        """A copy on another device or in another dtype, as `Tensor.to`."""
        return self._map(lambda t: t.to(*args, **kwargs))

    def __getitem__(self, index) -> Moments:
        """Index the leading dimensions: `moments[0]`, `moments[:, heads]`, `moments[None]`."""
        return self._map(lambda t: t[index])

    select = __getitem__

    @staticmethod
    def stack(rows: Sequence[Moments]) -> Moments:
        """Statistics of equal shape -> one of leading shape (len(rows), ...)."""
        if len({(one.lead, one.second, one.scaling) for one in rows}) != 1:
            raise ValueError(
                "only statistics of the same shape, scaling and `second` stack: use Correction.stack for the rest"
            )
        other = object.__new__(Moments)
        for name in Moments._SUMS:
            tensors = [getattr(one, name) for one in rows]
            setattr(other, name, None if tensors[0] is None else torch.stack(tensors))
        other._finish(rows[0].scaling)
        return other

    def add(self, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Moments:
        """Count entries as evicted, in place; returns self.

        Args:
            key, value: [*lead, n, d], [*lead, n, dv], or one entry a head, [*lead, d], [*lead, dv].
            mask: [*lead, n] bool, which of the n entries to add in each head (all by default).
        """
        depth = len(self.lead)
        if key.dim() == depth + 1:
            key, value = key.unsqueeze(-2), value.unsqueeze(-2)
        expected = (*self.lead, key.shape[-2]) if key.dim() == depth + 2 else None
        if expected is None or key.shape[:-1] != expected or value.shape[:-1] != expected:
            raise ValueError(f"keys {tuple(key.shape)} and values {tuple(value.shape)} do not fit heads {self.lead}")
        if key.dtype == torch.float64 != self.count.dtype:
            self.__dict__ = self.to(torch.float64).__dict__
        key, value = key.to(self.count.dtype), value.to(self.count.dtype)
        if mask is not None:
            key, value = (x.masked_fill(~mask.unsqueeze(-1), 0) for x in (key, value))
        self.count += key.shape[-2] if mask is None else mask.sum(-1)
        self.key_sum += key.sum(-2)
        self.value_sum += value.sum(-2)
        self.outer_sum += value.mT @ key
        if self.key_outer_sum is not None:
            self.key_outer_sum += key.mT @ key
        self._ready.clear()
        return self

    def affine(self) -> tuple[Tensor, Tensor, Tensor]:
        """(k_ [*lead, d], v_ [*lead, dv], (c / n) C [*lead, dv, d]); all zero while n = 0."""
        n = self.count.clamp_min(1)[..., None]
        key_mean, value_mean = self.key_sum / n, self.value_sum / n
        covariance = self.outer_sum / n[..., None] - value_mean[..., :, None] * key_mean[..., None, :]
        return key_mean, value_mean, covariance * self.scaling

    def residual(self, key: Tensor, value: Tensor) -> Tensor:
        """Equation 10: r_j [*lead, n, dv] of key [*lead, n, d] and value [*lead, n, dv]; r_j = v_j while n = 0."""
        key_mean, value_mean, slope = self.affine()
        offset = value_mean - (slope @ key_mean[..., None])[..., 0]
        residual = value.to(slope.dtype) - offset.unsqueeze(-2)
        flat = [x.reshape(-1, *x.shape[-2:]) for x in (residual, key.to(slope.dtype), slope.mT)]
        return flat[0].baddbmm_(*flat[1:], alpha=-1).view(residual.shape)

    def predict(self, query: Tensor, order: int = 1) -> Tensor:
        """Equation 9: f_E^ [*lead, ..., dv] of query [*lead, ..., d]; zero while n = 0."""
        return self.finalise(order).estimate(query)[0]

    def log_partition(self, query: Tensor, partition: float = 0.0) -> Tensor:
        """Equation 11 (partition 0) and its second order: log Z_E^ [*lead, ...] of query [*lead, ..., d]; -inf while n = 0."""
        return self.finalise(1, partition).estimate(query)[1]

    def correct(self, query: Tensor, f_R: Tensor, log_Z_R: Tensor, order: int = 1, partition: float = 0.0) -> Tensor:
        """Equation 12; see `Correction.apply` for the shapes. f_R comes back unchanged where n = 0."""
        return self.finalise(order, partition).apply(query, f_R, log_Z_R)

    def finalise(self, order: int = 1, partition: float = 0.0) -> Correction:
        """The frozen correction of the statistics as they are now; kept until the next `add`."""
        if order not in (0, 1):
            raise ValueError(f"order is {order!r}: 0 (mean value) and 1 (mean and covariance) exist")
        if not 0 <= partition <= 1:
            raise ValueError(f"partition is {partition}: choose between 0 (the paper's bound) and 1 (Gaussian keys)")
        if partition and self.key_outer_sum is None:
            raise ValueError("a partition above 0 needs the keys' second moment: build Moments(..., second=True)")
        if (order, partition) not in self._ready:
            self._ready[order, partition] = self._finalise(order, partition)
        return self._ready[order, partition]

    def _finalise(self, order: int, partition: float) -> Correction:
        key_mean, value_mean, slope = self.affine()
        c, lead = self.scaling, len(self.lead)
        weight = torch.cat((slope.mT * order, c * key_mean[..., None]), dim=-1)
        bias = torch.cat((value_mean, self.count.log()[..., None]), dim=-1)[..., None, :]
        curvature = None
        if partition:
            n = self.count.clamp_min(1)[..., None, None]
            spread = self.key_outer_sum / n - key_mean[..., :, None] * key_mean[..., None, :]
            curvature = (partition * c**2 / 2 * spread).reshape(-1, *spread.shape[-2:])
        flat = [x.reshape(-1, *x.shape[lead:]) for x in (weight, bias)]
        return Correction(*flat, curvature, self.lead)
