"""What a person has set up, as one frozen value that every page reads; a budget in three units; both as a link.

The link holds everything but a text of one's own, which would be too long for it. What a link says is checked, never trusted:
values that make no sense are left out, each with a sentence that says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvviz import budget as budgets
from kvviz.host import ModelSpec
from kvviz.jobs import Generate, Prompt, Read
from kvviz.models import DEFAULT, Loaded
from kvviz.policies.policy import Policy, policy
from kvviz.policies.spec import parse, spec
from kvviz.presets import PRESETS

ENTRIES, SHARE, MIB = "entries", "share removed", "MiB"
UNITS = (ENTRIES, SHARE, MIB)

OWN = "own"
"""Stands for a preset where the text is a person's own."""

MAX_POLICIES = 16
MAX_NEW_TOKENS = 512


@dataclass(frozen=True)
class Shape:
    """What of a model its cache's size depends on. `layers` are those that can be evicted."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    positions: int
    all_layers: int

    @classmethod
    def of(cls, loaded: Loaded) -> Shape:
        """The shape of a loaded model."""
        return cls(
            layers=loaded.n_layers - sum(loaded.sliding),
            heads=loaded.n_heads,
            kv_heads=loaded.n_kv_heads,
            head_dim=loaded.head_dim,
            itemsize=loaded.dtype.itemsize,
            positions=loaded.positions,
            all_layers=loaded.n_layers,
        )

    def bytes(self, entries: float, chosen: Policy | None = None) -> int:
        """Bytes of `entries` entries a head, with the moment statistics of a policy that keeps them."""
        return budgets.to_bytes(entries, self.layers, self.kv_heads, self.head_dim, self.itemsize, self.moments(chosen))

    def entries(self, size: float, chosen: Policy | None = None) -> int:
        """Entries a head that fit into `size` bytes; ValueError where not one does."""
        return budgets.from_bytes(size, self.layers, self.kv_heads, self.head_dim, self.itemsize, self.moments(chosen))

    def moments(self, chosen: Policy | None) -> int:
        """Bytes of a policy's moment statistics for one head."""
        if chosen is None or chosen.correction is None:
            return 0
        return budgets.moments_bytes(self.head_dim, second=chosen.partition > 0)


@dataclass(frozen=True)
class Size:
    """A budget as a person gives it: an amount in a unit; a share removed is in percent."""

    amount: float
    unit: str = ENTRIES

    def __post_init__(self) -> None:
        top = {ENTRIES: math.inf, SHARE: 100, MIB: math.inf}.get(self.unit)
        if top is None:
            raise ValueError(f"The unit of a budget is one of {', '.join(UNITS)}; got {self.unit!r}.")
        low = self.amount >= 0 if self.unit == SHARE else self.amount > 0
        if not (low and self.amount < top):
            raise ValueError(f"A budget of {self.amount:g} {self.unit} is out of range.")
        if self.unit == ENTRIES and self.amount != int(self.amount):
            raise ValueError(f"A budget is a whole number of entries; got {self.amount:g}.")

    def __str__(self) -> str:
        number = f"{self.amount:.6g}" if self.unit != ENTRIES else f"{self.amount:.0f}"
        return number + {ENTRIES: "", SHARE: "%", MIB: "MiB"}[self.unit]

    @classmethod
    def parse(cls, text: str) -> Size:
        """From "256", "82%" or "5.6MiB"."""
        text = text.strip()
        for ending, unit in (("%", SHARE), ("MiB", MIB), ("", ENTRIES)):
            number = text.removesuffix(ending)
            if text.endswith(ending) and number.replace(".", "", 1).isdecimal():
                return cls(float(number), unit)
        raise ValueError("A budget is a number of entries (256), a share removed (82%) or a size (5.6MiB).")

    def entries(self, n_tokens: int, shape: Shape | None, chosen: Policy | None = None) -> int:
        """Entries a head, of a policy where bytes are given (its statistics count); at least 1.

        Without a model (no tokens, no shape) shares and MiB are not known yet: 256.
        """
        if self.unit == ENTRIES:
            return int(self.amount)
        if not n_tokens or shape is None:
            return 256
        if self.unit == SHARE:
            return budgets.from_share(n_tokens, self.amount / 100)
        return min(shape.entries(self.amount * 2**20, chosen), n_tokens)

    def to(self, unit: str, n_tokens: int, shape: Shape) -> Size:
        """The same budget in another unit, rounded to what people read."""
        entries = min(_or(lambda: self.entries(n_tokens, shape), 1), n_tokens)
        return Size.of(entries, unit, n_tokens, shape)

    @classmethod
    def of(cls, entries: int, unit: str, n_tokens: int, shape: Shape) -> Size:
        """A number of entries in a unit."""
        if unit == SHARE:
            return cls(float(f"{100 * budgets.to_share(n_tokens, entries):.3g}"), unit)
        if unit == MIB:
            mib = shape.bytes(entries) / 2**20
            step = 10.0 ** (math.floor(math.log10(mib)) - 3)
            return cls(float(f"{math.ceil(mib / step - 1e-9) * step:.4g}"), unit)  # rounded up: all entries fit
        return cls(entries, unit)


