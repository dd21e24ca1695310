"""What a session can ask the host for: frozen requests of plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvviz.engine import Engine
from kvviz.events import Doing, Event
from kvviz.evict import entries_within
from kvviz.host import ModelSpec
from kvviz.policies.policy import Policy
from kvviz.prefill import Progress
from kvviz.state import PromptState


@dataclass(frozen=True)
class Prompt:
    """A text, a question about it, and how they meet.

    Attributes:
        context: the text that is read and evicted.
        question: asked about it; empty to continue the text.
        seen: the question is part of what eviction sees; otherwise it is asked afterwards.
        chat: context and question make one user turn in the model's chat template; otherwise plain text.
        answer: first words of the answer.
    """

    context: str
    question: str = ""
    seen: bool = False
    chat: bool = True
    answer: str = ""

    @property
    def source(self) -> str | list[dict[str, str]]:
        """What `Engine.prefill` takes."""
        return [{"role": "user", "content": self.context}] if self.chat else self.context

    def encode(self, engine: Engine) -> tuple[list[int], str]:
        """The ids that eviction sees, and the tail."""
        return engine.encode(self.source, self.question if self.seen else None, self.answer)

    def prefill(self, engine: Engine, attention_mass: bool = False, progress: Progress | None = None) -> PromptState:
        """Read it, or find it in memory."""
        return engine.prefill(
            self.source,
            attention_mass,
            question=self.question if self.seen else None,
            answer=self.answer if self.seen else "",
            progress=progress,
        )


@dataclass(frozen=True)
class Load:
    """Make a model ready."""

    model: ModelSpec

    def run(self, engine: Engine, progress: Progress) -> Iterator[Event]:
        """Nothing more to do: the host has loaded it."""
        yield Doing(1.0, "Ready")


@dataclass(frozen=True)
class Read:
    """Read a prompt, so that everything that needs only eviction can be looked at."""

    model: ModelSpec
    prompt: Prompt
    attention_mass: bool = False

    def run(self, engine: Engine, progress: Progress) -> Iterator[Event]:
        """Prefill."""
        self.prompt.prefill(engine, self.attention_mass, progress)
        yield Doing(1.0, "Read")


@dataclass(frozen=True)
class Generate:
    """Run policies side by side on a prompt, at `budget` entries a head, or each within `max_bytes` where that is given."""

    model: ModelSpec
    prompt: Prompt
    policies: tuple[Policy, ...]
    budget: int = 256
    max_bytes: int | None = None
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    stop: bool = True
    evict_every: int | None = None

    def run(self, engine: Engine, progress: Progress) -> Iterator[Event]:
        """Prefill, evict, write, compare."""
        wants_mass = any("attention_mass" in p.scorer.needs for p in self.policies)
        state = self.prompt.prefill(engine, wants_mass, progress)
        yield from engine.generate(
            state,
            "" if self.prompt.seen else self.prompt.question,
            self.policies,
            self.budget
            if self.max_bytes is None
            else [entries_within(state, p, self.max_bytes) for p in self.policies],
            self.max_new_tokens,
            temperature=self.temperature,
            seed=self.seed,
            answer="" if self.prompt.seen else self.prompt.answer,
            stop=self.stop,
            evict_every=self.evict_every,
        )
