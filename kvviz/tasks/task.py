"""What a task is: a generator of examples of any length, the same for the same seed, each with its exact metric.

A task writes a draft of a given size (words of haystack, documents, lines); `make` finds the largest draft that fits into the
tokens asked for and fills what remains, less than one unit, with words of noise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from random import Random
from typing import Any, ClassVar

from kvviz import scoring
from kvviz.exceptions import KvvizError
from kvviz.jobs import Prompt
from kvviz.prompts import encode, encode_question
from kvviz.tasks.fit import TooSmall, largest
from kvviz.tasks.texts import noise


class TaskError(KvvizError):
    """A task, or a file of examples, that cannot be used; the message says what to change."""


@dataclass(frozen=True)
class Example:
    """One example of a task.

    Attributes:
        context: what is read and evicted.
        question: asked about it.
        answers: the right ones; see the metric for how they count.
        metric: a name of `kvviz.scoring.METRICS`; empty where there is nothing to answer.
        answer_prefix: first words of the answer, read with the question.
        chat: context and question make one user turn; otherwise plain text.
        classes: all class names, for classification.
        first_line: only the output's first line is scored.
        max_new_tokens: what an answer takes, at most.
        continuation: the text that really follows the context, where the loss on it is what is measured.
    """

    context: str
    question: str = ""
    answers: tuple[str, ...] = ()
    metric: str = ""
    answer_prefix: str = ""
    chat: bool = True
    classes: tuple[str, ...] = ()
    first_line: bool = False
    max_new_tokens: int = 32
    continuation: str = ""

    def prompt(self, seen: bool = False) -> Prompt:
        """As a job takes it; `seen`: eviction sees the question."""
        return Prompt(self.context, self.question, seen, self.chat, self.answer_prefix)

    def score(self, output: str) -> float | None:
        """0 to 100; None where there is nothing to answer."""
        if not self.metric:
            return None
        return scoring.score(self.metric, output, self.answers, self.classes, self.first_line)

    def tokens(self, tokenizer) -> int:
        """All tokens that are read before the first new one: the template, context, question, the answer's first words."""
        ids, tail = encode(tokenizer, self.prompt().source)
        return len(ids) + len(encode_question(tokenizer, self.question, tail, self.answer_prefix))


@dataclass(frozen=True)
class Draft:
    """An example without its filling: `lead` (what is to be done), then `body`."""

    lead: str
    body: str
    question: str
    answers: tuple[str, ...]
    answer_prefix: str = ""
    classes: tuple[str, ...] = ()


class Draw:
    """The random streams of one example: `draw("needles")` is the same whatever else is drawn, and at every length."""

    def __init__(self, task: str, seed: int) -> None:
        self.key = f"{task}|{seed}"

    def __call__(self, stream: str) -> Random:
        return Random(f"{self.key}|{stream}")


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A kind of task; fields other than `name`, `title` and `measures` are its options.

    Attributes:
        name, title: of the registry, and for people.
        measures: one plain sentence.
        family: "RULER", "LongBench" or "text".
        kind: what it is one of ("needle", "question answering", ...).
        metric: of its examples.
        max_new_tokens: what an answer takes, at most.
        chat: ask as a chat where the model has a template (few-shot and code tasks are plain text).
        filled: the last unit's remainder is filled with words of noise.
        first_line: only the output's first line is scored.
    """

    name: str
    title: str
    measures: str

    family: ClassVar[str]
    kind: ClassVar[str]
    metric: ClassVar[str]
    max_new_tokens: ClassVar[int]
    chat: ClassVar[bool] = True
    filled: ClassVar[bool] = True
    first_line: ClassVar[bool] = False

    @abstractmethod
    def draft(self, draw: Draw, size: int) -> Draft:
        """An example with `size` units of what can be made longer; tokens grow with the size."""

    def filling(self, words: int) -> str:
        """So many words of noise, to go before the body."""
        return noise(words) + "\n"

    def make(self, seed: int, n_tokens: int, tokenizer) -> Example:
        """The example of a seed, of `n_tokens` tokens or a little less (about 2% at most), as `Example.tokens` counts.

        Raises:
            TaskError: it needs more tokens than that.
        """
        draw = Draw(self.name, seed)
        chat = self.chat and bool(tokenizer.chat_template)

        def example(size: int, words: int = 0) -> Example:
            return self._finish(self.draft(draw, size), words, chat)

        try:
            size = largest(lambda size: example(size).tokens(tokenizer), n_tokens)
        except TooSmall as error:
            raise TaskError(
                f"{self.spec} needs at least {error.least:,} tokens with this tokenizer; {n_tokens:,} were asked for."
            ) from None
        words = largest(lambda words: example(size, words).tokens(tokenizer), n_tokens) if self.filled else 0
        return example(size, words)

    def _finish(self, draft: Draft, words: int, chat: bool) -> Example:
        filling = self.filling(words) if words else ""
        glued = self.chat and not chat  # a chat's template separates the parts
        return Example(
            context=draft.lead + filling + draft.body,
            question="\n\n" * glued + draft.question,
            answers=draft.answers,
            metric=self.metric,
            answer_prefix=" " * glued + draft.answer_prefix,
            chat=chat,
            classes=draft.classes,
            first_line=self.first_line,
            max_new_tokens=self.max_new_tokens,
        )

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The options that can be changed."""
        return tuple(field.name for field in fields(cls) if field.name not in ("name", "title", "measures"))

    @property
    def options(self) -> dict[str, Any]:
        """All options with their values."""
        return {name: getattr(self, name) for name in self.option_names()}

    @property
    def path(self) -> str:
        """The file on this machine that it reads, or nothing."""
        return ""

    @property
    def spec(self) -> str:
        """The task as a short string; `kvviz.tasks.parse` makes it again."""
        from kvviz.tasks.registry import TASKS

        usual = TASKS[self.name].options
        changed = [f"{key}={value}" for key, value in self.options.items() if value != usual[key]]
        return self.name + (":" + ",".join(changed) if changed else "")


def require(condition: bool, remedy: str) -> None:
    """Refuse an option that a task cannot work with."""
    if not condition:
        raise TaskError(remedy)