@dataclass(frozen=True)
class Experiment:
    """Everything that the sidebar says.

    Attributes:
        preset: the preset's name, or OWN.
        chosen: the policies as they are chosen, without the full cache; `policies` has the protection applied.
        size: the budget as it was given; `budget` is in entries a head.
        equal: (sinks, recent) that every policy protects, or None for each as published.
        policy_index: which of the policies a page looks at.
        layer, head: which query head a page looks at.
        n_tokens, shape: the prompt's length and the model's shape; 0 and None until the model is loaded.
    """

    model: ModelSpec = field(default_factory=lambda: ModelSpec(DEFAULT))
    prompt: Prompt = field(default_factory=lambda: PRESETS["needle"].prompt())
    preset: str = "needle"
    chosen: tuple[Policy, ...] = field(default_factory=lambda: (policy("capkv"), policy("momentkv")))
    size: Size = Size(256)
    equal: tuple[int, int] | None = None
    policy_index: int = 0
    layer: int = 0
    head: int = 0
    max_new_tokens: int = 48
    temperature: float = 0.0
    seed: int = 0
    n_tokens: int = 0
    shape: Shape | None = None

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies that run, each once, with the protection that holds for them."""
        made = self.chosen if self.equal is None else (p.with_protection(*self.equal) for p in self.chosen)
        return tuple(dict.fromkeys(p for p in made if not p.keeps_all))

    @property
    def unit(self) -> str:
        """The budget's unit."""
        return self.size.unit

    @property
    def budget(self) -> int:
        """Entries a head, statistics not counted; at least 1."""
        return max(1, _or(lambda: self.size.entries(self.n_tokens, self.shape), 1))

    def budget_of(self, chosen: Policy) -> int:
        """Entries a head of one policy: where the budget is in MiB, its statistics count. At least 1."""
        return max(1, _or(lambda: self.size.entries(self.n_tokens, self.shape, chosen), 1))

    @property
    def policy(self) -> Policy:
        """The policy that a page looks at; the full cache where none is chosen."""
        return self.policies[min(self.policy_index, len(self.policies) - 1)] if self.policies else policy("full")

    @property
    def wants_mass(self) -> bool:
        """Whether a policy needs the attention that every key received."""
        return any("attention_mass" in p.scorer.needs for p in self.policies)

    @property
    def title(self) -> str:
        """The prompt's name."""
        return PRESETS[self.preset].title if self.preset in PRESETS else "A text of your own"

    @property
    def generate(self) -> Generate:
        """The job that runs it."""
        return Generate(
            model=self.model,
            prompt=self.prompt,
            policies=self.policies,
            budget=self.budget,
            max_bytes=round(self.size.amount * 2**20) if self.unit == MIB else None,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=self.seed,
        )

    @property
    def read(self) -> Read:
        """The job that reads its prompt."""
        return Read(self.model, self.prompt, self.wants_mass)

    @property
    def fault(self) -> str:
        """Why it cannot run, with the remedy, or nothing."""
        prompt, shape = self.prompt, self.shape
        if not prompt.context.strip():
            return "The prompt is empty. Choose a preset, or paste a text under Edit."
        if prompt.chat and not prompt.question.strip() and not prompt.answer.strip():
            return (
                "The question is empty. Ask something, or switch the chat template off under Edit to continue the text."
            )
        if not self.policies:
            return "No policy is chosen, so there is nothing to compare with the full cache. Choose one or more."
        if shape and self.n_tokens + self.max_new_tokens > shape.positions:
            fit = max(shape.positions - self.max_new_tokens, 0)
            return (
                f"The prompt has {self.n_tokens:,} tokens. With {self.max_new_tokens} new ones at most {fit:,} fit into "
                f"the {shape.positions:,} positions of {model_title(self.model.name)}. Shorten the text under Edit, or "
                "give the model more positions (YaRN, beside its name)."
            )
        if self.unit == MIB and shape and self.n_tokens:
            for each in self.policies:
                try:
                    self.size.entries(self.n_tokens, shape, each)
                except ValueError:
                    least = shape.bytes(1, each) / 2**20
                    return (
                        f"{each.title} needs at least {least:.3g} MiB: one entry a head, and its statistics. Raise the "
                        "budget, or switch the correction off."
                    )
        return ""

    def words(self) -> str:
        """The experiment in one line."""
        tokens = [f"{self.n_tokens:,} tokens"] if self.n_tokens else []
        question = [
            "continued"
            if not self.prompt.question
            else "question seen by eviction"
            if self.prompt.seen
            else "question asked after eviction"
        ]
        parts = [model_title(self.model.name), self.title, *tokens, f"budget {size_words(self.size)}", *question]
        return ", ".join(parts)


