"""Plain text to read on, without a question: how well what is kept predicts the words that really follow."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from kvviz.prompts import read_text
from kvviz.tasks.fit import TooSmall, largest
from kvviz.tasks.task import Draft, Draw, Example, Task, TaskError, require
from kvviz.tasks.texts import essays


@dataclass(frozen=True, kw_only=True)
class Passage(Task):
    """A text, cut in two: the first part is read and evicted, the second is what really follows.

    Attributes:
        file: a text in UTF-8; by default the essays. Each seed begins with a sentence of its own, and after the end comes the
            beginning.
        follow: "text": every policy reads what really follows, and its loss is measured. "output": every policy continues the
            text by itself, as it would with a question.
        words: of the continuation that is read.
    """

    file: str = ""
    follow: str = "text"
    words: int = 96

    family: ClassVar[str] = "text"
    kind: ClassVar[str] = "continuation"
    metric: ClassVar[str] = ""
    max_new_tokens: ClassVar[int] = 64
    chat: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.follow in ("text", "output"), f"follow is text or output; got {self.follow!r}.")
        require(1 <= self.words <= 10_000, f"words is a number from 1 to 10,000; got {self.words}.")

    @property
    def path(self) -> str:
        """See Task."""
        return self.file

    def draft(self, draw: Draw, size: int) -> Draft:
        """size: words after the first."""
        return Draft("", "".join(self._pieces(draw)[: size + 1]), "", ())

    def make(self, seed: int, n_tokens: int, tokenizer) -> Example:
        """The text of a seed: a context of `n_tokens` tokens or a little less, and what follows it."""
        pieces = self._pieces(Draw(self.name, seed))
        try:
            size = 1 + largest(lambda more: _tokens(tokenizer, pieces[: more + 1]), n_tokens, len(pieces) - 1)
        except TooSmall as error:
            raise TaskError(f"{self.spec} needs at least {error.least} tokens; {n_tokens} were asked for.") from None
        end = size + self.words
        require(
            end <= len(pieces),
            f"{self.file or 'The essays'} hold {len(pieces):,} words, but {n_tokens:,} tokens and what follows them take more. "
            "Ask for fewer, or give a longer text: text:FILE.",
        )
        continuation = "".join(pieces[size:end]) if self.follow == "text" else ""
        return Example(
            "".join(pieces[:size]), chat=False, max_new_tokens=self.max_new_tokens, continuation=continuation
        )

    def _pieces(self, draw: Draw) -> list[str]:
        """All words of the text, each with the white space before it, from the sentence that the seed begins with."""
        text = _read(self.file) if self.file else "\n\n".join(essays())
        pieces = re.findall(r"\s*\S+", text)
        starts = [0, *(i for i in range(1, len(pieces)) if pieces[i - 1][-1] in ".?!")]
        start = draw("start").choice(starts)
        turned = [*pieces[start:], "\n\n" + pieces[0], *pieces[1:start]] if start else pieces
        return [turned[0].lstrip(), *turned[1:]]


def _tokens(tokenizer, pieces: list[str]) -> int:
    return len(tokenizer("".join(pieces))["input_ids"])


@lru_cache(maxsize=4)
def _read(file: str) -> str:
    try:
        return read_text(Path(file).expanduser().read_bytes()).strip()
    except OSError as error:
        raise TaskError(f"{file} cannot be read ({error.strerror}). Give a text file in UTF-8.") from None


def passage_tasks() -> tuple[Task, ...]:
    """The one kind that needs no labels."""
    return (
        Passage(
            name="text",
            title="Text that goes on",
            measures="The loss on the words that really follow a text, in nats a token.",
        ),
    )
