"""The texts that tasks are made of. All were written for kvviz: essays, adjectives and nouns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from random import Random

FOLDER = Path(__file__).parent

NOISE = "The grass is green. The sky is blue. The sun is warm. Here we walk. The road goes on."
"""Says nothing, over and over: RULER's repeated haystack in our words."""


@cache
def essays() -> tuple[str, ...]:
    """The essays, each with one paragraph a line."""
    return tuple(path.read_text(encoding="utf-8").strip() for path in sorted((FOLDER / "essays").glob("*.txt")))


@cache
def words(kind: str) -> tuple[str, ...]:
    """All "adjectives" or all "nouns"."""
    return tuple((FOLDER / "words" / f"{kind}.txt").read_text(encoding="utf-8").split())


def essay_words(n: int, random: Random) -> list[str]:
    """The first n words of the essays in a random order, over and over when they are used up."""
    order = list(essays())
    random.shuffle(order)
    return list(islice(cycle(" ".join(order).split()), n))


def noise(n: int) -> str:
    """n words of noise."""
    return " ".join(islice(cycle(NOISE.split()), n))


def sentences(text: str) -> list[str]:
    """Split after full stops, question and exclamation marks."""
    return re.split(r"(?<=[.?!])\s+", text) if text else []


def pairs(random: Random) -> Iterator[str]:
    """ "silver-lantern", "odd-meadow", ...: never the same one twice."""
    seen = set()
    while True:
        pair = f"{random.choice(words('adjectives'))}-{random.choice(words('nouns'))}"
        if pair not in seen:
            seen.add(pair)
            yield pair
