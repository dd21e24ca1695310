"""A kind of LongBench's: a summary. The minutes of a meeting, long on discussion; the reference says what was decided."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice, product
from typing import ClassVar

from kvviz.tasks import texts
from kvviz.tasks.task import Draft, Draw, Task, require

_PLACES = (
    "the market square",
    "the harbour wall",
    "the upper school",
    "the old mill",
    "the bus station",
    "the north meadow",
    "the town library",
    "the fire house",
    "the swimming bath",
    "the weir",
    "the cemetery chapel",
    "the post office",
    "the sports ground",
    "the cattle market",
    "the town hall",
    "the ferry landing",
)
_MATTERS = (  # what is discussed, and what is decided
    ("the roof of {place}", "repair the roof of {place} for {n} crowns"),
    ("lamps at {place}", "put up {n} lamps at {place}"),
    ("the trees beside {place}", "plant {n} lime trees beside {place}"),
    ("parking near {place}", "mark {n} parking spaces near {place}"),
    ("the heating of {place}", "lower the heating of {place} by {n} per cent"),
    ("benches for {place}", "buy {n} benches for {place}"),
    ("the paint of {place}", "have {place} painted within {n} weeks"),
    ("the fence around {place}", "renew {n} metres of fence around {place}"),
)
_SPEAKERS = (
    "Councillor Amsel",
    "Councillor Brandt",
    "Councillor Corvin",
    "Councillor Dahl",
    "Councillor Ebner",
    "the mayor",
    "the treasurer",
)
_REMARKS = (
    "{who} recalled that the question of {matter} had been raised in the spring and put aside for want of figures.",
    "{who} asked who would pay, and was told that the reserve would bear it for one year.",
    "{who} had walked past on Sunday and found things worse than they had been described.",
    "{who} said that the neighbouring town had spent twice as much and had less to show for it.",
    "{who} warned against doing half of the work now and the other half when prices had risen.",
    "{who} read out a letter by four residents, who asked for quiet during the afternoon.",
    "{who} thought that volunteers might be found, as they had been for the festival.",
    "{who} wished to see a second offer before anything was signed.",
    "{who} pointed out that {matter} had been on every list since the flood.",
    "{who} doubted the estimate, which had left out the carting of rubble.",
    "{who} thanked the building office for its patience and for the drawings.",
    "{who} spoke for ten minutes, at the end of which the chair asked for brevity.",
    "{who} was in favour, provided that the work stopped during the harvest.",
    "{who} wondered whether the matter belonged to the county rather than to the town.",
    "{who} offered to speak with the owners, who had always been reasonable.",
    "{who} moved that the discussion be closed, and was asked to wait.",
)


@dataclass(frozen=True, kw_only=True)
class Minutes(Task):
    """Sum up what a council decided.

    Attributes:
        decisions: matters that are decided; all others are put off.
    """

    decisions: int = 3

    family: ClassVar[str] = "LongBench"
    kind: ClassVar[str] = "summary"
    metric: ClassVar[str] = "rouge_l"
    max_new_tokens: ClassVar[int] = 96

    remarks_each: ClassVar[int] = 4
    """Remarks on a matter before the next one is taken up."""

    def __post_init__(self) -> None:
        require(1 <= self.decisions <= 20, f"decisions is a number from 1 to 20; got {self.decisions}.")

    def draft(self, draw: Draw, size: int) -> Draft:
        """size: remarks in all."""
        matters = [
            (matter.format(place=place), decided, place) for (matter, decided), place in product(_MATTERS, _PLACES)
        ]
        draw("matters").shuffle(matters)
        random = draw("numbers")
        decided = [text.format(place=place, n=random.randrange(4, 60)) for _, text, place in matters[: self.decisions]]
        items = max(self.decisions, min(len(matters), size // self.remarks_each))
        agenda = [(matter, f"It was decided to {what}.") for (matter, *_), what in zip(matters, decided, strict=False)]
        agenda += [(matter, "The matter was put off.") for matter, *_ in matters[self.decisions : items]]
        draw("agenda").shuffle(agenda)
        remarks = _remarks(draw, [matter for matter, _ in agenda], size)
        body = "\n\n".join(
            f"{i}. {matter[0].upper()}{matter[1:]}\n{' '.join([*said, end])}"
            for i, ((matter, end), said) in enumerate(zip(agenda, remarks, strict=True), 1)
        )
        *most, last = sorted(decided, key=lambda what: body.index(what))
        return Draft(
            lead="Read the minutes of the town council.\n\n",
            body=body,
            question="Sum up in one sentence everything that the council decided. Leave out the discussion and what was put off.",
            answers=(f"The council decided to {', to '.join(most)}{' and to ' if most else ''}{last}.",),
            answer_prefix="Summary:",
        )

    def filling(self, words: int) -> str:
        """So many names."""
        return f"Present: {', '.join(islice(cycle(texts.words('first_names')), words))}.\n\n"


def _remarks(draw: Draw, matters: list[str], size: int) -> list[list[str]]:
    """`size` remarks, dealt out over the matters in turn."""
    random, made = draw("remarks"), [[] for _ in matters]
    for i in islice(cycle(range(len(matters))), size):
        who = random.choice(_SPEAKERS)
        remark = random.choice(_REMARKS).format(who=who, matter=matters[i])
        made[i].append(remark[0].upper() + remark[1:])
    return made


def minutes_tasks() -> tuple[Task, ...]:
    """LongBench's kind, as it is set here."""
    return (
        Minutes(
            name="summary",
            title="Summary of a meeting",
            measures="Whether the few decisions in a long discussion are still known, by ROUGE-L.",
        ),
    )
