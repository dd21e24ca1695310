"""The map of all layers and heads, and beside it the spread over each layer's heads."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvviz.analysis.views import MEASURES, ErrorMap
from kvviz.figures import style

ROW = 17
"""Height of a layer's row in pixels."""


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
    figure = make_subplots(1, 2, shared_yaxes=True, column_widths=[0.74, 0.26], horizontal_spacing=0.02)
    figure.add_trace(_heatmap(values, about.signed or other is not None, about.symbol, measure, dark), 1, 1)
    figure.add_trace(_markers(values, about.title, data, other), 1, 1)
    _add_spread(figure, values, dark)
    for edge in range(data.groups, heads, data.groups):
        figure.add_vline(x=edge - 0.5, line=dict(color=style.paper(dark), width=3), row=1, col=1)
    plain = dict(showgrid=False, zeroline=False, fixedrange=True)
    style.layout(
        figure,
        dark,
        height=max(340, ROW * layers + 96),
        hovermode="closest",
        hoverdistance=-1,
        uirevision=measure,
        showlegend=False,
        annotations=_sliding_notes(data),
        margin=dict(t=12, b=8, l=8, r=8),
    )
    every = 1 if layers <= 16 else 2 if layers <= 40 else 4
    figure.update_xaxes(dict(title=dict(text="query head"), dtick=1 if heads <= 16 else 4, **plain), row=1, col=1)
    figure.update_yaxes(
        dict(title=dict(text="layer"), tickvals=list(range(0, layers, every)), range=[layers - 0.5, -0.5], **plain),
        row=1,
        col=1,
    )
    figure.update_yaxes(dict(range=[layers - 0.5, -0.5], showgrid=False, fixedrange=True), row=1, col=2)
    figure.update_xaxes(dict(title=dict(text="median, quartiles"), fixedrange=True, nticks=4), row=1, col=2)
    return figure


def limits(values: np.ndarray, signed: bool, measure: str) -> tuple[float, float]:
    """The colour scale's ends: 0 to the largest, or as far below zero as above."""
    top = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    top = max(top, 1e-6)
    if signed:
        top = max(top, 1.0) if measure == "cos" else top
        return -top, top
    return 0.0, top


def _heatmap(values: np.ndarray, signed: bool, symbol: str, measure: str, dark: bool) -> go.Heatmap:
    low, high = limits(values, signed, measure)
    return go.Heatmap(
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
            len=0.74,
            x=0,
            xanchor="left",
            y=1.01,
            yanchor="bottom",
            outlinewidth=0,
            ticklabelposition="outside top",
            nticks=5,
        ),
    )


def _markers(values: np.ndarray, title: str, data: ErrorMap, other: ErrorMap | None) -> go.Scatter:
    layer, head = np.indices(values.shape).reshape(2, -1)
    shown = [f"{style.number(v)}" for v in values.ravel()]
    what = title if other is None else f"{title}: {data.label} minus {other.label}"
    return go.Scatter(
        x=head.astype(np.int32),
        y=layer.astype(np.int32),
        mode="markers",
        marker=dict(symbol="square", size=ROW - 1, color="rgba(0,0,0,0)", line=dict(width=0)),
        selected=dict(marker=dict(opacity=0)),
        unselected=dict(marker=dict(opacity=0)),
        customdata=np.stack([layer, head], axis=1).astype(np.int32),
        text=shown,
        hovertemplate=f"layer %{{y}}, head %{{x}}<br>{what} %{{text}}<br>click: open in Values<extra></extra>",
        name="cells",
    )


def _add_spread(figure: go.Figure, values: np.ndarray, dark: bool) -> None:
    """Quartiles as a band, the median as a line, layer by layer."""
    rows = np.flatnonzero(np.isfinite(values).any(axis=1))
    if not len(rows):
        return
    low, middle, high = np.nanquantile(values[rows], (0.25, 0.5, 0.75), axis=1)
    colour = style.ink(dark)
    band = dict(mode="lines", line=dict(width=0), hoverinfo="skip", showlegend=False)
    figure.add_trace(go.Scatter(x=low, y=rows, **band), 1, 2)
    figure.add_trace(
        go.Scatter(x=high, y=rows, fill="tonextx", fillcolor=style.transparent(style.muted(dark), 0.28), **band), 1, 2
    )
    quartiles = np.stack([low, high], axis=1)
    figure.add_trace(
        go.Scatter(
            x=middle,
            y=rows,
            mode="lines",
            line=dict(color=colour, width=2),
            customdata=quartiles,
            hovertemplate="layer %{y}<br>median %{x:.2g}<br>quartiles %{customdata[0]:.2g}, %{customdata[1]:.2g}<extra></extra>",
            name="median",
        ),
        1,
        2,
    )


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
