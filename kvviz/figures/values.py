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

CROSS = 0.01
"""Size of a cross, as a share of the plane's height."""

ARROWS = {
    "f": ("f", "full cache"),
    "f_R": ("f<sub>R</sub>", "kept"),
    "f_E": ("f<sub>E</sub>", "evicted"),
    "estimate": ("f\u0302<sub>E</sub>", "estimate of f<sub>E</sub>"),
}
"""Arrow -> its symbol and, for the legend, what it is."""

LABEL_ROOM = (0.045, 0.05)
"""Width and height of an arrow's label, as shares of the axes."""


ROUNDING = 1e-6
"""Errors below are none."""

ROOM_OF_ANGLE = 2.4
"""The same for the labels of the angle, whose axes are this long."""


def plane(view: HeadView, texts: Sequence[str] | None = None, dark: bool = False) -> go.Figure:
    """All N values on the PCA plane, evicted ones as crosses, kept ones as circles, and the four arrows from the origin.

    The axes depend on the values alone: moving the budget moves points between the two sets and nothing else.

    Args:
        texts: the N tokens as people read them, for the hover.
    """
    names = [f"PC {i + 1} ({style.number(100 * share)}% of the variance)" for i, share in enumerate(view.explained)]
    plain = dict(showgrid=False, zeroline=False, showticklabels=False, automargin=False, constrain="domain")
    width, height = np.ptp([view.x_range, view.y_range], axis=1)
    return style.draw(
        dark=dark,
        **_points(view, texts, dark),
        height=round(float(np.clip(90 + 620 * height / width, 380, 600))),
        xaxis=dict(range=view.x_range, title=dict(text=names[0]), **plain),
        yaxis=dict(range=view.y_range, title=dict(text=names[1]), scaleanchor="x", **plain),
        annotations=[_scale_note(view, dark), *_arrows(view, dark), *_labels(view, dark)],
        hovermode="closest",
        dragmode="pan",
        uirevision=f"{view.layer}.{view.kv_head}",
        margin=dict(l=28, r=8, t=44, b=32),
        legend=dict(
            itemsizing="constant", y=1, yref="container", yanchor="top", itemclick=False, itemdoubleclick=False
        ),
    )


