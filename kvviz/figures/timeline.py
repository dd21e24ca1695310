"""How far each policy is from the full cache, step by step along the full cache's own words.

At every step all policies have read the same words (teacher forcing), so that what differs is the cache and not the story.
"""

from __future__ import annotations

from html import escape

import numpy as np
import plotly.graph_objects as go

from kvviz.figures.style import colour, dash, layout, muted, number, symbol
from kvviz.runs import Row, Run

FLOOR = 1e-6
"""Smallest divergence on the log axis, in nats; what is below it is drawn there."""

ALL_WORDS = 72
"""Up to so many words all stand on the axis; of more, evenly spaced ones."""


AGAIN = ("3px,3px", "9px,4px", "1px,4px", "14px,5px")
"""Dashes of further settings of a method that is in the figure already."""


def kl_timeline(run: Run, dark: bool = False) -> go.Figure:
    """KL(full cache || policy) in nats at every step, one line a policy, on a log axis."""
    reference = run.reference
    rows = [row for row in run.rows if row is not reference and row.kl]
    names = [row.policy for row in rows]
    again = [names[:position].count(name) for position, name in enumerate(names)]
    figure = go.Figure([_line(row, reference, n, dark) for row, n in zip(rows, again, strict=True)])
    words = [visible(piece) for piece in reference.pieces[: len(reference.kl)]]
    if reference.finish == "end" and words:
        words[-1] = "end"
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
        range=_decades(rows),
        dtick=1,
        exponentformat="power",
    )
    return figure


def visible(piece: str) -> str:
    """A token as an axis label: white space made visible, nothing longer than the axis can hold."""
    text = piece.replace("\n", "↵").replace("\t", "⇥").strip(" ") or "·"
    return text if len(text) <= 14 else text[:13] + "…"


def _line(row: Row, reference: Row, again: int, dark: bool) -> go.Scatter:
    """One policy's line; `again` counts the lines before it of the same method, which get another dash and open markers."""
    ink = colour(row.policy, dark)
    return go.Scatter(
        x=np.arange(len(row.kl)),
        y=np.maximum(np.asarray(row.kl, dtype=np.float32), FLOOR),
        name=escape(row.label),
        mode="lines+markers",
        line={"color": ink, "width": 2, "dash": AGAIN[min(again, len(AGAIN)) - 1] if again else dash(row.policy)},
        marker={
            "size": 7,
            "symbol": symbol(row.policy) + ("-open" if again else ""),
            "color": ink,
            "line": {"width": 1.5, "color": ink},
        },
        text=[_hover(row, reference, step) for step in range(len(row.kl))],
        hovertemplate="%{text}<extra></extra>",
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


def _decades(rows: list[Row]) -> list[float]:
    """The log axis' range: from a little below the smallest divergence to a little above the largest, two decades at least."""
    values = np.maximum(np.concatenate([row.kl for row in rows]) if rows else np.array([1.0]), FLOOR)
    low, high = np.log10(values.min()) - 0.2, np.log10(values.max()) + 0.2
    return [float(min(low, high - 2)), float(high)]
