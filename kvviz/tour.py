"""The tour: eight steps as plain data, and the numbers of each, worked out from what the loaded model has read.

    numbers = kvviz.analysis.of(state)
    found = tour.needle(numbers, texts, budget=256)
    print(found.kept["SnapKV"], found.held["KeyDiff"])
    print(found.sentences())

Every step has its own prompt and settings, those of `experiment`, so that a link to it shows the same to everybody. Sentences
are plain text; symbols are written as w_E, f_R, log Z_E.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvviz.analysis import Analysis
from kvviz.analysis import tokens as by_token
from kvviz.analysis.tokens import Shares
from kvviz.experiment import Experiment, Shape, Size
from kvviz.figures.style import number
from kvviz.policies.attention_scores import window_attention
from kvviz.policies.policy import Policy, policy
from kvviz.prefill import Progress
from kvviz.presets import PRESETS

PRESET = "needle"
BUDGET = 256
NEW_TOKENS = 12
NEEDLE = re.compile(r"The special magic number for Cairo is (\d+)\.")

SNAPKV, KEYDIFF, CAPKV, MOMENTKV = (policy(name) for name in ("snapkv", "keydiff", "capkv", "momentkv"))
RIVALS = (SNAPKV, KEYDIFF)

BUDGETS = (32, 64, 128, 256, 384, 512, 768, 1024)
TAUS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
SINKS, RECENT = 4, 32
AROUND = (58, 42)
"""Tokens shown before and after the needle."""

MIB = 2**20


@dataclass(frozen=True)
class Step:
    """A step: its title, what to try with its control, and the page that shows more of it."""

    title: str
    try_it: str
    page: str


STEPS = (
    Step("What the cache is", "Move the slider: how much of the text has the model read?", "compare"),
    Step("What a budget takes away", "Move the budget: what stays of this passage?", "tokens"),
    Step("Sinks and recent tokens", "Switch the protection on and off.", "heads"),
    Step("The needle that one method keeps and another loses", "Move the budget: who keeps the digits?", "tokens"),
    Step("Little attention lost, a large error", "Compare the two heads.", "values"),
    Step("CapKV's dial: the questions expected, or variety", "Move τ between its two ends.", "capacity"),
    Step("MomentKV's correction", "Switch the correction on and off.", "heads"),
    Step("Equal entries, or equal bytes", "Switch what is held equal.", "compare"),
)
"""The eight steps, counted from 1 in links."""

WHY = 4
"""The step that tells why SnapKV loses the needle."""


def experiment(base: Experiment, **changes) -> Experiment:
    """The tour's experiment on the base's model: the needle, SnapKV and KeyDiff, a short answer."""
    usual = {"chosen": RIVALS, "size": Size(BUDGET), "equal": None, "max_new_tokens": NEW_TOKENS}
    usual |= {"preset": PRESET, "prompt": PRESETS[PRESET].prompt(), "temperature": 0.0, "policy_index": 0}
    return replace(base, **usual | {"n_tokens": 0} | changes)


def location(texts: Sequence[str]) -> tuple[range, range]:
    """Tokens of the needle's sentence, and of its digits among them."""
    match = NEEDLE.search("".join(texts))
    if match is None:
        raise ValueError("The tour's text hides no number.")
    ends = np.cumsum([len(text) for text in texts])
    at = lambda character: int(np.searchsorted(ends, character, side="right"))  # noqa: E731
    return range(at(match.start()), at(match.end() - 1) + 1), range(at(match.start(1)), at(match.end(1) - 1) + 1)


def passage(texts: Sequence[str]) -> range:
    """The tokens around the needle that the tour shows."""
    sentence, _ = location(texts)
    return range(max(0, sentence.start - AROUND[0]), min(len(texts), sentence.stop + AROUND[1]))


# 1


