"""One head under one policy: its values on a plane, the eviction's effect as arrows and as an angle, error against budget."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import cos, pi, radians, sin

import numpy as np
import plotly.graph_objects as go

from kvviz.analysis.views import ErrorCurves, HeadView
from kvviz.figures import style

MAX_POINTS = 20_000
"""Points drawn at most; of longer prompts every second, third, ... evicted one is left out, and the legend says so."""

ARROWS = {
    "f": ("f", "full cache"),
    "f_R": ("f<sub>R</sub>", "kept"),
    "f_E": ("f<sub>E</sub>", "evicted"),
    "estimate": ("f\u0302<sub>E</sub>", "estimate of f<sub>E</sub>"),
}
"""Arrow -> its symbol and, for the legend, what it is."""

LABEL_ROOM = (0.045, 0.05)
"""Width and height of an arrow's label, as shares of the axes."""


ROOM_OF_ANGLE = 2.4
"""The same for the labels of the angle, whose axes are this long."""


def plane(view: HeadView, texts: Sequence[str] | None = None, dark: bool = False, height: int = 560) -> go.Figure:
    """All N values on the PCA plane, evicted ones as crosses, kept ones as circles, and the four arrows from the origin.

    The axes depend on the values alone: moving the budget moves points between the two sets and nothing else.

    Args:
        texts: the N tokens as people read them, for the hover.
    """
    figure = go.Figure()
    _add_points(figure, view, texts, dark)
    _add_arrows(figure, view, dark)
    names = [f"PC {i + 1} ({style.number(100 * share)}% of the variance)" for i, share in enumerate(view.explained)]
    plain = dict(showgrid=False, zeroline=False, showticklabels=False)
    return style.layout(
        figure,
        dark,
        height=height,
        xaxis=dict(range=view.x_range, title=dict(text=names[0]), **plain),
        yaxis=dict(range=view.y_range, title=dict(text=names[1]), scaleanchor="x", **plain),
        annotations=_labels(view, dark),
        hovermode="closest",
        dragmode="pan",
        uirevision=f"{view.layer}.{view.kv_head}",
        legend=dict(itemsizing="constant"),
    )