def model_title(name: str) -> str:
    """A model's name as people read it."""
    base, yarn, factor = name.partition(":yarn=")
    title = "SmolLM2-135M-Instruct" if base == DEFAULT else base.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
    return f"{title} (YaRN × {factor})" if yarn else title


def size_words(size: Size) -> str:
    """A budget with its unit."""
    if size.unit == ENTRIES:
        return f"{size.amount:,.0f} entries a head"
    return f"{size.amount:g}% removed" if size.unit == SHARE else f"{size.amount:g} MiB"


def to_query(experiment: Experiment) -> dict[str, str | list[str]]:
    """The experiment as query parameters, what is as usual left out; `preset` is always there."""
    usual = Experiment()
    mine, preset = experiment.prompt, PRESETS.get(experiment.preset)
    query: dict[str, Any] = {"preset": experiment.preset}
    flags = {"question": "", "answer": "", "chat": True}
    for name, plain in flags.items():
        value = getattr(mine, name)
        if value != (getattr(preset, name) if preset else plain):
            query[name] = value if isinstance(value, str) else str(int(value))
    query |= {"seen": "1"} if mine.seen else {}
    query |= {"budget": str(experiment.size)} if experiment.size != usual.size else {}
    if experiment.chosen != usual.chosen:
        query["policies"] = [spec(p) for p in experiment.chosen] or ["none"]
    if experiment.equal is not None:
        query["protect"] = ",".join(str(n) for n in experiment.equal)
    model = {"model": experiment.model.name, "device": experiment.model.device, "dtype": experiment.model.dtype}
    query |= {key: value for key, value in model.items() if value and value != DEFAULT}
    for key, name in NUMBERS.items():
        if (value := getattr(experiment, name)) != getattr(usual, name):
            query[key] = f"{value:g}" if isinstance(value, float) else str(value)
    return query


NUMBERS = {
    "tokens": "max_new_tokens",
    "temperature": "temperature",
    "seed": "seed",
    "layer": "layer",
    "head": "head",
    "policy": "policy_index",
}
"""Query parameter -> field of Experiment."""

