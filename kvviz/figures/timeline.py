"""How far each policy is from the full cache, step by step along the full cache's own words.

At every step all policies have read the same words (teacher forcing), so that what differs is the cache and not the story.
"""

from __future__ import annotations

from html import escape

import numpy as np
import plotly.graph_objects as go

from kvviz.figures.style import colour, dash, layout, muted, number, symbol, tint
from kvviz.runs import Row, Run

FLOOR = 1e-6
"""Smallest divergence on the log axis, in nats; what is below it is drawn there."""

ALL_WORDS = 72
"""Up to so many words all stand on the axis; of more, evenly spaced ones."""


def kl_timeline(run: Run, dark: bool = False) -> go.Figure:
    """KL(full cache || policy) in nats at every step, one line a policy, on a log axis."""
    reference = run.reference
    rows = [row for row in run.rows if row is not reference and row.kl]
    figure = go.Figure([_line(row, reference, position, dark) for position, row in enumerate(rows)])
    words = [visible(piece) for piece in reference.pieces[: len(reference.kl)]]
    every = max(1, -(-len(words) // ALL_WORDS))
    layout(figure, dark, height=340, hovermode="closest", margin={"l": 8, "r": 8, "t": 36, "b": 8})
    figure.update_xaxes(
        tickmode="array",
        tickvals=list(range(0, len(words), every)),
        ticktext=[escape(word) for word in words[::every]],
        tickangle=-90,
        tickfont={"family": "ui-monospace, monospace", "size": 11, "color": muted(dark)},
        range=[-0.6, len(words) - 0.4],
        showgrid=False,
        title=None,
    )
    figure.update_yaxes(
        type="log",
        title="KL to the full cache, nats",
        range=[np.log10(FLOOR) - 0.15, _top(rows)],
        dtick=1,
        exponentformat="power",
    )
    return figure


def visible(piece: str) -> str:
    """A token as an axis label: white space made visible, nothing longer than the axis can hold."""
    text = piece.replace("\n", "↵").replace("\t", "⇥").strip(" ") or "·"
    return text if len(text) <= 14 else text[:13] + "…"


def _line(row: Row, reference: Row, position: int, dark: bool) -> go.Scatter:
    ink = colour(row.policy, dark)
    return go.Scatter(
        x=np.arange(len(row.kl)),
        y=np.maximum(np.asarray(row.kl, dtype=np.float32), FLOOR),
        name=row.label,
        mode="lines+markers",
        line={"color": ink, "width": 2, "dash": dash(row.policy)},
        marker={"size": 6, "symbol": symbol(row.policy), "color": tint(ink, 0.0), "line": {"width": 0}},
        text=[_hover(row, reference, step) for step in range(len(row.kl))],
        hovertemplate="%{text}<extra></extra>",
        legendrank=position,
    )


def _hover(row: Row, reference: Row, step: int) -> str:
    word = reference.pieces[step] if step < len(reference.pieces) else ""
    lines = [
        f"<b>{escape(row.label)}</b>, token {step + 1}, {_quoted(word)}",
        f"KL {number(row.kl[step])} nats",
        f"full cache: {_top_words(reference, step)}",
        f"{escape(row.label)}: {_top_words(row, step)}",
    ]
    return "<br>".join(lines)


def _top_words(row: Row, step: int) -> str:
    if step >= len(row.top):
        return "no value"
    return ", ".join(f"{_quoted(text)} {100 * chance:.0f}%" for text, chance in row.top[step])


def _quoted(text: str) -> str:
    return "“" + escape(text.replace("\n", "↵")) + "”"


def _top(rows: list[Row]) -> float:
    largest = max((max(row.kl) for row in rows), default=1.0)
    return float(np.log10(max(largest, 1e-2)) + 0.25)
