"""One head under one policy: its values on a plane, the eviction's effect as arrows and as an angle, error against budget."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go

from kvviz.analysis.views import ErrorCurves, HeadView
from kvviz.figures import style

MAX_POINTS = 20_000
"""Points drawn at most; of longer prompts every second, third, ... evicted one is left out, and the legend says so."""

CROSS = (0.014, 0.019)
"""Size of a cross: the larger of these shares of the plane's width and height, so that it is a cross on a flat plane, too."""

CROSS_LINE, DOT = 1.1, 8
"""Pixels: the strokes of a cross, and what is kept."""

PLANE = dict(l=28, r=8, t=44, b=32)
"""Margins of the plane."""

ARROWS = {
    "f": ("f", "full cache"),
    "f_R": ("f<sub>R</sub>", "kept"),
    "f_E": ("f<sub>E</sub>", "evicted"),
    "estimate": ("f\u0302<sub>E</sub>", "estimate of f<sub>E</sub>"),
}
"""Arrow -> its symbol and, for the legend, what it is."""

ARROWS_AT = 3
"""Traces of the plane before its arrows."""

LABEL_ROOM = (0.045, 0.05)
"""Width and height of an arrow's label, as shares of the axes."""


ROUNDING = 1e-6
"""Errors below are none."""


def plane(view: HeadView, texts: Sequence[str] | None = None, dark: bool = False) -> go.Figure:
    """All N values on the PCA plane, evicted ones as crosses, kept ones as circles, and the four arrows from the origin.

    The axes depend on the values alone: moving the budget moves points between the two sets and nothing else.

    Args:
        texts: the N tokens as people read them, for the hover.
    """
    names = [f"PC {i + 1} ({style.number(100 * share)}% of the variance)" for i, share in enumerate(view.explained)]
    plain = dict(showgrid=False, zeroline=False, showticklabels=False, automargin=False, constrain="domain")
    (points, crosses), (lines, labels) = _points(view, texts, dark), arrows(view, dark)
    return style.draw(
        [*points, *lines],
        dark,
        shapes=crosses,
        height=plane_height(view),
        xaxis=dict(range=view.x_range, title=dict(text=names[0]), **plain),
        yaxis=dict(range=view.y_range, title=dict(text=names[1]), scaleanchor="x", constraintoward="top", **plain),
        annotations=labels,
        hovermode="closest",
        dragmode="pan",
        uirevision=f"{view.layer}.{view.kv_head}",
        margin=PLANE,
        legend=dict(
            itemsizing="constant", y=1, yref="container", yanchor="top", itemclick=False, itemdoubleclick=False
        ),
    )


def plane_height(view: HeadView, width: int | None = None) -> int:
    """Pixels that the plane takes: in a place of any width, or all that it needs where the place is `width` pixels wide."""
    shape = float(np.divide(*np.ptp([view.y_range, view.x_range], axis=1)))
    if width is None:
        return round(min(max(90 + 620 * shape, 380), 600))
    return round(PLANE["t"] + PLANE["b"] + (width - PLANE["l"] - PLANE["r"]) * shape)