_RANGES = {"tokens": (1, MAX_NEW_TOKENS), "temperature": (0, 10), "seed": (0, 2**31 - 1)}

PARAMETERS = (
    "preset",
    "question",
    "answer",
    "chat",
    "seen",
    "budget",
    "policies",
    "protect",
    "model",
    "device",
    "dtype",
)
PARAMETERS += tuple(NUMBERS)
"""Every query parameter that is ours."""


def from_query(query: Mapping[str, Sequence[str]], start: Experiment) -> tuple[Experiment, list[str]]:
    """An experiment from query parameters (each a list of values), and what was ignored, in sentences.

    Args:
        start: where the parameters say nothing; its text stands for that of a link to a text of one's own.
    """
    reader = _Reader(query)
    name = reader.one("preset", start.preset, _preset)
    preset = PRESETS.get(name)
    before = start.prompt if name == start.preset else preset.prompt() if preset else Prompt("", chat=True)
    if name == OWN and not before.context:
        reader.notes.append(
            "The text of this link is not in it: a text of one's own stays in its session. Paste it under Edit."
        )
    prompt = Prompt(
        context=before.context,
        question=reader.one("question", before.question, _text),
        seen=reader.one("seen", False, _flag),
        chat=reader.one("chat", before.chat, _flag),
        answer=reader.one("answer", before.answer, _text),
    )
    spot = ModelSpec(
        reader.one("model", start.model.name, _text),
        reader.one("device", start.model.device, _text),
        reader.one("dtype", start.model.dtype, _text),
    )
    numbers = {
        name: reader.one(key, getattr(start, name), _number(type(getattr(start, name)), *_RANGES.get(key, (0, 10_000))))
        for key, name in NUMBERS.items()
    }
    made = replace(
        start,
        preset=name,
        prompt=prompt,
        model=spot,
        chosen=reader.many("policies", start.chosen),
        size=reader.one("budget", start.size, Size.parse),
        equal=reader.one("protect", None, _pair),
        **numbers,
    )
    return made, reader.notes


class _Reader:
    """Reads query parameters one by one, and notes what it cannot read."""

    def __init__(self, query: Mapping[str, Sequence[str]]) -> None:
        self.query, self.notes = query, []

    def one(self, key: str, default: Any, read: Callable[[str], Any]) -> Any:
        values = self.query.get(key) or []
        return self._read(key, values[-1], read, default) if values else default

    def many(self, key: str, default: tuple[Policy, ...]) -> tuple[Policy, ...]:
        if not self.query.get(key):
            return default
        texts = [text for text in self.query[key] if text != "none"]
        read = [self._read(key, text, parse, None) for text in texts[:MAX_POLICIES]]
        if len(texts) > MAX_POLICIES:
            self.notes.append(f"The link names {len(texts)} policies; the first {MAX_POLICIES} are shown.")
        return tuple(p for p in read if p is not None) or (() if not texts else default)

    def _read(self, key: str, text: str, read: Callable[[str], Any], default: Any) -> Any:
        try:
            return read(text)
        except (ValueError, TypeError) as error:
            self.notes.append(f"{key}={text[:40]} in the link is ignored. {error}")
            return default


def _preset(text: str) -> str:
    if text not in PRESETS and text != OWN:
        raise ValueError(f"There is no such preset; there are {', '.join(PRESETS)}.")
    return text


def _text(text: str) -> str:
    if len(text) > 4000 or "\x00" in text:
        raise ValueError("It is too long, or not text.")
    return text


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("It is 0 or 1.")
    return text == "1"


def _pair(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdecimal() and len(part) < 5 for part in parts):
        raise ValueError("It is two numbers of entries, sinks and recent, such as 4,32.")
    return int(parts[0]), int(parts[1])


def _number(kind: type, low: float, high: float) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ValueError(f"It is a {'whole ' if kind is int else ''}number from {low:,g} to {high:,g}.")
        return value

    return read


def _or(compute: Callable[[], int], otherwise: int) -> int:
    try:
        return compute()
    except ValueError:
        return otherwise