@dataclass(frozen=True)
class Growth:
    """What the cache of `read` tokens takes."""

    read: int
    n_tokens: int
    shape: Shape

    @property
    def heads(self) -> int:
        """KV heads of all layers."""
        return self.shape.layers * self.shape.kv_heads

    def mib(self, tokens: int) -> float:
        """MiB of the keys and values of so many tokens."""
        return self.shape.bytes(tokens) / MIB

    def sentences(self) -> list[str]:
        """What the step says."""
        shape = self.shape
        return [
            f"A language model reads a text token by token: words, or pieces of words. In each of its {self.heads:,} KV heads "
            f"({shape.layers} layers of {shape.kv_heads}) every token leaves a key, by which later tokens find it, and a value, "
            f"which is what it tells them. Both are lists of {shape.head_dim} numbers.",
            f"They stay in memory as long as the text goes on: the KV cache. Each token adds {shape.bytes(1) / 1024:.3g} KiB; "
            f"after {self.read:,} of {self.n_tokens:,} tokens it is {number(self.mib(self.read), 3)} MiB, and at the model's "
            f"{shape.positions:,} positions it would be {number(self.mib(shape.positions), 3)} MiB.",
        ]


# 2


@dataclass(frozen=True, eq=False)
class Taken:
    """What a policy leaves of the text under a budget."""

    kept: Shares
    shape: Shape

    def sentences(self) -> list[str]:
        """What the step says."""
        n, budget = len(self.kept.counts), min(self.kept.budget, len(self.kept.counts))
        before, after = (self.shape.bytes(entries) / MIB for entries in (n, budget))
        gone = int((self.kept.counts == 0).sum())
        return [
            f"A budget says how many tokens a head may keep. With {budget:,} of {n:,} the cache shrinks from "
            f"{number(before, 3)} to {number(after, 3)} MiB; the other keys and values are evicted, and no later token can "
            "see them.",
            f"Each head chooses for itself, here by {self.kept.label}'s score. The more heads keep a token, the stronger its "
            f"colour; struck through is what none of the {self.kept.heads} heads keeps: {gone:,} of all {n:,} tokens.",
        ]


# 3


@dataclass(frozen=True, eq=False)
class Protection:
    """Mean error of three methods with nothing protected and with sinks and recent tokens protected: label -> (without, with)."""

    errors: dict[str, tuple[float, float]]
    policies: dict[str, str]
    sink_attention: float
    recent_attention: float

    def sentences(self) -> list[str]:
        """What the step says."""
        bare, safe = self.errors[next(iter(self.errors))]
        return [
            f"Whatever the text says, this answer pays {100 * self.sink_attention:.0f}% of its attention to the first {SINKS} "
            f"tokens, the sinks: heads rest there when they look for nothing. The last {RECENT} tokens of the text get "
            f"{100 * self.recent_attention:.0f}%.",
            f"So even a choice by lot becomes bearable once those {SINKS + RECENT} are never evicted: the mean error of a head's "
            f"output falls from {100 * bare:.0f}% to {100 * safe:.0f}% of its length. Papers protect different numbers "
            "of them, which can decide a comparison; the sidebar's Protection sets them equal.",
        ]


def protection(numbers: Analysis) -> Protection:
    """Random, Knorm and KeyDiff at the tour's budget; all three protect nothing as published."""
    errors, names = {}, {}
    for each in (policy(name, sinks=0, recent=0) for name in ("random", "knorm", "keydiff")):
        both = (each, each.with_protection(SINKS, RECENT))
        errors[each.title] = tuple(mean(numbers.error_map(one, BUDGET)["relative_error"]) for one in both)
        names[each.title] = each.name
    received = _received(numbers)
    first, last = received[..., :SINKS].sum(-1), received[..., -RECENT:].sum(-1)
    return Protection(errors, names, float(first.mean()), float(last.mean()))


# 4


