"""Questions about documents: RULER's two kinds, and LongBench's single document, several documents, and passage retrieval."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from kvviz.tasks.task import Draft, Draw, Task, require
from kvviz.tasks.world import Document, World

_BRIEFLY = "Give only the answer and no other words."


@dataclass(frozen=True, kw_only=True)
class _Reading(Task):
    """Some documents hold the answer, the others have to be there.

    Attributes:
        hops: documents that an answer takes, 1 or 2.
        depth: where the first such document stands, from 0 (start) to 1 (end); None is anywhere.
    """

    hops: int = 1
    depth: float | None = None

    kind: ClassVar[str] = "question answering"
    max_new_tokens: ClassVar[int] = 32

    heading: ClassVar[str]
    """Before every document; {i} is its number."""
    task: ClassVar[str]

    def __post_init__(self) -> None:
        require(self.hops in (1, 2), f"hops is 1 or 2; got {self.hops}.")
        if self.depth is not None:
            require(0 <= self.depth <= 1, f"depth is a number from 0 (start) to 1 (end); got {self.depth}.")

    def draft(self, draw: Draw, size: int) -> Draft:
        """size: documents beside those that are needed."""
        story = _world(draw.key).story(0)
        needed = [story.work, story.maker] if self.hops == 2 else [draw("which").choice([story.work, story.maker])]
        fact = draw("question").choice(needed[0].facts if self.hops == 1 else story.two_hops)
        body, _ = self._lay_out(draw, size, needed)
        return Draft(
            lead=f"{self.task} {_BRIEFLY}\n\n",
            body=body,
            question=f"{self.task} {_BRIEFLY}\n\nQuestion: {fact.question}",
            answers=(fact.answer,),
            answer_prefix=f"Answer: {fact.stem}",
        )

    def _lay_out(self, draw: Draw, size: int, needed: list[Document]) -> tuple[str, int]:
        """The documents one after another, the needed ones at their depths, and the number of the first needed one."""
        world, random = _world(draw.key), draw("depths")
        stories = (world.story(1 + i // 2) for i in range(size))
        documents = [story.work if i % 2 == 0 else story.maker for i, story in enumerate(stories)]
        depths = [random.random() for _ in needed]
        if self.depth is not None:
            depths[0] = self.depth
        for depth, document in sorted(zip(depths, needed, strict=True), key=lambda each: each[0], reverse=True):
            documents.insert(round(depth * len(documents)), document)
        text = "\n\n".join(self.heading.format(i=i) + document.text for i, document in enumerate(documents, 1))
        return text, 1 + documents.index(needed[0])


@lru_cache(maxsize=8)
def _world(key: str) -> World:
    return World(Draw(key, 0)("world"))


@dataclass(frozen=True, kw_only=True)
class RulerQA(_Reading):
    """RULER: numbered documents, and the answer has to occur in the output."""

    family: ClassVar[str] = "RULER"
    metric: ClassVar[str] = "match_part"
    heading: ClassVar[str] = "Document {i}:\n"
    task: ClassVar[str] = "Answer the question from the documents."


@dataclass(frozen=True, kw_only=True)
class OneDocument(_Reading):
    """LongBench: one text without headings."""

    family: ClassVar[str] = "LongBench"
    metric: ClassVar[str] = "qa_f1"
    heading: ClassVar[str] = ""
    task: ClassVar[str] = "Read the handbook and answer the question."


@dataclass(frozen=True, kw_only=True)
class SeveralDocuments(_Reading):
    """LongBench: numbered passages, of which two are needed."""

    hops: int = 2

    family: ClassVar[str] = "LongBench"
    metric: ClassVar[str] = "qa_f1"
    heading: ClassVar[str] = "Passage {i}:\n"
    task: ClassVar[str] = "Answer the question from the passages."


@dataclass(frozen=True, kw_only=True)
class PassageRetrieval(_Reading):
    """LongBench: which paragraph is it that an abstract belongs to?"""

    family: ClassVar[str] = "LongBench"
    kind: ClassVar[str] = "retrieval"
    metric: ClassVar[str] = "retrieval"
    max_new_tokens: ClassVar[int] = 16
    heading: ClassVar[str] = "Paragraph {i}: "

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Hops make no sense here."""
        return ("depth",)

    def draft(self, draw: Draw, size: int) -> Draft:
        """size: other paragraphs."""
        story = _world(draw.key).story(0)
        needed = draw("which").choice([story.work, story.maker])
        body, number = self._lay_out(draw, size, [needed])
        return Draft(
            lead="Here are numbered paragraphs and, after them, an abstract. Find the paragraph that it belongs to.\n\n",
            body=body,
            question=f"The abstract:\n\n{needed.brief}\n\nWhich paragraph does it belong to? Answer with its number, in the form "
            '"Paragraph 1", "Paragraph 2" and so on.',
            answers=(f"Paragraph {number}",),
            answer_prefix="The abstract belongs to Paragraph",
        )


def ruler_documents() -> tuple[Task, ...]:
    """RULER's two settings."""
    return (
        RulerQA(
            name="qa_1",
            title="Question answering, one document",
            measures="Whether a fact of one document survives among other documents.",
        ),
        RulerQA(
            name="qa_2",
            title="Question answering, two documents",
            measures="Whether two documents that belong together survive among others.",
            hops=2,
        ),
    )


def longbench_documents() -> tuple[Task, ...]:
    """Three of LongBench's kinds."""
    return (
        OneDocument(
            name="single_doc_qa",
            title="Single-document question answering",
            measures="Whether a fact survives in one long text, by the words of the answer.",
        ),
        SeveralDocuments(
            name="multi_doc_qa",
            title="Multi-document question answering",
            measures="Whether a fact that takes two passages survives, by the words of the answer.",
        ),
        PassageRetrieval(
            name="passage_retrieval",
            title="Passage retrieval",
            measures="Whether a paragraph is still known well enough to be found by its content.",
        ),
    )
