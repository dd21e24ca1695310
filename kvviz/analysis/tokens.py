"""Token by token: which heads keep it, what its score is made of, and whether the full cache's answer looked at it.

    numbers = kvviz.analysis.of(state)
    shares = tokens.kept_by(numbers, policy, budget=256)      # every token: how many heads keep it
    why = tokens.why(numbers, policy, 256, token=812)         # one token: rank, cutoff and attention in every head

The parts of a score come from the scorers' own functions, for each query head by itself: its keys and values are given to the
scorer as if it were alone (`by_query_head`). Where a score is a product, the parts multiply to it, and the mean over the query
heads of a group is the score that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvviz.allocation import keep
from kvviz.analysis.core import Pace, Setting, Store, in_time
from kvviz.evict import layer_budgets
from kvviz.moments import Moments
from kvviz.policies.attention_scores import by_group, precise, window_attention
from kvviz.policies.base import Scorer
from kvviz.policies.capkv import FLOOR, CapKV
from kvviz.policies.expected_attention import ExpectedAttention
from kvviz.policies.leverage import log_leverage, quadratic_forms
from kvviz.policies.momentkv import MomentKV
from kvviz.policies.observed_attention import ObservedAttention
from kvviz.policies.oracle import Oracle
from kvviz.policies.policy import Policy
from kvviz.policies.snapkv import SnapKV
from kvviz.policies.tova import TOVA
from kvviz.state import LayerState

PART_OF_A_CHARACTER = "◌"
"""Stands for a token that ends a character which an earlier token began."""


@dataclass(frozen=True, eq=False)
class Shares:
    """How many heads keep each token, over all layers that can be evicted.

    Attributes:
        policy, label: registry name, and name with options. budget: entries a head, averaged over the model.
        counts: [N] int64, KV heads that keep the token. heads: KV heads that there are.
        always: [N] bool, protected: no head may evict it.
    """

    policy: str
    label: str
    budget: int
    counts: np.ndarray
    heads: int
    always: np.ndarray

    @property
    def shares(self) -> np.ndarray:
        """[N] float32 in [0, 1]."""
        return (self.counts / self.heads).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Why:
    """One token in every layer and KV head. Layers with a sliding window, which are never evicted, hold `kept` True, rank 0.

    Attributes:
        kept: [L, Hkv] bool.
        rank: [L, Hkv] int64 among the entries that may leave, 1 is the best; 0 where the token is protected.
        cutoff: [L, Hkv] int64, how many of them stay: kept where rank <= cutoff.
        candidates: how many may leave.
        sliding: [L] bool.
        attention: [L, Hq] float32, mean attention of the later queries to this token, of all that they pay to the prompt;
            None before a run has left such queries. attention_rank: [L, Hq] int64 among all tokens.
    """

    token: int
    kept: np.ndarray
    rank: np.ndarray
    cutoff: np.ndarray
    candidates: int
    sliding: np.ndarray
    attention: np.ndarray | None
    attention_rank: np.ndarray | None

    @property
    def protected(self) -> bool:
        """Whether no head may evict it."""
        return not self.rank[~self.sliding].any()


class Part(NamedTuple):
    """A part of a score: its symbol, what it says, and its values [Hq, N], NaN where the method does not score."""

    symbol: str
    help: str
    values: Tensor


def pieces(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text token by token. A character that several tokens make up stands with the first of them."""
    known = {i: decode([i]) for i in set(ids)}
    found = [known[i] for i in ids]
    at = 0
    while at < len(found):
        end = at
        while end < len(found) and "\ufffd" in found[end]:
            end += 1
        if end > at:
            found[at:end] = [decode(list(ids[at:end])), *[PART_OF_A_CHARACTER] * (end - at - 1)]
        at = end + 1
    return found


def find(texts: Sequence[str], what: str) -> list[int]:
    """Tokens at which an occurrence of `what` begins, whatever the case, in order."""
    what, text = what.lower(), "".join(texts).lower()
    if not what.strip() or len(text) != sum(map(len, texts)):  # a letter whose lower case is longer
        return [i for i, piece in enumerate(texts) if what.strip() and what in piece.lower()]
    ends = np.cumsum([len(piece) for piece in texts])
    found, at = [], text.find(what)
    while at >= 0:
        found.append(int(np.searchsorted(ends, at, side="right")))
        at = text.find(what, at + 1)
    return list(dict.fromkeys(found))


