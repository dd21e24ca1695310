"""RULER's tasks that need many places of the text at once: variable tracking, common words, frequent words."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, count, islice
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import ClassVar

from scipy.special import zeta

from kvviz.tasks.task import Draft, Draw, Task, require
from kvviz.tasks.texts import noise, pairs, sentences, words


@dataclass(frozen=True, kw_only=True)
class Tracking(Task):
    """Which variables hold a value, through a chain of assignments that is scattered over the text.

    Attributes:
        chains: chains with a value each; the first is asked for.
        hops: assignments of one variable to the next in each.
        shots: solved small examples before.
    """

    chains: int = 1
    hops: int = 4
    shots: int = 1

    family: ClassVar[str] = "RULER"
    kind: ClassVar[str] = "tracking"
    metric: ClassVar[str] = "match_all"
    max_new_tokens: ClassVar[int] = 30
    filled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(1 <= self.chains <= 50, f"chains is a number from 1 to 50; got {self.chains}.")
        require(1 <= self.hops <= 50, f"hops is a number from 1 to 50; got {self.hops}.")
        require(0 <= self.shots <= 5, f"shots is a number from 0 to 5; got {self.shots}.")

    def draft(self, draw: Draw, size: int) -> Draft:
        """size: words of noise."""
        task = "Memorise and follow the chains of variable assignments that are hidden in the text below.\n\n"
        solved = ""
        for shot in range(self.shots):
            text, question, prefix, names = self._write(Draw(f"shot {shot}", 0), 50)
            solved += f"{task}{text}\n{question} {prefix} {' '.join(names)}\n\n"
        text, question, prefix, names = self._write(draw, size)
        return Draft(solved + task, text, question, names, prefix)

    def _write(self, draw: Draw, size: int) -> tuple[str, str, str, tuple[str, ...]]:
        """Text, question, the answer's first words, and the names that hold the first chain's value."""
        random, names = draw("variables"), iter(_names(draw("names")))
        hay = sentences(noise(size))
        places = draw("places")
        first: tuple[str, ...] = ()
        asked = 0
        for number in range(self.chains):
            value = random.randrange(10000, 100000)
            variables = tuple(islice(names, self.hops + 1))
            held = [str(value), *(f"VAR {name}" for name in variables[:-1])]
            lines = [f"VAR {name} = {what}." for name, what in zip(variables, held, strict=True)]
            _scatter(hay, lines, places)
            if number == 0:
                first, asked = variables, value
        n = len(first)
        question = f"Question: Which variables are assigned the value {asked} in the text above?"
        prefix = f"Answer: By the chain of assignments in the text above, {n} variables are assigned the value {asked}:"
        return " ".join(hay), question, prefix, first


@dataclass(frozen=True, kw_only=True)
class CommonWords(Task):
    """The words that occur most often in a numbered list.

    Attributes:
        common: how many such words there are.
        frequency, other_frequency: how often they and all others occur (less in a list that is too short for it).
        shots: solved small examples before.
    """

    common: int = 10
    frequency: int = 30
    other_frequency: int = 3
    shots: int = 1

    family: ClassVar[str] = "RULER"
    kind: ClassVar[str] = "aggregation"
    metric: ClassVar[str] = "match_all"
    max_new_tokens: ClassVar[int] = 120
    filled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(1 <= self.common <= 50, f"common is a number from 1 to 50; got {self.common}.")
        require(
            self.frequency >= 2 and 1 <= self.other_frequency < self.frequency,
            "frequency is a number of at least 2, and other_frequency of at least 1 and below it; "
            f"got {self.frequency} and {self.other_frequency}.",
        )
        require(0 <= self.shots <= 5, f"shots is a number from 0 to 5; got {self.shots}.")

    def draft(self, draw: Draw, size: int) -> Draft:
        """size: entries beyond the shortest list, in which every common word stands twice."""
        task = "Below is a numbered list of words. Some appear more often than others. Remember those that appear most often.\n"
        question = f"Question: Which are the {self.common} most common words in the list above?"
        prefix = f"Answer: The {self.common} words that appear most often in the list are:"
        solved = ""
        for shot in range(self.shots):
            text, right = self._write(Draw(f"shot {shot}", 0), 0)
            numbered = " ".join(f"{i}. {word}" for i, word in enumerate(right, 1))
            solved += f"{task}{text}\n{question} {prefix} {numbered}\n\n"
        text, right = self._write(draw, size)
        return Draft(solved + task, text, question, right, prefix)

    def _write(self, draw: Draw, size: int) -> tuple[str, tuple[str, ...]]:
        entries = 5 * self.common // 2 + size
        often = max(2, min(self.frequency, entries * 2 // 3 // self.common))
        others = max(1, min(self.other_frequency, often // 10))
        vocabulary = _vocabulary(draw("words"))
        right = tuple(islice(vocabulary, self.common))
        rest = chain.from_iterable([word] * others for word in vocabulary)
        listed = list(right) * often
        listed += islice(rest, entries - len(listed))
        draw("order").shuffle(listed)
        return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1)), right


@dataclass(frozen=True, kw_only=True)
class FrequentWords(Task):
    """The three most frequent coded words, where frequencies fall as rank^-alpha (dots are the most frequent, and ignored)."""

    alpha: float = 2.0

    family: ClassVar[str] = "RULER"
    kind: ClassVar[str] = "aggregation"
    metric: ClassVar[str] = "match_all"
    max_new_tokens: ClassVar[int] = 50
    filled: ClassVar[bool] = False

    shortest: ClassVar[int] = 80
    """Words in the shortest text."""

    def __post_init__(self) -> None:
        require(1.5 <= self.alpha <= 3, f"alpha is a number from 1.5 to 3; got {self.alpha}.")

    def draft(self, draw: Draw, size: int) -> Draft:
        """size: coded words beyond the shortest text."""
        total = self.shortest + size
        names = _codes(draw("codes"))
        right, listed = [], []
        for rank in count(2):
            n = int(total * rank**-self.alpha / zeta(self.alpha)) + (rank <= 4)  # so that no two of the first are equal
            if n == 0:
                break
            word = next(names)
            listed += [word] * n
            right += [word] if rank <= 4 else []
        listed += ["...."] * (total - len(listed))
        draw("order").shuffle(listed)
        return Draft(
            lead="Read the coded text below and keep count of every coded word. Find the three that appear most often. ",
            body=" ".join(listed),
            question="Question: Do not explain anything. Leave out the dots '....'. Which three words appear most often in the "
            "coded text above?",
            answers=tuple(right),
            answer_prefix="Answer: In the coded text above, the three words that appear most often are:",
        )


def _scatter(hay: list[str], lines: list[str], random: Random) -> None:
    """Put lines into the haystack at random places, in their order."""
    depths = sorted((random.random() for _ in lines), reverse=True)
    for depth, line in zip(depths, reversed(lines), strict=True):
        hay.insert(round(depth * len(hay)), line)


def _names(random: Random):
    """Variable names of five letters, each once."""
    return _unique(lambda: "".join(random.choices(ascii_uppercase, k=5)))


def _codes(random: Random):
    """Coded words of six letters, each once."""
    return _unique(lambda: "".join(random.choices(ascii_lowercase, k=6)))


def _unique(make):
    seen = set()
    while True:
        made = make()
        if made not in seen:
            seen.add(made)
            yield made


def _vocabulary(random: Random):
    """Words without end: all single ones in a random order, then pairs."""
    single = [*words("adjectives"), *words("nouns")]
    random.shuffle(single)
    yield from single
    yield from pairs(random)


def aggregate_tasks() -> tuple[Task, ...]:
    """RULER's three settings."""
    return (
        Tracking(
            name="vt",
            title="Variable tracking",
            measures="Whether a chain of assignments can still be followed when its links are scattered.",
        ),
        CommonWords(
            name="cwe",
            title="Common words",
            measures="Whether the words that a list repeats most can still be counted.",
        ),
        FrequentWords(
            name="fwe",
            title="Frequent coded words",
            measures="Whether frequencies survive in a text without meaning.",
        ),
    )