def _add_points(figure: go.Figure, view: HeadView, texts: Sequence[str] | None, dark: bool) -> None:
    labels = np.array([escape(texts[i]) for i in view.positions], dtype=object) if texts is not None else None
    kept, evicted = np.flatnonzero(view.kept), np.flatnonzero(~view.kept)
    every = max(1, -(-len(evicted) // max(1, MAX_POINTS - len(kept))))
    rest = "" if every == 1 else f", one in {every} drawn"
    colour = style.colour(view.policy, dark)
    faint = style.transparent(style.muted(dark), 0.5)
    crosses = dict(symbol="x-thin", size=5, color=faint, line=dict(width=1.1, color=faint))
    circles = dict(symbol="circle", size=8, color=colour, line=dict(width=1, color=style.paper(dark)))
    for name, index, marker in (
        (f"evicted: {len(evicted):,}{rest}", evicted[::every], crosses),
        (f"kept: {len(kept):,}", kept, circles),
    ):
        side = name.split(":")[0]
        token = "<b>%{text}</b><br>" if labels is not None else ""
        figure.add_trace(
            go.Scattergl(
                x=view.points[index, 0],
                y=view.points[index, 1],
                mode="markers",
                name=name,
                marker=marker,
                text=labels[index] if labels is not None else None,
                customdata=np.stack([view.positions[index], view.scores[index]], axis=1).astype(np.float32),
                hovertemplate=f"{token}position %{{customdata[0]:,d}}, {side}<br>score %{{customdata[1]:.3g}}<extra></extra>",
            )
        )


def _add_arrows(figure: go.Figure, view: HeadView, dark: bool) -> None:
    colours, dashes = _arrow_colours(view, dark), {"f_E": "5px,3px", "estimate": "2px,2px"}
    for name in _arrows_of(view):
        tip = _drawn(view, name)
        symbol, words = ARROWS[name]
        line = np.stack([view.origin, tip]).astype(np.float32)
        for halo in (True, False):
            colour = style.transparent(style.paper(dark), 0.9) if halo else colours[name]
            figure.add_trace(
                go.Scatter(
                    x=line[:, 0],
                    y=line[:, 1],
                    mode="lines+markers",
                    name=name,
                    showlegend=False,
                    line=dict(color=colour, width=7 if halo else 3, dash=None if halo else dashes.get(name)),
                    marker=dict(
                        symbol="arrow", angleref="previous", size=[0, 19 if halo else 14], color=colour, opacity=1
                    ),
                    hoverinfo="skip" if halo else None,
                    hovertemplate=None
                    if halo
                    else f"{symbol}, {words}<br>mean length {style.number(view.lengths[name], 3)}<extra></extra>",
                )
            )


def _arrows_of(view: HeadView) -> list[str]:
    """Where nothing was evicted there is only f."""
    return list(ARROWS) if view.n_kept < view.n_tokens else ["f"]


def _drawn(view: HeadView, name: str) -> np.ndarray:
    """Where an arrow ends on the plane, drawn `scale` times as long as it is."""
    return view.origin + view.scale * (view.arrows[name] - view.origin)


def _arrow_colours(view: HeadView, dark: bool) -> dict[str, str]:
    return {
        "f": style.ink(dark),
        "f_R": style.colour(view.policy, dark),
        "f_E": style.muted(dark),
        "estimate": style.colour("momentkv", dark),
    }


def _labels(view: HeadView, dark: bool) -> list[dict]:
    """The arrows' symbols beyond their tips, moved apart where they would cover each other."""
    names = _arrows_of(view)
    size = np.ptp([view.x_range, view.y_range], axis=1)
    places = []
    for name in names:
        way = (_drawn(view, name) - view.origin) / size
        places.append(way + way / max(np.linalg.norm(way), 1e-6) * 0.035)
    places = _apart(np.array(places))
    colours = _arrow_colours(view, dark)
    note = "" if view.scale == 1 else f"arrows drawn {view.scale} times longer"
    return [
        dict(text=note, x=1, y=0, xref="paper", yref="paper", xanchor="right", yanchor="bottom", showarrow=False)
        | dict(font=dict(color=style.muted(dark), size=12)),
    ] + [
        dict(
            x=float(place[0]),
            y=float(place[1]),
            text=f"<b><i>{ARROWS[name][0]}</i></b>",
            showarrow=False,
            font=dict(size=17, color=colours[name]),
            bgcolor=style.transparent(style.paper(dark), 0.75),
            borderpad=1,
        )
        for name, place in zip(names, places * size + view.origin, strict=True)
    ]


def _apart(places: np.ndarray) -> np.ndarray:
    """Push places apart, up and down, until labels of LABEL_ROOM no longer overlap."""
    places = places.copy()
    for _ in range(20):
        moved = False
        for i in range(len(places)):
            for j in range(i):
                gap = places[i] - places[j]
                if abs(gap[0]) < LABEL_ROOM[0] and abs(gap[1]) < LABEL_ROOM[1]:
                    push = (LABEL_ROOM[1] - abs(gap[1])) / 2 + 1e-3
                    up = 1 if gap[1] >= 0 else -1
                    places[i, 1] += up * push
                    places[j, 1] -= up * push
                    moved = True
        if not moved:
            break
    return places


def plane_alt(view: HeadView) -> str:
    """What the plane shows, in a sentence."""
    return (
        f"Values of layer {view.layer}, head {view.head} on their first two principal components: {view.label} keeps "
        f"{view.n_kept:,} of {view.n_tokens:,} entries; f_R and f_E are {view.angle:.0f} degrees apart."
    )


def angle(view: HeadView, dark: bool = False, height: int = 260) -> go.Figure:
    """f_R, f_E and f in the plane that they span, true to length and angle, with the arc between f_R and f_E.

    f lies on the line from f_R to f_E, the share w_E along it: the thick piece of that line is the error.
    """
    figure = go.Figure()
    tips = {"f_R": _tip(view.lengths["f_R"], 0), "f_E": _tip(view.lengths["f_E"], view.angle)}
    tips["f"] = tips["f_R"] + view.w_E * (tips["f_E"] - tips["f_R"])
    scale = max(np.linalg.norm(tips["f_R"]), np.linalg.norm(tips["f_E"]), 1e-9)
    tips = {name: tip / scale for name, tip in tips.items()}
    colours = _arrow_colours(view, dark)
    _add_arc(figure, view.angle, dark)
    _add_line(figure, tips["f_R"], tips["f_E"], style.muted(dark), 1.2, "2px,3px", "w<sub>E</sub> = 1")
    _add_line(figure, tips["f_R"], tips["f"], style.alarm(dark), 5, None, "error f − f<sub>R</sub>")
    for name in ("f_E", "f_R", "f"):
        figure.add_trace(
            go.Scatter(
                x=[0, tips[name][0]],
                y=[0, tips[name][1]],
                mode="lines+markers",
                line=dict(color=colours[name], width=2.8, dash="5px,3px" if name == "f_E" else None),
                marker=dict(symbol="arrow", angleref="previous", size=[0, 13], color=colours[name], opacity=1),
                hovertemplate=f"{ARROWS[name][0]}, length {style.number(view.lengths[name], 3)}<extra></extra>",
                showlegend=False,
            )
        )
    hidden = dict(visible=False, fixedrange=True)
    return style.layout(
        figure,
        dark,
        height=height,
        margin=dict(l=4, r=4, t=4, b=4),
        xaxis=dict(range=[-1.15, 1.25], **hidden),
        yaxis=dict(range=[-0.16, 1.16], scaleanchor="x", **hidden),
        annotations=_angle_labels(tips, view, colours, dark),
        uirevision="fixed",
    )


def _tip(length: float, degrees: float) -> np.ndarray:
    return length * np.array([cos(radians(degrees)), sin(radians(degrees))])


def _add_arc(figure: go.Figure, degrees: float, dark: bool) -> None:
    t = np.linspace(0, degrees * pi / 180, 40)
    x, y = 0.3 * np.cos(t), 0.3 * np.sin(t)
    figure.add_trace(
        go.Scatter(
            x=np.concatenate([[0], x, [0]]),
            y=np.concatenate([[0], y, [0]]),
            mode="lines",
            fill="toself",
            fillcolor=style.transparent(style.muted(dark), 0.16),
            line=dict(color=style.muted(dark), width=1.2),
            hoverinfo="skip",
            showlegend=False,
        )
    )


def _add_line(figure: go.Figure, start, end, colour: str, width: float, dash: str | None, name: str) -> None:
    figure.add_trace(
        go.Scatter(
            x=[start[0], end[0]],
            y=[start[1], end[1]],
            mode="lines",
            line=dict(color=colour, width=width, dash=dash),
            name=name,
            hovertemplate=f"{name}<extra></extra>",
            showlegend=False,
        )
    )


def _angle_labels(tips: dict[str, np.ndarray], view: HeadView, colours: dict[str, str], dark: bool) -> list[dict]:
    names = ("f_R", "f_E", "f")
    places = []
    for name in names:
        length = max(np.linalg.norm(tips[name]), 1e-6)
        places.append(tips[name] * (1 + 0.1 / length))
    places = _apart(np.array(places) / ROOM_OF_ANGLE) * ROOM_OF_ANGLE
    labels = [
        dict(x=float(p[0]), y=float(p[1]), text=f"<b><i>{ARROWS[n][0]}</i></b>", font=dict(size=16, color=colours[n]))
        for n, p in zip(names, places, strict=True)
    ]
    half = radians(view.angle / 2)
    where = (0.44 * cos(half), 0.44 * sin(half)) if view.angle >= 25 else (0.36, -0.09)
    labels.append(
        dict(x=where[0], y=where[1], text=f"<b>{view.angle:.0f}°</b>", font=dict(size=17, color=style.ink(dark)))
    )
    text = f"error {style.number(100 * view.relative_error)}%"
    labels.append(
        dict(x=1, y=0, xref="paper", yref="paper", xanchor="right", yanchor="bottom", text=text)
        | dict(font=dict(size=13, color=style.alarm(dark)))
    )
    return [dict(showarrow=False, **label) for label in labels]


def angle_alt(view: HeadView) -> str:
    """What the angle shows, in a sentence."""
    return (
        f"f_R and f_E are {view.angle:.0f} degrees apart; {style.number(100 * view.w_E)}% of the attention is lost, "
        f"so f is {style.number(100 * view.relative_error)}% of its length away from f_R."
    )


def strip(curves: ErrorCurves, budget: int, dark: bool = False, looked_at: str = "", height: int = 240) -> go.Figure:
    """Relative error of one head against the budget, one line a policy, the current budget marked.

    Args:
        looked_at: label of the policy that the page shows; its line is thicker and its error after correction thin beside it.
    """
    figure = go.Figure()
    looks = style.looks(curves.policies, dark)
    for label, errors in curves.errors.items():
        figure.add_trace(_curve(curves.budgets, errors, label, looks[label], wide=label == looked_at))
    if looked_at in curves.corrected:
        figure.add_trace(
            go.Scatter(
                x=curves.budgets,
                y=curves.corrected[looked_at],
                mode="lines",
                name="after correction",
                line=dict(color=looks[looked_at].colour, width=1.4, dash="1px,3px"),
                hovertemplate=f"{escape(looked_at)} after correction, %{{x:,d}} entries: %{{y:.2g}}<extra></extra>",
            )
        )
    figure.add_vline(x=budget, line=dict(color=style.ink(dark), width=1.5))
    top = max((float(np.nanmax(e)) for e in curves.errors.values()), default=1.0)
    ticks = [b for b in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768) if b <= curves.n_tokens]
    return style.layout(
        figure,
        dark,
        height=height,
        xaxis=dict(
            type="log", title=dict(text="budget (entries a head)"), tickvals=ticks, ticktext=[f"{t:,}" for t in ticks]
        ),
        yaxis=dict(title=dict(text="relative error"), range=[0, 1.06 * top], rangemode="tozero"),
        hovermode="closest",
        uirevision="fixed",
    )


def _curve(x: np.ndarray, y: np.ndarray, label: str, look: style.Look, wide: bool = False) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=y,
        mode="lines+markers",
        name=escape(label),
        line=dict(color=look.colour, width=3 if wide else 1.8, dash=look.dash),
        marker=dict(symbol=look.symbol, size=7 if wide else 5, color=look.colour),
        hovertemplate=f"{escape(label)}, %{{x:,d}} entries: %{{y:.2g}}<extra></extra>",
    )


def strip_alt(curves: ErrorCurves, budget: int) -> str:
    """What the strip shows, in a sentence."""
    nearest = int(np.argmin(np.abs(curves.budgets - budget)))
    best = min(curves.errors, key=lambda label: curves.errors[label][nearest], default="")
    return (
        f"Relative error of layer {curves.layer}, head {curves.head} against the budget; "
        f"near {budget:,} entries {best} has the smallest."
    )