def _points(view: HeadView, texts: Sequence[str] | None, dark: bool) -> tuple[list[dict], list[dict]]:
    """Traces and shapes: what is evicted, drawn as one shape and there to be hovered over; its sign in the legend; what is kept.

    A marker for each of some thousand points would take the browser as long as all the rest of the page.
    """
    labels = np.array([escape(texts[i]) for i in view.positions], dtype=object) if texts is not None else None
    kept, evicted = np.flatnonzero(view.kept), np.flatnonzero(~view.kept)
    every = max(1, -(-len(evicted) // max(1, MAX_POINTS - len(kept))))
    name = f"evicted: {len(evicted):,}" + ("" if every == 1 else f", one in {every} drawn")
    evicted, drawn = evicted[::every], look(view, dark)
    sign = dict(symbol="x-thin-open", size=8, color=drawn["evicted"], line=dict(width=1.4))
    circles = dict(symbol="circle", size=DOT, color=drawn["kept"], line=dict(width=1, color=drawn["rim"]))
    traces = [
        _cloud(view, labels, evicted, "evicted") | dict(mode="none", name="evicted", showlegend=False),
        dict(type="scatter", mode="markers", x=[None], y=[None], name=name, marker=sign),
        _cloud(view, labels, kept, "kept") | dict(mode="markers", name=f"kept: {len(kept):,}", marker=circles),
    ]
    return traces, [_crosses(view, evicted, drawn)] if len(evicted) else []


def look(view: HeadView, dark: bool = False) -> dict[str, str | float]:
    """How points are drawn: colours of kept and evicted ones and of the rim, pixels of a dot, half a cross on the axes."""
    return {
        "kept": style.colour(view.policy, dark),
        "evicted": style.transparent(style.muted(dark), 0.5),
        "rim": style.paper(dark),
        "dot": DOT,
        "arm": float(np.max(CROSS * np.ptp([view.x_range, view.y_range], axis=1)) / 2),
        "line": CROSS_LINE,
    }


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


def _crosses(view: HeadView, index: np.ndarray, drawn: dict) -> dict:
    """A small cross at each of the points, all of them one shape."""
    arm = drawn["arm"]
    low, high = view.points[index] - arm, view.points[index] + arm
    ends = np.stack([low[:, 0], low[:, 1], high[:, 0], high[:, 1], low[:, 0], high[:, 1], high[:, 0], low[:, 1]], 1)
    step = "M{:.4g},{:.4g}L{:.4g},{:.4g}"
    path = "".join((step + step).format(*row) for row in ends.tolist())
    return dict(type="path", path=path, layer="below", line=dict(color=drawn["evicted"], width=CROSS_LINE))


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


def arrows(view: HeadView, dark: bool = False) -> tuple[list[dict], list[dict]]:
    """The plane's last traces, the arrows over a halo that all of them share, and its annotations, their labels."""
    names, colours = _arrows_of(view), _arrow_colours(view, dark)
    tips = {name: _drawn(view, name) for name in names}
    ends = np.concatenate([[view.origin, tips[name], [np.nan, np.nan]] for name in names])
    halo = _line(ends, "", color=style.transparent(style.paper(dark), 0.8), width=6) | dict(hoverinfo="skip")
    facts = {name: f"{', '.join(ARROWS[name])}: mean length {style.number(view.lengths[name], 3)}" for name in names}
    lines = [_arrow(view.origin, tips[name], facts[name], name, color=colours[name]) for name in names]
    return [halo, *lines], [_scale_note(view, dark), *_labels(view, dark)]


def _scale_note(view: HeadView, dark: bool) -> dict:
    text = "" if view.scale == 1 else f"arrows drawn {view.scale} times longer"
    place = dict(x=1, y=0, xref="paper", yref="y domain", xanchor="right", yanchor="bottom", showarrow=False)
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


def _line(points: Sequence[np.ndarray], fact: str, **line) -> dict:
    x, y = np.array(points, dtype=float).T
    return dict(
        type="scatter",
        mode="lines",
        x=x,
        y=y,
        line=line,
        hovertemplate=f"{fact}<extra></extra>",
        showlegend=False,
    )


def _arrow(start: np.ndarray, tip: np.ndarray, fact: str, name: str, **line) -> dict:
    head = dict(symbol="arrow", angleref="previous", size=[0, 13], color=line["color"], opacity=1, line=dict(width=0))
    return _line([start, tip], fact, width=2.8, **line) | dict(mode="lines+markers", marker=head, name=name)


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
    low, high = np.log10([min(curves.budgets.min(), budget), curves.n_tokens])
    return style.draw(
        traces,
        dark,
        height=height,
        showlegend=False,
        margin=style.STILL | {"t": 12},
        xaxis=dict(
            title=dict(text="budget (entries a head)"),
            tickvals=ticks,
            ticktext=[f"{t:,}" for t in ticks],
            type="log",
            range=[low - 0.04, high + 0.04],
            automargin=False,
        ),
        yaxis=dict(title=dict(text="relative error"), **style.decades(*_range(curves)), automargin=False),
        shapes=[style.here(budget, dark)],
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
        mode="lines+markers",  # without markers a click on it chooses nothing
        marker=dict(size=3, color=look.colour),
        unselected=dict(marker=dict(opacity=1)),
        x=curves.budgets,
        y=_above_zero(curves.corrected[label]),
        name="after correction",
        line=dict(color=look.colour, width=1.4, dash="1px,3px"),
        hovertemplate=f"{escape(label)} after correction, %{{x:,d}} entries: %{{y:.2g}}<extra></extra>",
    )


def strip_alt(curves: ErrorCurves, budget: int = 256) -> str:
    """What the strip shows, in a sentence."""
    nearest = int(np.argmin(np.abs(curves.budgets - budget)))
    best = min(curves.errors, key=lambda label: curves.errors[label][nearest], default="")
    return (
        f"Relative error of layer {curves.layer}, head {curves.head} against the budget; "
        f"near {budget:,} entries {best} has the smallest."
    )