def kept_by(numbers: Store, policy: Policy, budget: int) -> Shares:
    """How many heads keep each token.

    Raises:
        ValueError: the state lacks what the method needs; the message says how to get it.
    """
    return numbers.result(("tokens", policy, budget), lambda: _kept_by(numbers, policy, budget))


def kept_by_each(numbers: Store, settings: Iterable[Setting], pace: Pace) -> dict[Setting, Shares]:
    """`kept_by` under several settings; see `kvviz.analysis.core.in_time`."""
    known = lambda setting: numbers.holds(("tokens", *setting))  # noqa: E731
    return in_time(settings, lambda setting: kept_by(numbers, *setting), known, pace)


def _kept_by(numbers: Store, policy: Policy, budget: int) -> Shares:
    kept = [standing(numbers, policy, budget, layer).kept for layer in numbers.open_layers]
    counts, heads = np.sum([each.sum(axis=0) for each in kept], axis=0), sum(len(each) for each in kept)
    always = _protected(numbers, policy, budget).cpu().numpy() & (counts == heads)
    return Shares(policy.name, policy.label, budget, counts, heads, always)


def why(numbers: Store, policy: Policy, budget: int, token: int) -> Why:
    """One token in every layer and head; see `Why`."""
    return numbers.result(("why", policy, budget, token), lambda: _why(numbers, policy, budget, token))


def why_each(numbers: Store, settings: Iterable[Setting], token: int, pace: Pace) -> dict[Setting, Why]:
    """`why` under several settings; see `kvviz.analysis.core.in_time`."""
    known = lambda setting: numbers.holds(("why", *setting, token))  # noqa: E731
    return in_time(settings, lambda setting: why(numbers, *setting, token), known, pace)


def _why(numbers: Store, policy: Policy, budget: int, token: int) -> Why:
    layers = numbers.state.layers
    shape = (len(layers), max(layer.keys.shape[0] for layer in layers))
    kept, rank, cutoff = np.ones(shape, dtype=bool), np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    candidates = 0
    for index in numbers.open_layers:
        own = standing(numbers, policy, budget, index)
        kept[index], rank[index], cutoff[index] = own.kept[:, token], own.rank[:, token], own.cutoff
        candidates = int(own.rank.max())
    sliding = np.array([layer.sliding for layer in layers])
    return Why(token, kept, rank, cutoff, candidates, sliding, *_received(numbers, token))


class Standing(NamedTuple):
    """One layer's entries in order: rank [Hkv, N] among those that may leave (0 for the protected ones), how many of them stay,
    cutoff [Hkv], and kept [Hkv, N]."""

    rank: np.ndarray
    cutoff: np.ndarray
    kept: np.ndarray


def standing(numbers: Store, policy: Policy, budget: int, layer: int) -> Standing:
    """The order in which `evict` takes the entries of a layer: MomentKV's with the statistics of what left before."""
    key = ("standing", policy.scorer, policy.allocation, policy.sinks, policy.recent, policy.keeps_all, budget, layer)
    return numbers.bulky(key, lambda: _standing(numbers, policy, budget, layer))


def _standing(numbers: Store, policy: Policy, budget: int, layer: int) -> Standing:
    own, protected = numbers.state.layers[layer], _protected(numbers, policy, budget)
    scores = numbers.scores(policy, layer)
    if policy.keeps_all or budget >= numbers.state.n_tokens:
        mask = torch.ones_like(scores, dtype=torch.bool)
    else:
        share = numbers.result(
            ("layer budgets", policy.allocation, policy.sinks, policy.recent, budget),
            lambda: layer_budgets(numbers.state, policy, budget),
        )[layer]
        counts = policy.allocation.head_counts(scores, share, protected)
        scores = policy.scorer.refine(own, scores, counts, protected)
        mask = keep(scores, counts, protected)
    free = (~protected).nonzero()[:, 0]
    order = scores[:, free].sort(dim=1, descending=True, stable=True).indices
    places = torch.arange(1, len(free) + 1, device=mask.device, dtype=torch.int32).expand_as(order)
    rank = torch.zeros_like(mask, dtype=torch.int32).scatter_(1, free[order], places)
    rank = rank.cpu().numpy().astype(np.min_scalar_type(len(free)))  # many of these are remembered
    return Standing(rank, (mask & ~protected).sum(dim=1).cpu().numpy(), mask.cpu().numpy())


