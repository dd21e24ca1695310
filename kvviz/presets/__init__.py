"""Six written prompts that show different things, each chosen so that the default model answers it from the full cache.

Their texts lie in `texts/`: five were written for kvviz, one is the Apache licence with a number hidden in it. They are
read to the letter: where a question follows plain text, the line breaks before it are part of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvviz.jobs import Prompt

TEXTS = Path(__file__).parent / "texts"


@dataclass(frozen=True)
class Preset:
    """A prompt with a title and one sentence on what to look for; the other fields are those of `Prompt`."""

    name: str
    title: str
    shows: str
    question: str = ""
    answer: str = ""
    chat: bool = True

    @property
    def context(self) -> str:
        """The text."""
        return _read(self.name)

    def prompt(self, seen: bool = False) -> Prompt:
        """As a job takes it."""
        return Prompt(self.context, self.question, seen, self.chat, self.answer)


@cache
def _read(name: str) -> str:
    return (TEXTS / f"{name}.txt").read_text(encoding="utf-8")


_ALL = (
    Preset(
        "needle",
        "Needle in a licence",
        "One sentence that nothing else depends on: does the policy keep its tokens?",
        question="What is the special magic number for Cairo mentioned in the text?",
        answer="The special magic number for Cairo mentioned in the text is",
    ),
    Preset(
        "story",
        "Facts in a story",
        "Many small facts, of which the question needs one: what is kept when everything might matter?",
        question="What is the name of Ilsa's cat?",
        answer="Ilsa's cat is called",
    ),
    Preset(
        "harbour",
        "Look-up in a list",
        "Thirty-six lines of the same form: one has to be found, and its neighbours look just like it.",
        question="The Falcon from",
        chat=False,
    ),
    Preset(
        "reviews",
        "Labels by example",
        "The examples repeat one pattern, so that most of them can go before the answer changes.",
        question="Review: The lid does not close, the steam burns my fingers, and the shop will not take it back.\nSentiment:",
        chat=False,
    ),
    Preset(
        "code",
        "Code to complete",
        "The next function follows the others, but the constant that it needs stands once, at the top.",
        question="\ndef days_to_seconds(days):",
        chat=False,
    ),
    Preset(
        "essay",
        "An essay to continue",
        "Plain text without a question: recent words carry most of it, and errors add up slowly.",
        chat=False,
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}