@dataclass(frozen=True, eq=False)
class Needle:
    """Who keeps the needle, token by token, and who asks for it.

    Attributes:
        words: the sentence's tokens; `digits` are the places of the number's among them.
        kept: label -> [len(words)] share of the heads that keep each. policies: label -> registry name.
        held: label -> share of the attention which the answer pays to the digits that falls on heads that keep them.
        window, typical: share of the attention that the prompt's last 32 tokens pay to the digits, and that which as many
            tokens get on average.
        answer, strongest: the same of the question's and the answer's queries: mean over the heads, and of the head that looks
            most, with its layer and number.
        last_words: what the last 32 tokens are.
    """

    budget: int
    n_tokens: int
    heads: int
    words: list[str]
    digits: range
    kept: dict[str, np.ndarray]
    policies: dict[str, str]
    held: dict[str, float]
    window: float
    typical: float
    answer: float
    strongest: tuple[float, int, int]
    last_words: str

    def sentences(self) -> list[str]:
        """Why one loses what the other keeps."""
        snap, diff = (self.kept[each.label][list(self.digits)] for each in RIVALS)
        share, layer, head = self.strongest
        fewer, share_of_all = self.typical / max(self.window, 1e-12), self.budget / self.n_tokens
        return [
            "SnapKV asks the last 32 tokens of the text what matters, and keeps what they attend to. Here they are the end of "
            f"the licence (“…{self.last_words}”), which has no use for the number: it gets {number(fewer)} times less of their "
            f"attention than as many tokens get on average. At {self.budget:,} entries {_heads(snap, self.heads)} a digit.",
            "The question comes only after the eviction. Then the heads do look for the number, up to "
            f"{100 * share:.0f}% of a head's attention (layer {layer}, head {head}), and with SnapKV "
            f"{_percent(self.held[SNAPKV.label])} of all that attention still finds its digit.",
            "KeyDiff asks nobody. It keeps the keys that are unlike the average key, whoever may want them later. In part those "
            f"of a stray number are: {_heads(diff, self.heads)} a digit (an average token: {self.heads * share_of_all:.0f}), and "
            f"{_percent(self.held[KEYDIFF.label])} of the attention that the answer pays to the digits still finds them.",
        ]


def _percent(share: float) -> str:
    """A share in words."""
    return "none" if share < 0.0005 else f"{number(100 * share)}%"


def _heads(shares: np.ndarray, heads: int) -> str:
    """How many heads keep a digit, in words."""
    counts = np.rint(shares * heads).astype(int)
    if not counts.any():
        return f"none of the {heads} heads keeps"
    low, high = counts.min(), counts.max()
    return f"{low} heads of {heads} keep" if low == high else f"{low} to {high} of {heads} heads keep"


def needle(numbers: Analysis, texts: Sequence[str], budget: int, policies: Sequence[Policy] = RIVALS) -> Needle:
    """See `Needle`. The state needs probes, which a run leaves."""
    sentence, digits = location(texts)
    kept = {each.label: by_token.kept_by(numbers, each, budget) for each in policies}
    received, asked = _received(numbers), _asked(numbers)
    of_answer = received[..., list(digits)].sum(-1)
    layer, head = np.unravel_index(int(np.nanargmax(of_answer)), of_answer.shape)
    free = slice(SINKS, -SNAPKV.scorer.window)
    words = "".join(texts[-SNAPKV.scorer.window :]).split()
    return Needle(
        budget=min(budget, len(texts)),
        n_tokens=len(texts),
        heads=next(iter(kept.values())).heads,
        words=[texts[i] for i in sentence],
        digits=range(digits.start - sentence.start, digits.stop - sentence.start),
        kept={label: each.shares[list(sentence)] for label, each in kept.items()},
        policies={each.label: each.name for each in policies},
        held={each.label: _held(numbers, each, budget, received, digits) for each in policies},
        window=float(asked[..., list(digits)].sum(-1).mean()),
        typical=len(digits) * float(asked[..., free].mean()),
        answer=float(of_answer.mean()),
        strongest=(float(of_answer[layer, head]), numbers.open_layers[layer], int(head)),
        last_words=" ".join(words[-9:]),
    )


def _held(numbers: Analysis, each: Policy, budget: int, received: np.ndarray, digits: range) -> float:
    """Share of the answer's attention to the digits that falls on heads which keep them."""
    found = total = 0.0
    for place, layer in enumerate(numbers.open_layers):
        kept = by_token.standing(numbers, each, budget, layer).kept[:, list(digits)]
        paid = received[place][:, list(digits)]
        found += float((paid * kept.repeat(numbers.state.layers[layer].groups, axis=0)).sum())
        total += float(paid.sum())
    return found / total if total else 0.0


def _received(numbers: Analysis) -> np.ndarray:
    """[L, Hq, N] attention that the question's and the answer's queries pay to the text, layers that can be evicted."""
    return np.stack([by_token.received(numbers, layer) for layer in numbers.open_layers])


def _asked(numbers: Analysis) -> np.ndarray:
    """[L, Hq, N] attention that the prompt's last 32 queries pay."""

    def make() -> np.ndarray:
        layers = (numbers.state.layers[i] for i in numbers.open_layers)
        asked = [window_attention(layer, SNAPKV.scorer.window).mean(dim=1) for layer in layers]
        return torch.stack(asked).float().cpu().numpy()

    return numbers.result(("tour", "asked"), make)


