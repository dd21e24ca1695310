"""Capacity of what is kept, as a share of the full cache's, against the share removed; and against the divergence."""

from __future__ import annotations

from html import escape

import numpy as np
import plotly.graph_objects as go

from kvviz.analysis.views import CAPACITIES, CapacityCurves
from kvviz.figures import style


def curve(
    curves: CapacityCurves,
    which: str,
    removed: float,
    dark: bool = False,
    head: tuple[int, int] | None = None,
    height: int = 300,
) -> go.Figure:
    """One capacity against the share removed: mean and 10% to 90% band over layers and heads, or one head's.

    Args:
        which: "K", "U" or "KU".
        removed: the current share removed, a vertical line.
        head: (layer, KV head), or None for all.
    """
    row = list(CAPACITIES).index(which)
    looks = style.looks(curves.policies, dark)
    x, traces, lowest = 100 * curves.removed, [], 100.0
    if head is None:
        for label in curves.shares:
            low, high = (100 * band[row] for band in curves.quantiles(label))
            traces += _band(x, low, high, looks[label].colour)
    for label in curves.policies:
        y = 100 * (curves.mean(label) if head is None else curves.at(label, *head))[row]
        lowest = min(lowest, float(np.nanmin(y, initial=100.0)))
        traces.append(_line(x, y, label, looks[label]))
    full = style.colour("full", dark)
    top = dict(type="line", x0=0, x1=1, xref="paper", y0=100, y1=100, yref="y", line=dict(color=full, width=1.5))
    note = dict(text="full cache", x=0, xref="paper", xanchor="left", y=100, yanchor="bottom", showarrow=False)
    return style.draw(
        traces,
        dark,
        height=height,
        showlegend=False,
        margin=style.STILL,
        title=dict(text=f"<b>{CAPACITIES[which].title}</b>  {CAPACITIES[which].symbol}", y=0.97),
        xaxis=dict(title=dict(text="share removed (%)"), range=[-1, 101], dtick=25, zeroline=False, automargin=False),
        yaxis=dict(title=dict(text="of the full cache (%)"), range=[max(0, lowest - 6), 107], automargin=False),
        shapes=[top, style.here(100 * removed, dark)],
        annotations=[note | dict(font=dict(color=full, size=11))],
        hovermode="closest",
        uirevision="fixed",
    )


def _band(x: np.ndarray, low: np.ndarray, high: np.ndarray, colour: str) -> list[dict]:
    there = np.isfinite(low)
    plain = dict(type="scatter", mode="lines", x=x[there], line=dict(width=0), hoverinfo="skip", showlegend=False)
    fill = dict(fill="tonexty", fillcolor=style.transparent(colour, 0.12))
    return [plain | dict(y=low[there]), plain | dict(y=high[there]) | fill]


def _line(x: np.ndarray, y: np.ndarray, label: str, look: style.Look) -> dict:
    return dict(
        type="scatter",
        mode="lines+markers",
        x=x,
        y=y,
        name=escape(label),
        connectgaps=True,
        line=dict(color=look.colour, width=2, dash=look.dash),
        marker=dict(symbol=look.symbol, size=5, color=look.colour),
        hovertemplate=f"{escape(label)}<br>%{{x:.3g}}% removed: %{{y:.3g}}% of the full cache<extra></extra>",
    )


def curve_alt(curves: CapacityCurves, which: str, removed: float = 0.75, head: tuple[int, int] | None = None) -> str:
    """What a curve shows, in a sentence."""
    row = list(CAPACITIES).index(which)
    where = "mean over layers and heads" if head is None else f"layer {head[0]}, KV head {head[1]}"
    rows = {label: (curves.mean(label) if head is None else curves.at(label, *head))[row] for label in curves.shares}
    known = np.isfinite(np.stack(list(rows.values()))).all(axis=0)
    nearest = int(np.argmin(np.where(known, np.abs(curves.removed - removed), np.inf)))
    shares = {label: 100 * float(values[nearest]) for label, values in rows.items()}
    facts = ", ".join(f"{label} {style.number(share)}%" for label, share in shares.items())
    at = style.number(100 * float(curves.removed[nearest]))
    return f"{CAPACITIES[which].title} as a share of the full cache's, {where}, with {at}% removed: {facts}."


def against_divergence(points: list[dict], which: str, dark: bool = False, height: int = 320) -> go.Figure:
    """Mean KL to the full cache against the capacity kept, a marker for each row of a run.

    Args:
        points: dicts with policy, label, budget, capacity (share of the full cache's) and kl (nats a token).
    """
    traces = []
    for label, look in style.looks({p["label"]: p["policy"] for p in points}, dark).items():
        mine = [p for p in points if p["label"] == label]
        traces.append(
            dict(
                type="scatter",
                mode="markers",
                x=[100 * p["capacity"] for p in mine],
                y=[p["kl"] for p in mine],
                name=escape(label),
                marker=dict(
                    color=look.colour, symbol=look.symbol, size=11, line=dict(color=style.paper(dark), width=1)
                ),
                customdata=[p["budget"] for p in mine],
                hovertemplate=f"{escape(label)}, %{{customdata:,d}} entries<br>{which} capacity %{{x:.3g}}% of the full cache"
                "<br>mean KL %{y:.2g} nats a token<extra></extra>",
            )
        )
    seen = np.log10([max(p["kl"], 1e-9) for p in points])
    return style.draw(
        traces,
        dark,
        height=height,
        showlegend=True,
        xaxis=dict(title=dict(text=f"{CAPACITIES[which].title} (% of the full cache)")),
        yaxis=dict(title=dict(text="mean KL (nats a token)"), **style.decades(seen.min() - 0.1, seen.max() + 0.1)),
        hovermode="closest",
        uirevision="fixed",
    )


def divergence_alt(points: list[dict], which: str, rho: float) -> str:
    """What the scatter shows, in a sentence."""
    return (
        f"Mean KL to the full cache against {CAPACITIES[which].title} for {len(points)} outputs: "
        f"Spearman's rho {style.number(rho)}."
    )
