"""How many entries every layer and head kept, one small map a policy."""

from __future__ import annotations

from html import escape

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvviz.figures.style import SEQUENTIAL, layout, muted
from kvviz.runs import Row, Run


def head_counts(run: Run, dark: bool = False) -> go.Figure:
    """Maps of layers (down) by KV heads (across), one scale for all policies; the full cache is left out."""
    rows = [row for row in run.rows if row is not run.reference]
    top = max((max(map(max, row.head_counts)) for row in rows), default=1)
    figure = make_subplots(
        1, max(len(rows), 1), subplot_titles=[escape(row.label) for row in rows], horizontal_spacing=0.04
    )
    for column, row in enumerate(rows, start=1):
        figure.add_trace(_map(row, top, column == len(rows), dark), 1, column)
    layout(figure, dark, height=380, margin={"l": 8, "r": 8, "t": 36, "b": 8})
    figure.update_annotations(font={"size": 13})
    figure.update_xaxes(title="KV head", dtick=1, showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_yaxes(title="Layer", col=1)
    return figure


def _map(row: Row, top: int, with_scale: bool, dark: bool) -> go.Heatmap:
    counts = np.full((len(row.head_counts), max(map(len, row.head_counts))), np.nan, dtype=np.float32)
    for layer, kept in enumerate(row.head_counts):
        counts[layer, : len(kept)] = kept
    return go.Heatmap(
        z=counts,
        zmin=0,
        zmax=top,
        colorscale=SEQUENTIAL,
        showscale=with_scale,
        colorbar={"title": {"text": "entries"}, "thickness": 10, "tickfont": {"color": muted(dark)}},
        hovertemplate="layer %{y}, KV head %{x}: %{z:.0f} entries<extra></extra>",
        xgap=1,
        ygap=1,
    )
