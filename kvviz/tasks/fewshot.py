"""Two of LongBench's kinds in plain text: classification by example, and the next line of code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from kvviz.tasks.task import Draft, Draw, Task
from kvviz.tasks.texts import noise, words

_QUESTIONS = {
    "Person": (
        "Who painted the {a} {n}?",
        "What was the name of the woman who found the {a} {n}?",
        "Which sailor first described a {a} {n}?",
        "Who sold the {a} {n} to the museum?",
    ),
    "Place": (
        "Where can a {a} {n} be seen today?",
        "In which valley was the {a} {n} dug up?",
        "What town is famous for its {a} {n}?",
        "Where do people go to hear of the {a} {n}?",
    ),
    "Time": (
        "When was the {a} {n} lost?",
        "In what year did the {a} {n} return?",
        "On which day is the {a} {n} carried through the streets?",
        "How long ago was the {a} {n} made?",
    ),
    "Quantity": (
        "How many people looked after the {a} {n}?",
        "How much does a {a} {n} weigh?",
        "How far was the {a} {n} carried?",
        "What did a {a} {n} cost at the fair?",
    ),
    "Reason": (
        "Why is the {a} {n} kept under glass?",
        "What made the council hide the {a} {n}?",
        "For what reason was the {a} {n} repaired twice?",
        "Why do children fear the {a} {n}?",
    ),
    "Meaning": (
        "What is a {a} {n}?",
        "What does the word for a {a} {n} mean in the old tongue?",
        "How would you describe a {a} {n}?",
        "What does a {a} {n} stand for in the songs?",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """The type of a question, after many examples of questions with their types."""

    family: ClassVar[str] = "LongBench"
    kind: ClassVar[str] = "few-shot classification"
    metric: ClassVar[str] = "classification"
    max_new_tokens: ClassVar[int] = 8
    chat: ClassVar[bool] = False
    first_line: ClassVar[bool] = True

    def draft(self, draw: Draw, size: int) -> Draft:
        """size: examples."""
        random = draw("questions")
        asked, right = _question(random)
        shown = []
        while len(shown) < size:
            question, label = _question(random)
            if question != asked:
                shown.append(f"Question: {question}\nType: {label}\n")
        return Draft(
            lead="Find the type of the last question. Here are questions with their types.\n\n",
            body="\n".join(shown),
            question=f"\nQuestion: {asked}\nType:",
            answers=(right,),
            classes=tuple(_QUESTIONS),
        )


def _question(random) -> tuple[str, str]:
    label = random.choice(tuple(_QUESTIONS))
    form = random.choice(_QUESTIONS[label])
    question = form.format(a=random.choice(words("adjectives")), n=random.choice(words("nouns")))
    return re.sub(r"\ba (?=[aeiou])", "an ", question), label


@dataclass(frozen=True, kw_only=True)
class Code(Task):
    """The next line of a program, which needs a constant that was defined in another file, far above."""

    family: ClassVar[str] = "LongBench"
    kind: ClassVar[str] = "code completion"
    metric: ClassVar[str] = "edit_similarity"
    max_new_tokens: ClassVar[int] = 24
    chat: ClassVar[bool] = False

    report: ClassVar[int] = 2
    """Functions in the last file before the one whose line is asked for: they show the pattern."""

    def draft(self, draw: Draw, size: int) -> Draft:
        """size: files beyond those that the last one needs."""
        names, constants = list(words("nouns")), [f"{a}_{b}" for a, b in product(_STEMS, words("adjectives"))]
        draw("names").shuffle(names)
        draw("constants").shuffle(constants)
        random = draw("limits")
        files = []
        for i in range(self.report + 1 + size):
            name = names[i % len(names)] + ("" if i < len(names) else str(i // len(names)))
            files.append((name, constants[i % len(constants)].upper(), random.randrange(10, 1000)))
        used = files[: self.report + 1]
        draw("order").shuffle(files)
        *shown, (asked, constant, _) = used
        functions = [f"def {name}_left({name}):\n    return {limit} - {name}\n" for name, limit, _ in shown]
        return Draft(
            lead="# Complete the last function.\n\n",
            body="\n\n".join(_file(*each) for each in files) + "\n",
            question="\n\n# file: report.py\n\n" + "\n\n".join([*functions, f"def {asked}_left({asked}):"]),
            answers=(f"    return {constant} - {asked}",),  # after a line break, which the metric leaves out
        )

    def filling(self, words: int) -> str:
        """Comment lines."""
        said = noise(words).split()
        lines = [" ".join(said[i : i + 12]) for i in range(0, len(said), 12)]
        return "".join(f"# {line}\n" for line in lines) + "\n"


_STEMS = ("limit", "store", "quota", "bound")


def _file(name: str, constant: str, value: int) -> str:
    return (
        f'# file: {name}.py\n\n"""Counting: {name}."""\n\n{constant} = {value}\n\n\n'
        f"def {name}_full({name}):\n    return {name} >= {constant}\n"
    )


def fewshot_tasks() -> tuple[Task, ...]:
    """LongBench's kinds, as they are set here."""
    return (
        Classification(
            name="few_shot_classification",
            title="Few-shot classification",
            measures="Whether a pattern that many examples share survives the loss of most of them.",
        ),
        Code(
            name="code_completion",
            title="Code completion",
            measures="Whether a definition far above can still be used, by the similarity of the line with the right one.",
        ),
    )
