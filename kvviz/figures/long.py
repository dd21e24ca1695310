"""A long generation while entries are evicted: what each policy holds step by step, which positions those are, and how far it
is from the full cache. All of it can be drawn while the run is going on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvviz.figures import style
from kvviz.figures.timeline import FLOOR
from kvviz.runs import Row

MIB = 2**20

SMOOTH = 15
"""Steps over which the thick line of the divergence is averaged (on the log scale)."""

ACROSS = 3
"""Rasters side by side."""


def memory(rows: Sequence[Row], steps: int, dark: bool = False) -> go.Figure:
    """Entries a head, and MiB of keys, values and moment statistics, when each token was chosen; row 0 is the full cache."""
    figure = make_subplots(1, 2, horizontal_spacing=0.09, subplot_titles=("entries a head", "memory in MiB"))
    looks = style.looks({row.label: row.policy for row in rows}, dark)
    for row in rows:
        sizes = np.asarray(list(row.bytes_by_step), dtype=np.float64) + row.moments_bytes
        for column, (values, unit) in enumerate(
            ((row.entries_by_step, "entries a head"), (sizes / MIB, "MiB")), start=1
        ):
            values = np.asarray(list(values), dtype=np.float32)
            figure.add_trace(
                go.Scatter(
                    x=np.arange(1, len(values) + 1),
                    y=values,
                    name=row.label,
                    legendgroup=row.label,
                    showlegend=column == 1,
                    mode="lines",
                    line=dict(color=looks[row.label].colour, width=2, dash=looks[row.label].dash),
                    hovertemplate=f"token %{{x:,}}: %{{y:,.4g}} {unit}",
                ),
                1,
                column,
            )
    style.layout(figure, dark, height=300, hovermode="x unified", margin=dict(l=8, r=8, t=64, b=8))
    figure.update_layout(legend=dict(y=1.14))
    figure.update_annotations(font=dict(size=13, color=style.muted(dark)))
    figure.update_xaxes(title="token written", range=[0, steps + 1])
    figure.update_yaxes(rangemode="tozero")
    return figure


def divergence(rows: Sequence[Row], steps: int, dark: bool = False) -> go.Figure:
    """KL(full cache || policy) in nats along the full cache's own words: every step thin, the running mean thick."""
    figure = go.Figure()
    looks = style.looks({row.label: row.policy for row in rows}, dark)
    for row in rows[1:]:
        values = np.maximum(np.asarray(list(row.kl), dtype=np.float32), FLOOR)
        x, look = np.arange(1, len(values) + 1), looks[row.label]
        figure.add_trace(
            go.Scatter(
                x=x,
                y=values,
                mode="lines",
                line=dict(color=style.transparent(look.colour, 0.35), width=1),
                legendgroup=row.label,
                showlegend=False,
                hoverinfo="skip",
            )
        )
        figure.add_trace(
            go.Scatter(
                x=x,
                y=running_mean(values),
                name=row.label,
                legendgroup=row.label,
                mode="lines",
                line=dict(color=look.colour, width=2.5, dash=look.dash),
                customdata=values,
                hovertemplate="KL %{customdata:.2g} nats, running mean %{y:.2g}",
            )
        )
    top = max((max(list(row.kl), default=0.1) for row in rows[1:]), default=0.1)
    style.layout(figure, dark, height=300, hovermode="x unified", margin=dict(l=8, r=8, t=36, b=8))
    figure.update_xaxes(title="token written", range=[0, steps + 1])
    low = np.log10(FLOOR) - 0.15
    high = np.log10(max(top, 0.1)) + 0.25
    figure.update_yaxes(
        type="log", title="KL to the full cache, nats", range=[low, high], dtick=1, exponentformat="power"
    )
    return figure


def running_mean(values: np.ndarray, width: int = SMOOTH) -> np.ndarray:
    """Geometric mean of each value and up to `width` - 1 before it."""
    sums = np.cumsum(np.concatenate(([0.0], np.log(values.astype(np.float64)))))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return np.exp((sums[ends] - sums[starts]) / (ends - starts)).astype(np.float32)