# 5


@dataclass(frozen=True)
class Pair:
    """Two query heads, (layer, head) each: about the same small share of attention is lost, the error is large, and small."""

    large: tuple[int, int]
    small: tuple[int, int]


def pair(numbers: Analysis, each: Policy = SNAPKV, budget: int = BUDGET, low: float = 0.04, high: float = 0.13) -> Pair:
    """The heads with the largest and the smallest γ among those which lose between 4% and 13%; of the smallest the one whose
    loss is nearest to the other's counts."""
    found = numbers.error_map(each, budget)
    lost, gap = found["w_E"], found["gamma"]
    inside = (lost > low) & (lost < high)
    if np.nansum(inside) < 2:
        inside = np.isfinite(lost) & (lost > 0)
    large = int(np.where(inside, lost * gap, -np.inf).argmax())
    near = inside & (np.abs(lost - lost.flat[large]) < 0.2 * lost.flat[large])
    near.flat[large] = False
    small = int(np.where(near if near.any() else inside, gap, np.inf).argmin())
    return Pair(*(tuple(int(i) for i in np.unravel_index(which, lost.shape)) for which in (large, small)))


def angle_sentences(view) -> list[str]:
    """What the step says about a head; `view` is a HeadView."""
    return [
        f"Layer {view.layer}, head {view.head}, under {view.label} at {view.budget:,} entries. Only {number(100 * view.w_E)}% of "
        f"its attention falls on what was evicted: w_E. One might expect an error of the same size; it is "
        f"{number(100 * view.relative_error)}%.",
        "What the head puts out is a mean of values, weighted by attention. The kept ones alone give f_R, the evicted ones alone "
        f"f_E. Here these two are {view.angle:.0f}° apart, and the line between them is γ = {number(view.gamma)} times as long "
        "as the full output f, which lies on it, the share w_E from f_R. The error is the thick piece: w_E times γ. Numbers are "
        f"means over {view.probes:,} queries of the question and the answer.",
        "So a score that looks at attention alone can throw away little and lose much. Switch to the other head: about as much "
        "attention is lost, and the error is another.",
    ]


# 6


@dataclass(frozen=True, eq=False)
class Tau:
    """What CapKV keeps for each τ of TAUS: share [T] of the capacity of the values (U), of the attention, and of the entries that
    τ = 0 keeps, too; mean over layers and heads. `digits`: heads that keep a digit of the needle, mean over the digits."""

    capacity: np.ndarray
    attention: np.ndarray
    overlap: np.ndarray
    digits: np.ndarray
    heads: int

    def sentences(self, tau: float) -> list[str]:
        """What the step says."""
        at, last = TAUS.index(tau), len(TAUS) - 1
        parts = [f"{100 * x[at]:.0f}%" for x in (self.capacity, self.attention, self.overlap)]
        return [
            "CapKV keeps what adds most to what the values can say together, each weighted by how well its key points to the "
            "queries that it expects. τ is the weight of that second part. At 0 only variety counts; at 20 nearly only the "
            "expected queries do. The paper's is 5.",
            f"At τ = {tau:g} the kept entries hold {parts[0]} of the full cache's capacity U and {parts[1]} of the attention "
            f"that the answer pays; {parts[2]} of them are those that τ = 0 would keep. A higher τ buys attention with variety: "
            f"{100 * self.attention[0]:.0f}% and {100 * self.capacity[0]:.0f}% at 0, {100 * self.attention[last]:.0f}% and "
            f"{100 * self.capacity[last]:.0f}% at 20.",
            f"The needle feels it, too: a digit of it stays in {self.digits[at]:.0f} of {self.heads} heads "
            f"({self.digits[0]:.0f} at τ = 0, {self.digits[last]:.0f} at 20), since nobody expects the question for it.",
        ]


