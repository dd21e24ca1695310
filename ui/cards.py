"""The cards of the page Compare: a policy's name, its text with the first difference marked, and a line of facts.

Rows may still be growing: the worker appends to them while we read. All cards are one piece of HTML, so that nothing moves while
the text streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvviz.experiment import Experiment
from kvviz.figures.style import number
from kvviz.memory import words
from kvviz.policies import METHODS
from kvviz.runs import Row
from ui.html import both


def cards(rows: Sequence[Row], active: bool = False) -> str:
    """A grid of cards, the first row being the full cache's."""
    inner = "".join(_card(row, rows[0], active) for row in rows)
    return f'<div class="kv-cards kv-n{len(rows)}" role="list">{inner}</div>'


def waiting(experiment: Experiment) -> list[Row]:
    """Rows without text, for the cards that stand where the output will be."""
    labels = [("full", METHODS["full"].title), *((p.name, p.label) for p in experiment.policies)]
    return [Row(name, label, experiment.budget) for name, label in labels]


def so_far(rows: Sequence[Row], experiment: Experiment) -> list[Row]:
    """The rows that are there, and empty ones for those to come, so that every card has its place from the start."""
    return [*rows, *waiting(experiment)[len(rows) :]]


def _card(row: Row, reference: Row, active: bool) -> str:
    title = METHODS[row.policy].title if row.policy in METHODS else row.policy
    options = row.label.removeprefix(title).strip(" ()")
    detail = f'<span class="kv-options">{escape(options)}</span>' if options else ""
    return (
        f'<article class="kv-card" role="listitem" data-policy="{escape(row.policy)}" style="--kv-c:{both(row.policy)}">'
        f'<header><span class="kv-dot"></span><b>{escape(title)}</b>{detail}</header>'
        f'<div class="kv-text">{tokens(row, first_difference(row, reference, active))}{_end(row, active)}</div>'
        f"<footer>{facts(row, row is reference, active)}</footer></article>"
    )


def tokens(row: Row, first: int | None) -> str:
    """The text token by token: the first that differs is boxed, what follows it tinted."""
    parts = []
    for index, piece in enumerate(readable(row)):
        text = escape(piece.lstrip() if index == 0 else piece)
        if first is not None and index == first:
            text = f'<mark class="kv-first" title="The first token that differs from the full cache">{text or "&nbsp;"}</mark>'
        elif first is not None and index > first:
            text = f'<span class="kv-after">{text}</span>'
        parts.append(text)
    if first is not None and first >= len(row.pieces):
        parts.append('<mark class="kv-first" title="It ends here; the full cache goes on">end</mark>')
    return "".join(parts)


def readable(row: Row) -> list[str]:
    """The pieces of a text as people read them: a character that several tokens make up stands with the first of them, and
    the token that ends the answer is empty."""
    pieces = list(row.pieces)
    if row.finish == "end" and pieces:
        pieces[-1] = ""
    if not any("\ufffd" in piece for piece in pieces):
        return pieces
    text, at, index = row.text, 0, 0
    while index < len(pieces):
        if "\ufffd" not in pieces[index]:
            at += len(pieces[index])
            index += 1
            continue
        end = next((i for i in range(index, len(pieces)) if "\ufffd" not in pieces[i]), len(pieces))
        stop = text.find(pieces[end], at) if end < len(pieces) and pieces[end] else len(text)
        pieces[index:end] = [text[at : max(stop, at)], *[""] * (end - index - 1)]
        at, index = max(stop, at), end
    return pieces


def first_difference(row: Row, reference: Row, active: bool) -> int | None:
    """Index of the first token that differs from the full cache's; while they write, among the tokens that both have."""
    if row is reference:
        return None
    if not active and row.kl:
        return row.first_difference
    pairs = zip(list(row.token_ids), list(reference.token_ids), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def _end(row: Row, active: bool) -> str:
    if row.finish == "end":
        return '<span class="kv-end" title="The model ended its answer">&#9632;</span>'
    return '<span class="kv-caret"></span>' if active and not row.finish else ""


def facts(row: Row, is_reference: bool, active: bool) -> str:
    """What a row kept, how far it is from the full cache, and how fast it was."""
    if not row.bytes:
        return "waiting" if active else "not run"
    parts = [f"{entries(row)} entries a head", words(row.bytes)]
    if not is_reference and row.mean_kl is not None and not active:
        parts.append(f"mean KL {number(row.mean_kl)} nats")
        first = row.first_difference
        parts.append("same tokens" if first is None else f"differs from token {first + 1}")
    if row.token_ids:
        parts.append(f"{row.tokens_per_second:.3g} tokens/s")
    return "".join(f"<span>{escape(part)}</span>" for part in parts)


def entries(row: Row) -> str:
    """Entries a head, a mean: with one digit where it is no whole number."""
    return f"{row.entries:,.0f}" if abs(row.entries - round(row.entries)) < 0.05 else f"{row.entries:,.1f}"