def raster(rows: Sequence[Row], prompt: int, question: int, steps: int, dark: bool = False) -> go.Figure:
    """Which part of the sequence is held while it grows: steps to the right, positions downwards, one map a policy.

    Args:
        rows: with the full cache first, which has no map.
        prompt, question: tokens of the prompt, and of what was read after eviction.
        steps: tokens that are written in all.
    """
    shown = [row for row in rows[1:] if row.raster]
    across = min(max(len(shown), 1), ACROSS)
    down = -(-max(len(shown), 1) // across)
    total = prompt + question + steps
    figure = make_subplots(
        down,
        across,
        shared_xaxes=True,
        shared_yaxes=True,
        subplot_titles=[row.label for row in shown],
        horizontal_spacing=0.03,
        vertical_spacing=0.14 / down,
    )
    for number, row in enumerate(shown):
        place = dict(row=number // across + 1, col=number % across + 1)
        figure.add_trace(_held(row, prompt + question, total, number == len(shown) - 1, down, dark), **place)
    style.layout(figure, dark, height=90 + 330 * down, margin=dict(l=8, r=8, t=34, b=8))
    figure.update_annotations(font=dict(size=13, color=style.ink(dark)))
    for at, words in ((prompt, "the prompt ends"), (prompt + question, "" if not question else "the question ends")):
        if words:
            figure.add_hline(y=at, line=dict(color=style.ink(dark), width=1.2, dash="dash" if at == prompt else "dot"))
    figure.update_xaxes(range=[0, steps + 1], showgrid=False, zeroline=False)
    figure.update_xaxes(title="token written", row=down)
    figure.update_yaxes(range=[total, 0], showgrid=False, zeroline=False, tickformat=",")
    figure.update_yaxes(title="position", col=1)
    return figure


def _held(row: Row, start: int, total: int, scale: bool, down: int, dark: bool) -> go.Heatmap:
    """The map of one row. What is not written yet stays empty."""
    steps, shares = list(row.raster_steps), list(row.raster)
    count = min(len(steps), len(shares))
    steps, shares = np.asarray(steps[:count]), np.asarray(shares[:count], dtype=np.float32)
    bins = shares.shape[1]
    width = total / bins
    middles = (np.arange(bins) + 0.5) * width
    future = np.arange(bins)[None] * width > (start + steps[:, None])
    shares = np.where(future, np.nan, 100 * shares)
    bar = dict(
        title=dict(text="held by,<br>% of heads", side="top", font=dict(size=12)),
        thickness=10,
        outlinewidth=0,
        len=0.9 / down,
        y=1,
        yanchor="top",
    )
    return go.Heatmap(
        x=steps + 1,
        y=middles.astype(np.float32),
        z=shares.T,
        zmin=0,
        zmax=100,
        colorscale=style.SEQUENTIAL,
        showscale=scale,
        colorbar=bar,
        hoverongaps=False,
        hovertemplate="token %{x:,} written, position %{y:,.0f}<br>%{z:.0f}% of heads hold it<extra></extra>",
    )


def memory_alt(rows: Sequence[Row]) -> str:
    """What the two curves show, in a sentence."""
    parts = [f"{row.label} {row.entries_by_step[-1]:,.0f}" for row in rows if row.entries_by_step]
    return f"Entries a head and MiB at every token written; at the end in entries a head: {', '.join(parts)}."


def divergence_alt(rows: Sequence[Row]) -> str:
    """What the divergence shows, in a sentence."""
    parts = [f"{row.label} {style.number(row.mean_kl)}" for row in rows[1:] if row.kl]
    return f"KL divergence to the full cache at every token of its own output; mean in nats: {', '.join(parts) or 'none yet'}."


def facts(rows: Sequence[Row]) -> list[tuple[str, str, list[str]]]:
    """The end of it in numbers: what, its unit, and the value of every row."""

    def line(name: str, unit: str, value, only=lambda row: True):
        return name, unit, [value(row) if only(row) else "" for row in rows]

    others = lambda row: row is not rows[0]  # noqa: E731
    held = lambda row: bool(row.entries_by_step)  # noqa: E731
    return [
        line("written", "tokens", lambda row: f"{len(row.token_ids):,}"),
        line("held at the end", "entries a head", lambda row: f"{row.entries_by_step[-1]:,.0f}", held),
        line("held at most", "entries a head", lambda row: f"{max(row.entries_by_step):,.0f}", held),
        line(
            "memory at the end",
            "MiB",
            lambda row: style.number((row.bytes_by_step[-1] + row.moments_bytes) / MIB, 3),
            held,
        ),
        line("mean KL", "nats", lambda row: style.number(row.mean_kl), others),
        line(
            "first difference",
            "token",
            lambda row: "none" if row.first_difference is None else f"{row.first_difference + 1:,}",
            others,
        ),
        line("speed", "tokens/s", lambda row: style.number(row.tokens_per_second, 3)),
    ]
