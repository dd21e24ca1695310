"""What an eviction does to one attention output, taken apart: how much attention was lost, and in which direction.

Source: MomentKV (arXiv:2606.01563), section 3. With R kept, E evicted, f = w_R f_R + w_E f_E (eq. 3) and f_R what is put out:

    f - f_R = w_E (f_E - f_R)                                                           eq. 4
    ||f - f_R||^2 = w_E^2 ((||f_E|| cos - ||f_R||)^2 + (||f_E|| sin)^2)                 eq. 6, along and across f_R
    ||f - f_R|| / ||f|| = w_E gamma,   gamma = ||f_E - f_R|| / ||f||                    eq. 7

and, with the moments of E, the same after the correction (eq. 9, 11, 12).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvviz.capacity import exact
from kvviz.gather import take
from kvviz.moments import Correction, Moments


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
    parts = _assembled(q, (f_R, log_Z_R), (f_E, log_Z_E), moments.finalise(order, partition))
    lead = query.shape[:-1]
    return Decomposition(**{name: part.reshape(*lead, *part.shape[2:]) for name, part in parts.items()})


def decompose_sets(
    query: Tensor,
    K: Tensor,
    V: Tensor,
    sets: Tensor,
    *,
    scaling: float | None = None,
    order: int = 1,
    partition: float = 0.0,
) -> Decomposition:
    """The same under several kept sets, for little more than one costs if they are nested (budgets) or alike (tau).

    Sums over entries go from one set to the next by the entries that come and go; in float64, so that what leaves a sum leaves
    nothing behind.

    Args:
        query, K, V: [Hq, P, d], [Hkv, N, d], [Hkv, N, dv], after RoPE.
        sets: [B, Hkv, N] bool, in the order of a slider, smaller ones first; each keeps an entry of every head.
        scaling, order, partition: as in `decompose`.

    Returns a decomposition with leading shape [B, Hq, P]. Raises ValueError where a head keeps nothing.
    """
    many, heads, _ = sets.shape
    d, dtype = K.shape[-1], torch.promote_types(K.dtype, torch.float32)
    c = d**-0.5 if scaling is None else scaling
    q, K, V = exact(query).reshape(heads, -1, d), exact(K), exact(V)
    index, sign, ends = _changes(sets.to(K.device))
    k, v = take(K, index), take(V, index)
    logits = torch.baddbmm(q.new_zeros(()), q, k.mT, alpha=c)
    top = logits.amax(-1, keepdim=True)
    weights = logits.sub_(top).exp_().mul_(sign[:, None])
    one = v.new_ones(*index.shape, 1)
    value, key = torch.cat((v, one), dim=-1), torch.cat((k, one), dim=-1) * sign[..., None]
    kept, gone = _sides(weights, value, ends)  # [B, Hkv, m, dv + 1], the last column is Z
    moments = Moments((many, heads), d, value_dim=V.shape[-1], scaling=c, second=partition > 0, device=K.device)
    outer = _sides(value.mT, key, ends)[1]  # [B, Hkv, dv + 1, d + 1], of what is evicted
    moments.outer_sum, moments.value_sum = outer[..., :-1, :-1], outer[..., :-1, -1]
    moments.key_sum, moments.count = outer[..., -1, :-1], outer[..., -1, -1].round()
    if partition:
        moments.key_outer_sum = _sides(k.mT, key[..., :-1], ends)[1]
    correction = moments.finalise(order, partition)
    correction = replace(
        correction,
        **{f.name: t.to(dtype) for f in fields(correction) if torch.is_tensor(t := getattr(correction, f.name))},
    )
    f_R, log_Z_R = _normalised(kept, top, dtype)
    f_E, log_Z_E = _normalised(gone.masked_fill((moments.count == 0)[..., None, None], 0), top, dtype)
    if bool(((log_Z_E.isneginf().any(-1) & (moments.count > 0)) | log_Z_R.isneginf().any(-1)).any()):
        return _one_by_one(query, K, V, sets, scaling=c, order=order, partition=partition)  # logits over 700 apart
    q = q.to(dtype).expand(many, -1, -1, -1)
    parts = _assembled(q, (f_R, log_Z_R), (f_E, log_Z_E), correction)
    lead = many, *query.shape[:-1]
    return Decomposition(
        **{name: part.reshape(*lead, *part.shape[3:]).to(query.device) for name, part in parts.items()}
    )


def _one_by_one(query: Tensor, K: Tensor, V: Tensor, sets: Tensor, **more) -> Decomposition:
    """`decompose_sets` where some weights are too small for a number beside others."""
    found = [decompose(query, K.to(query), V.to(query), kept, **more) for kept in sets]
    return Decomposition(**{name: torch.stack([each[name] for each in found]) for name in found[0]})


def _changes(sets: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """What comes and goes from nothing to the first of sets [B, H, N], from each to the next, and from the last to everything.

    Returns positions [H, T], signs [H, T] (1, -1, and 0 for padding), and where each of the B + 1 steps ends.
    """
    every = sets.new_ones(1, *sets.shape[1:])
    after, before = torch.cat((sets, every)), torch.cat((~every, sets))
    changed = after ^ before
    count = changed.sum(dim=-1)  # [B + 1, H]
    ends = count.amax(dim=1).cumsum(0)
    step, head, position = changed.nonzero(as_tuple=True)
    first = (count.flatten().cumsum(0) - count.flatten()).view_as(count)
    number = torch.arange(len(step), device=sets.device) - first[step, head]
    place = (head, (ends - count.amax(dim=1))[step] + number)
    index = torch.zeros(sets.shape[1], int(ends[-1]), dtype=torch.int64, device=sets.device)
    sign = torch.zeros(index.shape, dtype=torch.float64, device=sets.device)
    sign[place] = after[step, head, position].double() * 2 - 1
    index[place] = position
    return index, sign, ends.tolist()


def _sides(left: Tensor, right: Tensor, ends: list[int]) -> tuple[Tensor, Tensor]:
    """left [H, a, T] @ right [H, T, b], summed over the steps up to each set and over those after it: [B, H, a, b] twice."""
    steps = [left[..., a:b] @ right[:, a:b] for a, b in zip([0, *ends], ends, strict=False)]
    steps = torch.stack(steps)
    return steps[:-1].cumsum(0), steps.flip(0).cumsum(0).flip(0)[1:]


def _normalised(sums: Tensor, top: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sums [B, H, m, dv + 1] of weights exp(. - top) -> output [B, H, m, dv] and log Z [B, H, m]."""
    total = sums[..., -1:].clamp_min(0)
    output = sums[..., :-1] / total.clamp_min(torch.finfo(sums.dtype).tiny)
    return output.to(dtype), (total.log() + top)[..., 0].to(dtype)


def _assembled(
    q: Tensor, kept: tuple[Tensor, Tensor], gone: tuple[Tensor, Tensor], correction: Correction
) -> dict[str, Tensor]:
    """All parts of the error from (f_R, log Z_R) and (f_E, log Z_E), [*lead, m, dv] and [*lead, m]."""
    (f_R, log_Z_R), (f_E, log_Z_E) = kept, gone
    fhat_E, log_Zhat_E = correction.estimate(q)
    out = correction.apply(q, f_R, log_Z_R)
    f_E = torch.where(log_Z_E.isneginf()[..., None], f_R, f_E)
    fhat_E = torch.where(log_Zhat_E.isneginf()[..., None], f_R, fhat_E.to(f_R.dtype))
    parts = _parts(f_R, f_E, torch.sigmoid(log_Z_E - log_Z_R), out.to(f_R.dtype), fhat_E)
    return parts | {"log_Z_R": log_Z_R, "log_Z_E": log_Z_E, "log_Zhat_E": log_Zhat_E.to(f_R.dtype)}


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
