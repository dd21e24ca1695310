"""RULER's needles in a haystack: sentences that give a magic number to a key, hidden in a text that has nothing to do with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import ClassVar
from uuid import UUID

from kvviz.tasks.task import Draft, Draw, Task, require
from kvviz.tasks.texts import essay_words, noise, pairs, sentences

HAYSTACKS = ("repeated", "essay", "dense")
KINDS = ("words", "numbers", "uuids")


@dataclass(frozen=True, kw_only=True)
class Needles(Task):
    """Find what the text says about one or several keys.

    Attributes:
        haystack: "repeated" sentences, "essay", or "dense": nothing but other needles.
        key_type, value_type: "words", "numbers" or "uuids".
        keys: needles with different keys (those that are not asked for distract).
        values: needles for each key.
        queries: keys that are asked for.
        depth: where the first key's needle stands, from 0 (start) to 1 (end); None is anywhere.
        digits: of a number.
    """

    haystack: str = "essay"
    key_type: str = "words"
    value_type: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    depth: float | None = None
    digits: int = 7

    family: ClassVar[str] = "RULER"
    kind: ClassVar[str] = "needle"
    metric: ClassVar[str] = "match_all"

    def __post_init__(self) -> None:
        require(self.haystack in HAYSTACKS, f"haystack is one of {', '.join(HAYSTACKS)}; got {self.haystack!r}.")
        for name in ("key_type", "value_type"):
            value = getattr(self, name)
            require(value in KINDS, f"{name} is one of {', '.join(KINDS)}; got {value!r}.")
        for name in ("keys", "values", "queries"):
            value = getattr(self, name)
            require(1 <= value <= 100, f"{name} is a number from 1 to 100; got {value}.")
        require(3 <= self.digits <= 30, f"digits is a number from 3 to 30; got {self.digits}.")
        if self.depth is not None:
            require(0 <= self.depth <= 1, f"depth is a number from 0 (start) to 1 (end); got {self.depth}.")

    @property
    def max_new_tokens(self) -> int:
        """Enough for all values, and for a model that says something first."""
        return (48 if self.value_type == "uuids" else 24) * self.values * self.queries

    @property
    def filled(self) -> bool:
        """Other needles are large units; words of a text need no filling."""
        return self.haystack == "dense"

    def draft(self, draw: Draw, size: int) -> Draft:
        """size: words of haystack, or other needles."""
        keys = list(islice(_stream(self.key_type, draw("keys"), self.digits), max(self.keys, self.queries)))
        stream = _stream(self.value_type, draw("values"), self.digits)
        held = {key: tuple(islice(stream, self.values)) for key in keys}
        needles = [self._needle(key, value) for key, values in held.items() for value in values]
        body = self._hide(needles, draw, size, keys)
        noun, asked = self.value_type, keys[: self.queries]
        one = self.queries * self.values == 1
        about = f"special magic {noun.removesuffix('s') if one else noun} for {_listed(asked)} mentioned in the text"
        return Draft(
            lead=f"Some special magic {noun} are hidden in the text below. Remember them: I will ask for the {noun} later.\n",
            body=body,
            question=f"What {'is the' if one else 'are all the'} {about}?",
            answer_prefix=f"The {about} {'is' if one else 'are'}",
            answers=tuple(value for key in asked for value in held[key]),
        )

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value_type} for {key} is: {value}."

    def _hide(self, needles: list[str], draw: Draw, size: int, keys: list[str]) -> str:
        """The haystack with the needles at their depths."""
        random = draw("depths")
        depths = [random.random() for _ in needles]
        if self.depth is not None:
            depths[: self.values] = [self.depth] * self.values
        hay = self._haystack(draw, size, set(keys))
        places = sorted(zip(depths, needles, strict=True), key=lambda each: each[0], reverse=True)
        for depth, needle in places:
            hay.insert(round(depth * len(hay)), needle)
        return ("\n" if self.haystack == "dense" else " ").join(hay)

    def _haystack(self, draw: Draw, size: int, taken: set[str]) -> list[str]:
        if self.haystack == "repeated":
            return sentences(noise(size))
        if self.haystack == "essay":
            return sentences(" ".join(essay_words(size, draw("essays"))))
        keys = (key for key in _stream(self.key_type, draw("other keys"), self.digits) if key not in taken)
        values = _stream(self.value_type, draw("other values"), self.digits)
        return [self._needle(*each) for each in islice(zip(keys, values, strict=False), size)]


def _stream(kind: str, random: Random, digits: int) -> Iterator[str]:
    """Words, numbers or uuids, each once."""
    if kind == "words":
        yield from pairs(random)
    seen = set()
    while True:
        made = str(random.randrange(10 ** (digits - 1), 10**digits))
        if kind == "uuids":
            made = str(UUID(int=random.getrandbits(128), version=4))
        if made not in seen:
            seen.add(made)
            yield made


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def needle_tasks() -> tuple[Task, ...]:
    """RULER's eight settings."""
    return (
        Needles(
            name="niah_single_1",
            title="Needle in repeated sentences",
            measures="Whether one number survives in a text that says the same thing over and over.",
            haystack="repeated",
        ),
        Needles(
            name="niah_single_2",
            title="Needle in essays",
            measures="Whether one number survives in ordinary prose.",
        ),
        Needles(
            name="niah_single_3",
            title="Needle in essays, long value",
            measures="Whether a value of many tokens survives whole in ordinary prose.",
            value_type="uuids",
        ),
        Needles(
            name="niah_multikey_1",
            title="Needle among others in essays",
            measures="Whether the right one of four needles can still be told apart.",
            keys=4,
        ),
        Needles(
            name="niah_multikey_2",
            title="Needle among needles",
            measures="Whether a look-up still works where every line looks like the one that is asked for.",
            haystack="dense",
        ),
        Needles(
            name="niah_multikey_3",
            title="Needle among needles, long keys and values",
            measures="Whether a look-up by a key of many tokens still works where every line looks alike.",
            haystack="dense",
            key_type="uuids",
            value_type="uuids",
        ),
        Needles(
            name="niah_multivalue",
            title="Four values of one key",
            measures="Whether all of several needles with the same key survive.",
            values=4,
        ),
        Needles(
            name="niah_multiquery",
            title="Four keys asked for",
            measures="Whether all of several needles survive, each with its own key.",
            keys=4,
            queries=4,
        ),
    )
