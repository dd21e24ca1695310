"""A made-up country: works (bridges, libraries, ships, ...) and the people who made them, each with a document and facts.

Nothing in it is known from elsewhere, so an answer can only come from the text. A question of one hop asks for a fact of a
document; one of two hops asks for a fact about the person whom another document names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from random import Random
from typing import NamedTuple

from kvviz.tasks.texts import words


class Fact(NamedTuple):
    """A question, the words that an answer in a whole sentence begins with, and the answer."""

    question: str
    stem: str
    answer: str


@dataclass(frozen=True)
class Document:
    """A paragraph about one subject.

    Attributes:
        brief: the same in other words, without most details.
        facts: what the text answers.
    """

    subject: str
    text: str
    brief: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Story:
    """A work, its maker, and facts that need both documents."""

    work: Document
    maker: Document
    two_hops: tuple[Fact, ...]


@dataclass(frozen=True)
class _Kind:
    """What one kind of work is called, what was done to make it, and what can be said about it."""

    noun: str
    made: str
    opened: str
    sort: str
    stuffs: tuple[str, ...]
    details: tuple[str, ...]


_KINDS = (
    _Kind(
        "Bridge",
        "designed",
        "opened",
        "a bridge of",
        ("grey stone", "red brick", "larch wood", "riveted iron"),
        (
            "It crosses the river in {a} arches, and at its middle there is a bench for two.",
            "Carts paid {b} pence to pass, and sheep went free on Sundays.",
            "In a flood the water once came within a hand of the roadway, and the mark is still shown.",
            "Every spring it is closed for a day while the joints are cleaned of moss.",
        ),
    ),
    _Kind(
        "Library",
        "founded",
        "opened",
        "a library in a house of",
        ("yellow sandstone", "black timber", "white plaster", "dark brick"),
        (
            "It began with {b} books, most of them about farming and the weather.",
            "The reading room has {a} tall windows and a stove that is never allowed to go out.",
            "Readers are lent an umbrella with their book when it rains.",
            "A bell is rung a quarter of an hour before the doors are shut.",
        ),
    ),
    _Kind(
        "Windmill",
        "built",
        "started",
        "a windmill of",
        ("oak boards", "tarred timber", "rough granite", "pale brick"),
        (
            "Its {a} sails were covered with canvas until they were replaced by shutters.",
            "On a good day it ground {b} sacks of rye before noon.",
            "The miller's family lived on the second floor and slept badly in storms.",
            "Swallows nest under the gallery, and nobody is allowed to disturb them.",
        ),
    ),
    _Kind(
        "Garden",
        "laid out",
        "planted",
        "a public garden behind walls of",
        ("flint", "old brick", "field stone", "clipped yew"),
        (
            "There are {a} ponds in it, and the largest freezes first.",
            "In the first year {b} fruit trees were set, of which more than half are still standing.",
            "Visitors may pick up fallen apples but must not shake the branches.",
            "The gate is left open on the night of the summer festival.",
        ),
    ),
    _Kind(
        "Theatre",
        "planned",
        "opened",
        "a theatre with a front of",
        ("blue tiles", "carved oak", "green copper", "pink limestone"),
        (
            "It has {b} seats, and the cheapest are said to hear best.",
            "The curtain needs {a} people to lift it and is older than the building.",
            "During a long winter it served as a grain store and two plays were given among the sacks.",
            "A lamp burns on the stage whenever it is empty.",
        ),
    ),
    _Kind(
        "Lighthouse",
        "drawn up",
        "lit",
        "a lighthouse of",
        ("white granite", "cast iron", "banded brick", "dressed basalt"),
        (
            "Its beam turns {a} times a minute and can be seen from {b} miles away.",
            "The keepers grew cabbages in tubs on the lee side.",
            "A cable with a basket was the only way to land when the sea was high.",
            "The old lens stands in the entrance, and children are lifted up to look through it.",
        ),
    ),
)

_LIVES = (
    "For {n} years {last} travelled with a folding table and drew whatever was about to be pulled down.",
    "{last} answered every letter on the day it came and kept copies in {n} boxes.",
    "Neighbours remembered {last} for walking {n} miles before breakfast in any weather.",
    "{last} taught for {n} winters in an evening school and refused to be paid.",
    "It is said that {last} owned {n} hats and wore only the oldest.",
    "{last} wrote {n} short books, of which only the one about weirs was ever printed.",
)


class World:
    """The works of a seed, numbered from 0; `story(i)` is the same however many others are looked at."""

    def __init__(self, random: Random) -> None:
        self.seed = random.getrandbits(64)
        self.story = lru_cache(maxsize=None)(self._story)

    @cached_property
    def _works(self) -> list[tuple[str, _Kind]]:
        towns = [head + tail for head, tail in product(words("town_heads"), words("town_tails"))]
        return self._shuffled("works", [(town, kind) for town in towns for kind in _KINDS])

    @cached_property
    def _people(self) -> list[tuple[str, str]]:
        families = [head + tail for head, tail in product(words("town_heads"), words("surname_tails"))]
        return self._shuffled("people", list(product(words("first_names"), families)))

    def _shuffled(self, what: str, parts: list) -> list:
        Random(f"{self.seed}|{what}").shuffle(parts)
        return parts

    def _story(self, i: int) -> Story:
        random = Random(f"{self.seed}|story {i}")
        town, kind = self._works[i % len(self._works)]
        first, last = self._people[i % len(self._people)]
        work, maker = _work(random, town, kind, f"{first} {last}"), _person(random, first, last)
        whom = f"the person who {_verb(kind)} {work.subject}"
        return Story(work, maker, _facts(whom, *(fact.answer for fact in maker.facts)))


def _work(random: Random, town: str, kind: _Kind, maker: str) -> Document:
    name = f"the {town} {kind.noun}"
    stuff, year = random.choice(kind.stuffs), random.randrange(1650, 1950)
    details = random.sample(kind.details, 2)
    numbers = {"a": random.randrange(3, 13), "b": random.randrange(20, 600)}
    text = f"The {town} {kind.noun} is {kind.sort} {stuff}. It was {kind.made} by {maker} and {kind.opened} in {year}. "
    brief = f"On {kind.sort} {stuff} that {maker} gave to the people of {town}."
    facts = (
        Fact(f"Who {_verb(kind)} {name}?", f"T{name[1:]} was {kind.made} by", maker),
        Fact(f"In which year was {name} {kind.opened}?", f"T{name[1:]} was {kind.opened} in", str(year)),
    )
    return Document(name, text + " ".join(detail.format(**numbers) for detail in details), brief, facts)


def _verb(kind: _Kind) -> str:
    return {"drawn up": "drew up"}.get(kind.made, kind.made)


def _one(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _person(random: Random, first: str, last: str) -> Document:
    town = random.choice(words("town_heads")) + random.choice(words("town_tails"))
    trade, instrument, animal = (
        random.choice(each) for each in (words("trades"), words("instruments"), words("animals"))
    )
    lives = random.sample(_LIVES, 2)
    years = [random.randrange(3, 40) for _ in lives]
    worker, pet = _one(trade), _one(animal)
    text = (
        f"{first} {last} was {worker} who was born in {town}. {lives[0].format(last=last, n=years[0])} In the evenings {last} "
        f"played the {instrument}, and kept {pet} that was known to the whole street. {lives[1].format(last=last, n=years[1])}"
    )
    name = f"{first} {last}"
    facts = _facts(name, town, instrument, animal)
    return Document(name, text, f"On {worker} from {town}, with {pet} at home and music after dark.", facts)


def _facts(whom: str, town: str, instrument: str, animal: str) -> tuple[Fact, ...]:
    """What can be asked about a person, who is named or described."""
    subject = whom[0].upper() + whom[1:]
    return (
        Fact(f"In which town was {whom} born?", f"{subject} was born in", town),
        Fact(f"Which instrument did {whom} play?", f"{subject} played the", instrument),
        Fact(f"Which animal did {whom} keep?", f"{subject} kept {_one(animal).split()[0]}", animal),
    )