def _protected(numbers: Store, policy: Policy, budget: int) -> Tensor:
    """What no head may evict, [N] bool: everything where the budget holds it."""
    n, device = numbers.state.n_tokens, numbers.state.layers[numbers.open_layers[0]].keys.device
    if policy.keeps_all or budget >= n:
        return torch.ones(n, dtype=torch.bool, device=device)
    return policy.protected(n, budget, device)


def received(numbers: Store, layer: int) -> np.ndarray | None:
    """Mean attention that the later queries pay to every token, [Hq, N], or None before a run has left such queries."""
    own = numbers.state.layers[layer]
    if not numbers.real_probes or own.sliding:
        return None
    alone = replace(by_query_head(own), probes=numbers.probes(own))
    return numbers.result(("received", layer), lambda: Oracle().score(alone).float().cpu().numpy())


def _received(numbers: Store, token: int) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    layers = numbers.state.layers
    if not numbers.real_probes:
        return None, None
    shape = (len(layers), max(layer.queries.shape[0] for layer in layers))
    share, rank = np.full(shape, np.nan, dtype=np.float32), np.zeros(shape, dtype=np.int64)
    for index in numbers.open_layers:
        all_tokens = received(numbers, index)
        share[index] = all_tokens[:, token]
        rank[index] = 1 + (all_tokens > all_tokens[:, token : token + 1]).sum(axis=1)
    return share, rank


def by_query_head(layer: LayerState) -> LayerState:
    """The layer with every query head by itself, [Hq, N, d]: a scorer then gives each head's own score."""
    repeat = lambda x: None if x is None else x.repeat_interleave(layer.groups, dim=0)  # noqa: E731
    return replace(
        layer,
        keys=repeat(layer.keys),
        values=repeat(layer.values),
        attention_mass=repeat(layer.attention_mass),
        moments=None,
    )


def explain(scorer: Scorer, layer: LayerState) -> dict[str, Part]:
    """The parts of a score, name -> Part; empty where a score has none.

    CapKV: weight x leverage. Expected Attention: attention x value norm. MomentKV: attention x length of the value, at its first
    step. Their product is the query head's own score; the mean over a KV head's query heads is what `scorer.score` gives.
    """
    match scorer:
        case CapKV(variant="published"):
            return _capkv(scorer, by_query_head(layer))
        case CapKV():
            return _printed_capkv(scorer, by_query_head(layer))
        case ExpectedAttention():
            return _expected(scorer, by_query_head(layer))
        case MomentKV():
            return _momentkv(scorer, by_query_head(layer))
        case SnapKV():
            return _snapkv(scorer, layer)
        case TOVA():
            asked = window_attention(layer, 1).mean(dim=1)
            return {"attention": Part("α", "What the last query of this head attends to.", asked)}
        case ObservedAttention():
            mass = by_query_head(layer).attention_mass
            return {"attention received": Part("Σ α", "Summed over all queries of the prompt.", mass)}
        case _:
            return {}


def _capkv(scorer: CapKV, alone: LayerState) -> dict[str, Part]:
    first = min(scorer.sinks, alone.n_tokens)
    weights = scorer.weights(alone)  # [Hq, 1, n]
    leverage = quadratic_forms(scorer.outputs(alone)[:, first:], weights + FLOOR)
    return {
        "weight": Part("w", "How well the key points to where the next queries are expected.", _after(weights, first)),
        "leverage": Part("uᵀ A⁻¹ u", "How little the other entries say the same.", _after(leverage, first)),
    }


def _printed_capkv(scorer: CapKV, alone: LayerState) -> dict[str, Part]:
    logs = scorer.tau * scorer._alignment(alone, normalised=False)[:, 0]
    leverage = log_leverage(scorer.outputs(alone), logs).to(logs) - logs
    return {
        "log weight": Part("log w", "How well the key points to where the next queries are expected, in nats.", logs),
        "log leverage": Part("log uᵀ A⁻¹ u", "How little the other entries say the same, in nats.", leverage),
    }


