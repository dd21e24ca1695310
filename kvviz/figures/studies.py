"""Figures of the studies: a study says as plain data what stands on which axis (`Chart`), and this draws it from its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvviz.figures import style

Rows = Sequence[dict[str, Any]]

HEIGHT = 380
WIDEST = 3
"""Panels side by side; further ones go below."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `x` and `y` are columns of the study's rows; rows with the same label and x are averaged, but for points.

    Attributes:
        kind: "lines", "points" or "bars".
        x_title, y_title: with their units.
        where: (column, value) that a row must have to be drawn here.
        reference: (y, what it is): a horizontal line, such as the paper's number.
    """

    x: str
    y: str
    x_title: str
    y_title: str
    kind: str = "lines"
    title: str = ""
    log_x: bool = False
    log_y: bool = False
    where: tuple[str, Any] | None = None
    reference: tuple[float, str] | None = None

    def rows(self, rows: Rows) -> list[dict[str, Any]]:
        """The rows that are drawn here: those that have both values."""
        mine = rows if self.where is None else [row for row in rows if row.get(self.where[0]) == self.where[1]]
        return [row for row in mine if row.get(self.x) is not None and row.get(self.y) is not None]


@dataclass(frozen=True)
class Chart:
    """Panels with one legend; `label` is the column that tells the curves apart (and has its policy in `policy`)."""

    panels: tuple[Panel, ...]
    label: str = "label"
    height: int = HEIGHT


def single(chart: Chart, rows: Rows, number: int, dark: bool = False) -> go.Figure:
    """One panel of a chart alone, with a legend of its own below it, for narrow places."""
    made = figure(replace(chart, panels=(chart.panels[number],)), rows, dark)
    legend = dict(y=-0.22, yanchor="top", font=dict(size=12))
    return style.layout(made, dark, height=chart.height + 60, margin=dict(t=36), legend=legend)


def figure(chart: Chart, rows: Rows, dark: bool = False) -> go.Figure:
    """All panels of a chart, with one legend."""
    columns = 2 if len(chart.panels) == 4 else min(len(chart.panels), WIDEST)
    lines = -(-len(chart.panels) // columns)
    titles = [panel.title for panel in chart.panels]
    made = make_subplots(lines, columns, subplot_titles=titles, horizontal_spacing=0.09, vertical_spacing=0.16)
    looks = style.looks({row[chart.label]: row.get("policy", "") for row in rows}, dark)
    shown: set[str] = set()
    for number, panel in enumerate(chart.panels):
        place = number // columns + 1, number % columns + 1
        for trace in _traces(chart, panel, rows, looks, dark):
            trace.showlegend = trace.name not in shown
            shown.add(trace.name)
            made.add_trace(trace, *place)
        log = {"type": "log"}
        made.update_xaxes(title_text=panel.x_title, **(log if panel.log_x else {}), row=place[0], col=place[1])
        made.update_yaxes(title_text=panel.y_title, **(log if panel.log_y else {}), row=place[0], col=place[1])
        if panel.reference is not None:
            _mark(made, panel.reference, place, dark)
    made.update_annotations(font=dict(size=13))
    return style.layout(
        made,
        dark,
        height=chart.height * lines,
        hovermode="closest",
        margin=dict(t=60, b=8, l=8, r=8),
        legend=dict(y=1.12 if lines == 1 else 1.06),
    )


def _traces(
    chart: Chart, panel: Panel, rows: Rows, looks: dict[str, style.Look], dark: bool
) -> Iterator[go.Scatter | go.Bar]:
    mine = panel.rows(rows)
    for label, look in looks.items():
        points = [(row[panel.x], float(row[panel.y])) for row in mine if row[chart.label] == label]
        if not points:
            continue
        if panel.kind != "points":
            points = means(points)
        x, y = zip(*points, strict=True)
        common = dict(
            x=x,
            y=y,
            name=escape(str(label)),
            legendgroup=str(label),
            hovertemplate=f"{escape(str(label))}<br>{panel.x_title}: %{{x}}<br>{panel.y_title}: %{{y:.3g}}<extra></extra>",
        )
        marker = dict(symbol=look.symbol, size=9 if panel.kind == "points" else 6, color=look.colour)
        if panel.kind == "bars":
            yield go.Bar(**common, marker=dict(color=look.colour))
        elif panel.kind == "points":
            marker["line"] = dict(color=style.paper(dark), width=1)
            yield go.Scatter(**common, mode="markers", marker=marker)
        else:
            line = dict(color=look.colour, width=2, dash=look.dash)
            yield go.Scatter(**common, mode="lines+markers", marker=marker, line=line)


def means(points: Sequence[tuple[Any, float]]) -> list[tuple[Any, float]]:
    """(x, y) pairs -> one for each x, in the order of x where it is a number, with the mean of its y."""
    found: dict[Any, list[float]] = {}
    for x, y in points:
        found.setdefault(x, []).append(y)
    order = sorted(found) if all(isinstance(x, int | float) for x in found) else list(found)
    return [(x, sum(found[x]) / len(found[x])) for x in order]


def _mark(made: go.Figure, reference: tuple[float, str], place: tuple[int, int], dark: bool) -> None:
    value, words = reference
    made.add_hline(
        y=value,
        line=dict(color=style.muted(dark), width=1, dash="dot"),
        annotation_text=words,
        annotation_font=dict(size=11, color=style.muted(dark)),
        row=place[0],
        col=place[1],
    )
