"""What an eviction does to one attention output, taken apart: how much attention was lost, and in which direction.

Source: MomentKV (arXiv:2606.01563), section 3. With R kept, E evicted, f = w_R f_R + w_E f_E (eq. 3) and f_R what is put out:

    f - f_R = w_E (f_E - f_R)                                                           eq. 4
    ||f - f_R||^2 = w_E^2 ((||f_E|| cos - ||f_R||)^2 + (||f_E|| sin)^2)                 eq. 6, along and across f_R
    ||f - f_R|| / ||f|| = w_E gamma,   gamma = ||f_E - f_R|| / ||f||                    eq. 7

and, with the moments of E, the same after the correction (eq. 9, 11, 12).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from kvviz.gather import take
from kvviz.moments import Moments


@dataclass(frozen=True, eq=False)
class Decomposition(Mapping[str, Tensor]):
    """The parts of the error, each with the queries' leading shape ([Q] or [Hq, P]); vectors have dv more at the end.

    Also a mapping: `parts["w_E"]` is `parts.w_E`. Where nothing was evicted f_E and fhat_E do not exist and stand for f_R: the
    cosines are 1, gamma and all errors 0, the logs of Z_E minus infinity, and no value is NaN.

    Attributes:
        f, f_R, f_E: attention outputs over everything, the kept and the evicted entries.
        w_E: attention lost, in [0, 1].
        cos: cosine of f_E and f_R, the directional gap (0 where one of them is the zero vector).
        gamma: ||f_E - f_R|| / ||f||.
        relative_error: ||f - f_R|| / ||f|| = w_E gamma.
        parallel, perpendicular: sizes of the error along and across f_R, in units of the values.
        log_Z_R, log_Z_E: natural logs of the partition functions.
        fhat_E, log_Zhat_E: their estimates from the moments.
        cos_estimate: cosine of f_E and its estimate.
        out: the corrected output.
        corrected_error: ||f - out|| / ||f||.
    """

    f: Tensor
    f_R: Tensor
    f_E: Tensor
    w_E: Tensor
    cos: Tensor
    gamma: Tensor
    relative_error: Tensor
    parallel: Tensor
    perpendicular: Tensor
    log_Z_R: Tensor
    log_Z_E: Tensor
    fhat_E: Tensor
    log_Zhat_E: Tensor
    cos_estimate: Tensor
    out: Tensor
    corrected_error: Tensor

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.__dict__[name]
        except KeyError:
            raise KeyError(f"{name!r} is no part of the error; there are {', '.join(self)}") from None

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


def decompose(
    query: Tensor,
    K: Tensor,
    V: Tensor,
    kept: Tensor,
    *,
    scaling: float | None = None,
    moments: Moments | None = None,
    order: int = 1,
    partition: float = 0.0,
) -> Decomposition:
    """Take the error of evicting everything but `kept` apart, for every query.

    Args:
        query: [Q, d] or [d] with K, V [N, d]; [Hq, P, d] with K, V [Hkv, N, d]. After RoPE.
        kept: [N] or [Hkv, N] bool, or the kept positions [n] or [Hkv, n] (int64); [N] and [n] hold for every head.
        scaling: c, 1 / sqrt(d) by default.
        moments: statistics of the evicted entries ([Hkv] heads); computed from them by default.
        order, partition: of the correction, see kvviz.moments.

    Computed in float32 (float64 stays). Raises ValueError where a head keeps nothing.
    """
    if K.dim() == 2:
        single = query.dim() == 1
        if moments is not None and moments.lead == ():
            moments = moments[None]
        parts = decompose(
            query.reshape(1, -1, K.shape[-1]),
            K[None],
            V[None],
            kept,
            scaling=scaling,
            moments=moments,
            order=order,
            partition=partition,
        )
        return Decomposition(**{name: part[0, 0] if single else part[0] for name, part in parts.items()})
    heads, n, d = K.shape
    c = d**-0.5 if scaling is None else scaling
    dtype = torch.promote_types(K.dtype, torch.float32)
    mask = _mask(torch.as_tensor(kept, device=K.device), heads, n)
    K, V, q = K.to(dtype), V.to(dtype), query.to(dtype).reshape(heads, -1, d)  # [Hkv, g P, d]
    f_R, log_Z_R, _ = _attend(q, K, V, mask, c)
    f_E, log_Z_E, evicted = _attend(q, K, V, ~mask, c)
    if moments is None:
        moments = Moments(
            heads, d, value_dim=V.shape[-1], scaling=c, second=partition > 0, dtype=dtype, device=K.device
        )
        moments.add(*evicted)
    correction = moments.finalise(order, partition)
    fhat_E, log_Zhat_E = correction.estimate(q)
    out = correction.apply(q, f_R, log_Z_R)
    none = mask.all(dim=1)[:, None, None]
    f_E = torch.where(none, f_R, f_E)
    fhat_E = torch.where((moments.count == 0)[:, None, None], f_R, fhat_E.to(dtype))
    parts = _parts(f_R, f_E, torch.sigmoid(log_Z_E - log_Z_R), out.to(dtype), fhat_E)
    parts |= {"log_Z_R": log_Z_R, "log_Z_E": log_Z_E, "log_Zhat_E": log_Zhat_E.to(dtype)}
    lead = query.shape[:-1]
    return Decomposition(**{name: part.reshape(*lead, *part.shape[2:]) for name, part in parts.items()})


def _parts(f_R: Tensor, f_E: Tensor, w_E: Tensor, out: Tensor, fhat_E: Tensor) -> dict[str, Tensor]:
    """Equations 3 to 7 from the sub-outputs [H, m, dv] and the weight [H, m]."""
    gap = f_E - f_R
    f = torch.lerp(f_R, f_E, w_E[..., None])
    tiny = torch.finfo(f.dtype).tiny
    size = f.norm(dim=-1).clamp_min(tiny)
    along = (gap * f_R).sum(-1, keepdim=True) / f_R.norm(dim=-1, keepdim=True).clamp_min(tiny)
    across = gap - along * F.normalize(f_R, dim=-1, eps=tiny)
    return {
        "f": f,
        "f_R": f_R,
        "f_E": f_E,
        "w_E": w_E,
        "cos": _cosine(f_E, f_R),
        "gamma": gap.norm(dim=-1) / size,
        "relative_error": w_E * gap.norm(dim=-1) / size,
        "parallel": w_E * along[..., 0].abs(),
        "perpendicular": w_E * across.norm(dim=-1),
        "fhat_E": fhat_E,
        "cos_estimate": _cosine(f_E, fhat_E),
        "out": out,
        "corrected_error": (f - out).norm(dim=-1) / size,
    }


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    tiny = torch.finfo(a.dtype).tiny
    return (F.normalize(a, dim=-1, eps=tiny) * F.normalize(b, dim=-1, eps=tiny)).sum(-1)


def _mask(kept: Tensor, heads: int, n: int) -> Tensor:
    """Kept entries as [H, N] bool."""
    if kept.dtype != torch.bool:
        index = kept.expand(heads, -1) if kept.dim() == 1 else kept
        kept = torch.zeros(heads, n, dtype=torch.bool, device=kept.device).scatter_(1, index, True)
    mask = kept.expand(heads, n)
    if not bool(mask.any(dim=1).all()):
        raise ValueError("a head keeps no entry: attention needs at least one")
    return mask


def _attend(
    q: Tensor, K: Tensor, V: Tensor, mask: Tensor, c: float
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Attention of q [H, m, d] over the masked entries alone.

    Returns the output [H, m, dv] (zero over nothing), log Z [H, m], and the entries (keys, values, real), gathered to the front
    [H, most, .] and padded where a head has fewer.
    """
    count = mask.sum(dim=1)
    most = int(count.max())
    index = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
    k, v = take(K, index), take(V, index)
    real = torch.arange(most, device=q.device) < count[:, None]
    bias = torch.zeros_like(real, dtype=q.dtype).masked_fill_(~real, -torch.inf)[:, None]
    logits = torch.baddbmm(bias, q, k.mT, alpha=c)
    top = logits.amax(-1, keepdim=True) if most else logits.new_zeros(*q.shape[:2], 1)
    top = top.clamp_min(torch.finfo(q.dtype).min)
    weights = logits.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    output = weights @ v / total.clamp_min(torch.finfo(q.dtype).tiny)
    return output, (total.log() + top)[..., 0], (k, v, real)