def _expected(scorer: ExpectedAttention, alone: LayerState) -> dict[str, Part]:
    values = precise(alone.values)
    attention = scorer.score(replace(alone, values=F.normalize(values, dim=-1)))[:, scorer.sinks :]
    return {
        "expected attention": Part(
            "E[α] + ε", "Share of the coming queries' attention.", _after(attention, scorer.sinks)
        ),
        "value norm": Part("‖v‖", "Length of what the entry writes.", values.norm(dim=-1)),
    }


def _momentkv(scorer: MomentKV, alone: LayerState) -> dict[str, Part]:
    return {
        "attention": Part("α", "What the last queries attend to, mean over the window.", scorer._attention(alone)),
        "length of the value": Part(
            "‖v‖", "Length of the residual while nothing is evicted.", precise(alone.values).norm(dim=-1)
        ),
    }


def _snapkv(scorer: SnapKV, layer: LayerState) -> dict[str, Part]:
    n, per_head = layer.n_tokens, by_query_head(layer)
    plain = window_attention(layer, scorer.window)
    plain = plain[..., : -plain.shape[1]].mean(dim=1)
    pooled = scorer.score(per_head)
    if scorer.pooling == "max":  # of the group's mean, which is not the mean of the maxima
        plain = by_group(plain, layer).mean(dim=1).repeat_interleave(layer.groups, dim=0)
        pooled = scorer.score(layer).repeat_interleave(layer.groups, dim=0)
    return {
        "attention": Part("α", "What the window's queries attend to, mean over them.", _before(plain, n)),
        "pooled attention": Part("pool(α)", "Smoothed along the text.", _before(pooled[:, : plain.shape[-1]], n)),
    }


def residual(numbers: Store, policy: Policy, budget: int, layer: int) -> np.ndarray:
    """Length of MomentKV's residual ‖r‖ of every entry, [Hkv, N], once everything that `policy` evicts is in the statistics."""
    own = numbers.state.layers[layer]
    heads, _, d = own.keys.shape
    moments = Moments(heads, d, scaling=own.scaling, device=own.keys.device)
    kept = torch.as_tensor(standing(numbers, policy, budget, layer).kept, device=own.keys.device)
    moments.add(own.keys, own.values, mask=~kept)
    return moments.residual(own.keys, own.values).norm(dim=-1).float().cpu().numpy()


def _after(values: Tensor, first: int) -> Tensor:
    """[Hq, n] or [Hq, 1, n] with NaN for `first` entries before."""
    return F.pad(values.flatten(0, -2), (first, 0), value=float("nan"))


def _before(values: Tensor, n: int) -> Tensor:
    """[Hq, m] with NaN for the entries from m to n."""
    return F.pad(values, (0, n - values.shape[-1]), value=float("nan"))


class Fact(NamedTuple):
    """A number about one token in one head: its name, symbol, what it says, its value, and its rank among all tokens of the head
    (1 is the largest; None where a rank says nothing)."""

    name: str
    symbol: str
    help: str
    value: float
    rank: int | None


def facts(numbers: Store, policy: Policy, budget: int, token: int, layer: int, head: int) -> list[Fact]:
    """The parts of a token's score in one query head, the score of its KV head, and for MomentKV the residual at the end."""
    own = numbers.state.layers[layer]
    kv_head = head // own.groups
    parts = numbers.result(("parts", policy.scorer, layer), lambda: _parts(policy.scorer, own))
    found = [_fact(name, part.symbol, part.help, part.values[head], token) for name, part in parts.items()]
    scores = numbers.scores(policy, layer)[kv_head].float().cpu().numpy()
    found.append(_fact("score", "s", "Higher stays. Mean over the query heads of the group.", scores, token))
    if policy.scorer.uses_moments and not standing(numbers, policy, budget, layer).kept.all():
        left = residual(numbers, policy, budget, layer)[kv_head]
        found.append(
            _fact("residual at the end", "‖r‖", "What the statistics of the evicted cannot predict.", left, token)
        )
    return found


def _parts(scorer: Scorer, layer: LayerState) -> dict[str, Part]:
    return {
        name: part._replace(values=part.values.float().cpu().numpy()) for name, part in explain(scorer, layer).items()
    }


def _fact(name: str, symbol: str, about: str, values: np.ndarray, token: int) -> Fact:
    value = float(values[token])
    return Fact(name, symbol, about, value, None if np.isnan(value) else 1 + int((values > value).sum()))
