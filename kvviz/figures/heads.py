"""The map of all layers and heads, and beside it the spread over each layer's heads."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from kvviz.analysis.views import MEASURES, ErrorMap
from kvviz.figures import style

ROW = 17
"""Height of a layer's row in pixels."""

LEFT = 0.74
"""The map's share of the width."""


def head_map(
    data: ErrorMap, measure: str = "relative_error", dark: bool = False, other: ErrorMap | None = None
) -> go.Figure:
    """Layer x query head, and at the right the median and the quartiles of every layer.

    Over every cell lies a transparent marker with customdata [layer, head]: heatmaps themselves report no clicks.

    Args:
        other: a second policy; the map then shows the first minus the second.
    """
    about = MEASURES[measure]
    values = data[measure] if other is None else data.minus(other)[measure]
    layers, heads = values.shape
    bars = [
        dict(type="line", x0=e - 0.5, x1=e - 0.5, xref="x", y0=-0.5, y1=layers - 0.5, yref="y")
        for e in range(data.groups, heads, data.groups)
    ]
    every = 1 if layers <= 16 else 2 if layers <= 40 else 4
    plain = dict(showgrid=False, zeroline=False, fixedrange=True)
    rows = dict(range=[layers - 0.5, -0.5], tickvals=list(range(0, layers, every)), title=dict(text="layer"), **plain)
    columns = dict(domain=[0, LEFT], dtick=1 if heads <= 16 else 4, title=dict(text="query head"), **plain)
    spread = dict(domain=[LEFT + 0.02, 1], anchor="y", fixedrange=True, nticks=4)
    under = dict(text="by layer", x=(LEFT + 1.02) / 2, xref="paper", y=0, yref="paper", yanchor="top", yshift=-24)
    under |= dict(showarrow=False, font=dict(color=style.muted(dark), size=13))
    return style.draw(
        [
            _heatmap(values, about.signed or other is not None, about.symbol, measure, dark),
            _markers(values, about.title, data, other),
            *_spread(values, dark),
        ],
        dark,
        height=max(340, ROW * layers + 90),
        xaxis=columns,
        xaxis2=spread,
        yaxis=rows,
        shapes=[bar | dict(line=dict(color=style.paper(dark), width=3)) for bar in bars],
        annotations=[under, *_sliding_notes(data)],
        hovermode="closest",
        hoverdistance=-1,
        uirevision=measure,
        showlegend=False,
        margin=dict(t=12, b=8, l=8, r=8),
    )


def limits(values: np.ndarray, signed: bool, measure: str) -> tuple[float, float]:
    """The colour scale's ends: 0 to the largest, or as far below zero as above."""
    top = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    top = max(top, 1e-6)
    if signed:
        top = max(top, 1.0) if measure == "cos" else top
        return -top, top
    return 0.0, top


def _heatmap(values: np.ndarray, signed: bool, symbol: str, measure: str, dark: bool) -> dict:
    low, high = limits(values, signed, measure)
    return dict(
        type="heatmap",
        z=values.astype(np.float32),
        zmin=low,
        zmax=high,
        colorscale=style.diverging(dark) if signed else style.SEQUENTIAL,
        xgap=1,
        ygap=1,
        hoverinfo="skip",
        hoverongaps=False,
        colorbar=dict(
            title=dict(text=symbol, side="top"),
            orientation="h",
            thickness=10,
            len=LEFT,
            x=0,
            xanchor="left",
            y=1.01,
            yanchor="bottom",
            outlinewidth=0,
            ticklabelposition="outside top",
            nticks=5,
        ),
    )


def _markers(values: np.ndarray, title: str, data: ErrorMap, other: ErrorMap | None) -> dict:
    layer, head = np.indices(values.shape).reshape(2, -1)
    shown = [f"{style.number(v)}" for v in values.ravel()]
    what = title if other is None else f"{title}: {data.label} minus {other.label}"
    return dict(
        type="scatter",
        x=head.astype(np.int32),
        y=layer.astype(np.int32),
        mode="markers",
        marker=dict(symbol="square", size=ROW - 1, color="rgba(0,0,0,0)", line=dict(width=0)),
        selected=dict(marker=dict(opacity=0)),
        unselected=dict(marker=dict(opacity=0)),
        customdata=np.stack([layer, head], axis=1).tolist(),  # as arrays they come back from a click as objects
        text=shown,
        hovertemplate=f"layer %{{y}}, head %{{x}}<br>{what} %{{text}}<br>click: open in Values<extra></extra>",
        name="cells",
    )


def _spread(values: np.ndarray, dark: bool) -> list[dict]:
    """Quartiles as a band, the median as a line, layer by layer."""
    rows = np.flatnonzero(np.isfinite(values).any(axis=1))
    if not len(rows):
        return []
    low, middle, high = np.nanquantile(values[rows], (0.25, 0.5, 0.75), axis=1)
    place = dict(type="scatter", mode="lines", xaxis="x2", yaxis="y", y=rows)
    edge = place | dict(line=dict(width=0), hoverinfo="skip")
    facts = "layer %{y}<br>median %{x:.2g}<br>quartiles %{customdata[0]:.2g}, %{customdata[1]:.2g}<extra></extra>"
    line = dict(x=middle, line=dict(color=style.ink(dark), width=2), name="median", hovertemplate=facts)
    return [
        edge | dict(x=low),
        edge | dict(x=high, fill="tonextx", fillcolor=style.transparent(style.muted(dark), 0.28)),
        place | line | dict(customdata=np.stack([low, high], axis=1)),
    ]


def _sliding_notes(data: ErrorMap) -> list[dict]:
    """A word in every row that cannot be evicted."""
    middle = (next(iter(data.measures.values())).shape[1] - 1) / 2
    note = "sliding window, never evicted"
    return [
        dict(x=middle, y=int(layer), xref="x", yref="y", text=note, showarrow=False, font=dict(size=11), opacity=0.7)
        for layer in np.flatnonzero(data.sliding)
    ]


def map_alt(data: ErrorMap, measure: str = "relative_error", other: ErrorMap | None = None) -> str:
    """What the map shows, in a sentence."""
    values = data[measure] if other is None else data.minus(other)[measure]
    title = MEASURES[measure].title
    if not np.isfinite(values).any():
        return f"{title} by layer and head: nothing is evicted."
    layer, head = np.unravel_index(np.nanargmax(values), values.shape)
    what = data.label if other is None else f"{data.label} minus {other.label}"
    return (
        f"{title} by layer and query head for {what} at {data.budget:,} entries: mean {style.number(float(np.nanmean(values)))}, "
        f"largest {style.number(float(values[layer, head]))} in layer {layer}, head {head}."
    )