def tau_curve(numbers: Analysis, texts: Sequence[str], budget: int = BUDGET, progress: Progress | None = None) -> Tau:
    """See `Tau`."""
    _, digits = location(texts)
    rows, first = [], None
    for done, tau in enumerate(TAUS):
        if progress is not None:
            progress(done / len(TAUS), f"τ = {tau:g}")
        each = policy("capkv", tau=tau)
        masks = np.stack([numbers.kept(each, budget, layer) for layer in numbers.open_layers])
        first = masks if first is None else first
        held = numbers.result(("tour", "capacity", tau, budget), lambda each=each: numbers.capacity_at(each, budget))
        lost = mean(numbers.error_map(each, budget)["w_E"])
        rows.append(
            (held[1], 1 - lost, (masks & first).sum() / masks.sum(), masks[..., list(digits)].sum((0, 1)).mean())
        )
    return Tau(*np.array(rows, dtype=float).T, heads=masks.shape[0] * masks.shape[1])


# 7


@dataclass(frozen=True, eq=False)
class Correction:
    """MomentKV's error by layer without and with its correction, and the mean of log Z_E minus its estimate, in nats."""

    before: np.ndarray
    after: np.ndarray
    layers: list[int]
    gap: float

    def sentences(self) -> list[str]:
        """What the step says."""
        before, after = mean(self.before), mean(self.after)
        return [
            "MomentKV does not forget the evicted entries altogether. For each head it keeps their number, their mean key and "
            "value, and how the two vary together. From these it estimates what they would have said, f_E, and with how much "
            "weight, Z_E, and puts that back.",
            f"On this text the mean error of a head falls from {100 * before:.0f}% to {100 * after:.0f}% of the length of its "
            f"output. It could do more: its estimate of log Z_E is a lower bound, here {number(self.gap)} nats too low, so "
            f"the evicted count {number(math.exp(self.gap))} times less than they should.",
        ]


def correction(numbers: Analysis, budget: int = BUDGET) -> Correction:
    """See `Correction`; what is kept is the same both times."""
    found, layers = numbers.error_map(MOMENTKV, budget), numbers.open_layers
    before, after = (found[key][layers].mean(axis=1) for key in ("relative_error", "corrected_error"))
    return Correction(before, after, layers, mean(found["log_z_gap"]))


# 8


@dataclass(frozen=True)
class Price:
    """CapKV and MomentKV under one budget, equal in entries or in bytes: entries a head, and MiB of entries and statistics."""

    equal_bytes: bool
    entries: dict[str, int]
    stored: dict[str, float]
    statistics: dict[str, float]
    worth: int
    head_dim: int

    def sentences(self) -> list[str]:
        """What the step says."""
        d = self.head_dim
        values = d * d + 2 * d + 1
        total = {label: self.stored[label] + self.statistics[label] for label in self.entries}
        (capkv, momentkv), (few, many) = self.entries.values(), total.values()
        first = (
            f"MomentKV's statistics are d² + 2d + 1 = {values:,} numbers a head (d = {d}), as much as {self.worth} entries, "
            "whatever the budget."
        )
        if self.equal_bytes:
            return [
                first,
                f"With equal bytes both take {number(few, 3)} MiB, and MomentKV pays for its statistics with entries: it keeps "
                f"{momentkv:,} a head where CapKV keeps {capkv:,}. The smaller the budget, the more that weighs.",
                "Choose MiB as the unit of the budget in the sidebar, and every policy gets the same bytes.",
            ]
        return [
            first,
            f"With {capkv:,} entries a head each CapKV takes {number(few, 3)} MiB and MomentKV "
            f"{number(many, 3)} MiB: {100 * (many / few - 1):.0f}% more memory, which is not counted.",
        ]


def price(shape: Shape, n_tokens: int, equal_bytes: bool, budget: int = BUDGET) -> Price:
    """See `Price`."""
    size = shape.bytes(budget)
    entries = {CAPKV.label: budget, MOMENTKV.label: budget}
    if equal_bytes:
        entries = {each.label: min(shape.entries(size, each), n_tokens) for each in (CAPKV, MOMENTKV)}
    statistics = {each.label: (shape.bytes(1, each) - shape.bytes(1)) / MIB for each in (CAPKV, MOMENTKV)}
    stored = {label: shape.bytes(count) / MIB for label, count in entries.items()}
    worth = math.ceil(shape.bytes(budget, MOMENTKV) / shape.bytes(1)) - budget
    return Price(equal_bytes, entries, stored, statistics, worth, shape.head_dim)


def mean(values: np.ndarray) -> float:
    """The mean over layers and heads that can be evicted."""
    return float(np.nanmean(values))