def _points(view: HeadView, texts: Sequence[str] | None, dark: bool) -> dict[str, list]:
    """Traces and shapes: what is evicted, drawn as one shape and there to be hovered over; its sign in the legend; what is kept.

    A marker for each of some thousand points would take the browser as long as all the rest of the page.
    """
    labels = np.array([escape(texts[i]) for i in view.positions], dtype=object) if texts is not None else None
    kept, evicted = np.flatnonzero(view.kept), np.flatnonzero(~view.kept)
    every = max(1, -(-len(evicted) // max(1, MAX_POINTS - len(kept))))
    name = f"evicted: {len(evicted):,}" + ("" if every == 1 else f", one in {every} drawn")
    evicted, faint = evicted[::every], style.transparent(style.muted(dark), 0.5)
    sign = dict(symbol="x-thin-open", size=8, color=faint, line=dict(width=1.4))
    circles = dict(symbol="circle", size=8, line=dict(width=1, color=style.paper(dark)))
    circles["color"] = style.colour(view.policy, dark)
    traces = [
        _cloud(view, labels, evicted, "evicted") | dict(mode="none", name="evicted", showlegend=False),
        dict(type="scatter", mode="markers", x=[None], y=[None], name=name, marker=sign),
        _cloud(view, labels, kept, "kept") | dict(mode="markers", name=f"kept: {len(kept):,}", marker=circles),
    ]
    return {"traces": traces, "shapes": [_crosses(view, evicted, faint)] if len(evicted) else []}


def _cloud(view: HeadView, labels: np.ndarray | None, index: np.ndarray, side: str) -> dict:
    """Some of the points, with what the hover says of them."""
    token = "" if labels is None else "<b>%{text}</b><br>"
    words = {} if labels is None else {"text": labels[index]}
    return dict(
        type="scatter",
        x=view.points[index, 0],
        y=view.points[index, 1],
        customdata=np.stack([view.positions[index], view.scores[index]], axis=1).astype(np.float32),
        hovertemplate=f"{token}position %{{customdata[0]:,d}}, {side}<br>score %{{customdata[1]:.3g}}<extra></extra>",
        **words,
    )


def _crosses(view: HeadView, index: np.ndarray, colour: str) -> dict:
    """A small cross at each of the points, all of them one shape."""
    arm = CROSS * np.ptp(view.y_range) / 2
    low, high = view.points[index] - arm, view.points[index] + arm
    ends = np.stack([low[:, 0], low[:, 1], high[:, 0], high[:, 1], low[:, 0], high[:, 1], high[:, 0], low[:, 1]], 1)
    step = "M{:.4g},{:.4g}L{:.4g},{:.4g}"
    path = "".join((step + step).format(*row) for row in ends.tolist())
    return dict(type="path", path=path, layer="below", line=dict(color=colour, width=1.1))


def _arrows_of(view: HeadView) -> list[str]:
    """Where nothing was evicted there is only f."""
    return list(ARROWS) if view.n_kept < view.n_tokens else ["f"]


def _drawn(view: HeadView, name: str) -> np.ndarray:
    """Where an arrow ends on the plane, drawn `scale` times as long as it is, and cut where it would leave the axes."""
    way = view.scale * (view.arrows[name] - view.origin)
    edges = np.array([view.x_range, view.y_range])[[0, 1], (way > 0).astype(int)]
    room = np.divide(edges - view.origin, way, out=np.ones(2), where=np.abs(way) > 1e-9).min()
    return view.origin + way * min(1.0, 0.94 * room if room < 1 else 1.0)


def _arrow_colours(view: HeadView, dark: bool) -> dict[str, str]:
    return {
        "f": style.ink(dark),
        "f_R": style.colour(view.policy, dark),
        "f_E": style.mix(style.muted(dark), style.ink(dark), 0.35),
        "estimate": style.estimate(dark),
    }


def _arrows(view: HeadView, dark: bool) -> list[dict]:
    """The arrows as annotations, which lie above the points' canvas; each over a halo of the page's colour."""
    colours = _arrow_colours(view, dark)
    found = []
    for name in _arrows_of(view):
        tip = _drawn(view, name)
        symbol, words = ARROWS[name]
        line = dict(x=float(tip[0]), y=float(tip[1]), ax=float(view.origin[0]), ay=float(view.origin[1]), text="")
        line |= dict(xref="x", yref="y", axref="x", ayref="y", showarrow=True, arrowhead=2)
        fact = f"{symbol}, {words}: mean length {style.number(view.lengths[name], 3)}"
        found.append(line | dict(arrowcolor=style.paper(dark), arrowwidth=6, arrowsize=0.75, opacity=0.8))
        found.append(line | dict(arrowcolor=colours[name], arrowwidth=2.8, arrowsize=0.95, hovertext=fact, name=name))
    return found


def _scale_note(view: HeadView, dark: bool) -> dict:
    text = "" if view.scale == 1 else f"arrows drawn {view.scale} times longer"
    place = dict(x=1, y=0, xref="paper", yref="paper", xanchor="right", yanchor="bottom", showarrow=False)
    return dict(text=text, font=dict(color=style.muted(dark), size=12), **place)


def _labels(view: HeadView, dark: bool) -> list[dict]:
    """The arrows' symbols beyond their tips, moved apart where they would cover each other."""
    names = _arrows_of(view)
    size = np.ptp([view.x_range, view.y_range], axis=1)
    places = []
    for name in names:
        way = (_drawn(view, name) - view.origin) / size
        places.append(way + way / max(np.linalg.norm(way), 1e-6) * 0.03)
    places = _apart(np.array(places))
    colours = _arrow_colours(view, dark)
    return [
        dict(
            x=float(place[0]),
            y=float(place[1]),
            text=f"<b><i>{ARROWS[name][0]}</i></b>",
            showarrow=False,
            font=dict(size=17, color=colours[name]),
            bgcolor=style.transparent(style.paper(dark), 0.8),
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
    tips = {"f_R": _tip(view.lengths["f_R"], 0), "f_E": _tip(view.lengths["f_E"], view.angle)}
    tips["f"] = tips["f_R"] + view.w_E * (tips["f_E"] - tips["f_R"])
    scale = max(np.linalg.norm(tips["f_R"]), np.linalg.norm(tips["f_E"]), 1e-9)
    tips = {name: tip / scale for name, tip in tips.items()}
    colours = _arrow_colours(view, dark)
    chord = [tips["f_R"], tips["f_E"]]
    error = [tips["f_R"], tips["f"]]
    traces = [
        _arc(view.angle, dark),
        _line(chord, "from f<sub>R</sub> to f<sub>E</sub>", color=style.muted(dark), width=1.2, dash="2px,3px"),
        _line(error, "error, f − f<sub>R</sub>", color=style.alarm(dark), width=5),
    ]
    for name in ("f_E", "f_R", "f"):
        dash = {"dash": "5px,3px"} if name == "f_E" else {}
        fact = f"{ARROWS[name][0]}, length {style.number(view.lengths[name], 3)}"
        arrow = _line([np.zeros(2), tips[name]], fact, color=colours[name], width=2.8, **dash)
        head = dict(symbol="arrow", angleref="previous", size=[0, 13], color=colours[name], opacity=1)
        traces.append(arrow | dict(mode="lines+markers", marker=head | dict(line=dict(width=0))))
    hidden = dict(visible=False, fixedrange=True, constrain="domain")
    return style.draw(
        traces,
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


def _arc(degrees: float, dark: bool) -> dict:
    t = np.linspace(0, degrees * pi / 180, 40)
    return dict(
        type="scatter",
        mode="lines",
        x=np.concatenate([[0], 0.3 * np.cos(t), [0]]),
        y=np.concatenate([[0], 0.3 * np.sin(t), [0]]),
        fill="toself",
        fillcolor=style.transparent(style.muted(dark), 0.16),
        line=dict(color=style.muted(dark), width=1.2),
        hoverinfo="skip",
        showlegend=False,
    )


def _line(ends: list[np.ndarray], fact: str, **line) -> dict:
    (x0, y0), (x1, y1) = ends
    return dict(
        type="scatter",
        mode="lines",
        x=[float(x0), float(x1)],
        y=[float(y0), float(y1)],
        line=line,
        hovertemplate=f"{fact}<extra></extra>",
        showlegend=False,
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
    looks = style.looks(curves.policies, dark)
    traces = [
        _curve(curves.budgets, errors, label, looks[label], wide=label == looked_at)
        for label, errors in curves.errors.items()
    ]
    if looked_at in curves.corrected:
        traces.append(_corrected(curves, looked_at, looks[looked_at]))
    ticks = [2**power for power in range(3, 24) if 2**power <= curves.n_tokens]
    return style.draw(
        traces,
        dark,
        height=height,
        xaxis=dict(
            title=dict(text="budget (entries a head)"), tickvals=ticks, ticktext=[f"{t:,}" for t in ticks], type="log"
        ),
        yaxis=dict(title=dict(text="relative error"), **style.decades(*_range(curves))),
        shapes=[style.across(budget, style.ink(dark))],
        hovermode="closest",
        uirevision="fixed",
    )


def _above_zero(errors: np.ndarray) -> np.ndarray:
    """Errors for a log axis: what rounding leaves where nothing was evicted is no point."""
    return np.where(errors > ROUNDING, errors, np.nan)


def _range(curves: ErrorCurves) -> tuple[float, float]:
    """Range of the log axis: the errors above 0, at least one power of ten, at most four."""
    errors = np.concatenate([*curves.errors.values(), *curves.corrected.values(), [1.0]])
    seen = np.log10(errors[np.isfinite(_above_zero(errors))])
    top = float(seen.max()) + 0.08
    return max(min(float(seen.min()) - 0.08, top - 1), top - 4), top


def _curve(x: np.ndarray, y: np.ndarray, label: str, look: style.Look, wide: bool = False) -> dict:
    return dict(
        type="scatter",
        mode="lines+markers",
        x=x,
        y=_above_zero(y),
        name=escape(label),
        line=dict(color=look.colour, width=3 if wide else 1.8, dash=look.dash),
        marker=dict(symbol=look.symbol, size=7 if wide else 5, color=look.colour),
        unselected=dict(marker=dict(opacity=1)),
        hovertemplate=f"{escape(label)}, %{{x:,d}} entries: %{{y:.2g}}<extra></extra>",
    )


def _corrected(curves: ErrorCurves, label: str, look: style.Look) -> dict:
    return dict(
        type="scatter",
        mode="lines",
        x=curves.budgets,
        y=_above_zero(curves.corrected[label]),
        name="after correction",
        line=dict(color=look.colour, width=1.4, dash="1px,3px"),
        hovertemplate=f"{escape(label)} after correction, %{{x:,d}} entries: %{{y:.2g}}<extra></extra>",
    )


def strip_alt(curves: ErrorCurves, budget: int) -> str:
    """What the strip shows, in a sentence."""
    nearest = int(np.argmin(np.abs(curves.budgets - budget)))
    best = min(curves.errors, key=lambda label: curves.errors[label][nearest], default="")
    return (
        f"Relative error of layer {curves.layer}, head {curves.head} against the budget; "
        f"near {budget:,} entries {best} has the smallest."
    )
