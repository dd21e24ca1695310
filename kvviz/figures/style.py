"""How every figure looks: a policy's colour, dash and marker, one template for light and dark, maps, and number formatting.

Policies wear Okabe and Ito's colours, which most colour-blind people tell apart; the dash pattern and the marker say the
same for the others and for paper. On dark backgrounds the hues are the same, mixed with white. Draw the figures with
Streamlit's own theme switched off (`theme=None`): everything is in the template.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import cache
from html import escape
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

COLOURS = {
    "full": "#666666",
    "capkv": "#0072B2",
    "momentkv": "#D55E00",
    "snapkv": "#009E73",
    "keydiff": "#CC79A7",
    "expected_attention": "#56B4E9",
    "h2o": "#E69F00",
    "sink": "#7F4A12",
    "knorm": "#8C1040",
    "tova": "#8378F0",
    "pyramidkv": "#5A1E9C",
    "adakv": "#63C99A",
    "oracle": "#2A35C9",
    "random": "#B5A58F",
    "observed_attention": "#C42FA8",
    "greedy_logdet": "#0B6A78",
}
"""Policy name -> colour on a light background."""

DASHES = {
    "full": "solid",
    "capkv": "solid",
    "momentkv": "12px,3px",
    "snapkv": "6px,3px",
    "keydiff": "2px,3px",
    "expected_attention": "10px,3px,2px,3px",
    "h2o": "6px,3px,2px,3px,2px,3px",
    "sink": "4px,2px",
    "knorm": "2px,2px,8px,2px",
    "tova": "16px,4px",
    "pyramidkv": "8px,6px",
    "adakv": "6px,2px,1px,2px",
    "oracle": "1px,3px",
    "random": "3px,6px",
    "observed_attention": "8px,2px,2px,2px,2px,2px",
    "greedy_logdet": "14px,2px,4px,2px",
}
"""Policy name -> dash pattern of its lines."""

SYMBOLS = {
    "full": "cross",
    "capkv": "circle",
    "momentkv": "diamond",
    "snapkv": "square",
    "keydiff": "triangle-up",
    "expected_attention": "triangle-down",
    "h2o": "pentagon",
    "sink": "triangle-left",
    "knorm": "triangle-right",
    "tova": "hexagon",
    "pyramidkv": "star-triangle-up",
    "adakv": "star-square",
    "oracle": "star",
    "random": "x",
    "observed_attention": "hexagram",
    "greedy_logdet": "star-diamond",
}
"""Policy name -> marker of its points on lines."""

OTHER = "#4C6272"
"""Colour of a policy that is in none of the tables."""

TINT = 0.34
"""Share of white in the colours on a dark background."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
"""The theme's font (.streamlit/config.toml)."""

SEQUENTIAL = "Cividis"

HERE = "here"
"""Name of the line at the present budget."""

STILL = dict(l=60, r=12, t=40, b=48)
"""Margins of a figure with that line; they do not follow the labels."""

_PUOR = (
    "#7F3B08",
    "#B35806",
    "#E08214",
    "#FDB863",
    "#FEE0B6",
    "#F7F7F7",
    "#D8DAEB",
    "#B2ABD2",
    "#8073AC",
    "#542788",
    "#2D004B",
)
_PUOR_DARK = (
    "#FEE0B6",
    "#FDB863",
    "#E08214",
    "#B35806",
    "#6B3509",
    "#23272D",
    "#3A2A63",
    "#5E47A0",
    "#8073AC",
    "#B2ABD2",
    "#D8DAEB",
)


def colour(policy: str, dark: bool = False) -> str:
    """A policy's colour as "#rrggbb", by its name in the registry."""
    plain = COLOURS.get(policy, OTHER)
    return tint(plain, 0.66 if policy == "full" else TINT) if dark else plain


def dash(policy: str) -> str:
    """A policy's dash pattern."""
    return DASHES.get(policy, "4px,4px")


def symbol(policy: str) -> str:
    """A policy's marker."""
    return SYMBOLS.get(policy, "circle-open")


class Look(NamedTuple):
    """How one policy is drawn in a figure."""

    colour: str
    dash: str
    symbol: str


def looks(policies: Mapping[str, str], dark: bool = False) -> dict[str, Look]:
    """Label -> look, for label -> policy name. Of several settings of one method the later ones are paler, with open markers."""
    found, seen = {}, Counter()
    for label, name in policies.items():
        again = seen[name]
        seen[name] += 1
        pale = mix(colour(name, dark), paper(dark), min(0.35 * again, 0.7))
        found[label] = Look(pale, dash(name), symbol(name) + ("-open" if again else ""))
    return found


def legend(policies: Mapping[str, str]) -> str:
    """One legend for several figures, as HTML that follows the theme: label -> policy name."""
    light, dark = looks(policies), looks(policies, dark=True)
    items = []
    for label, name in policies.items():
        stops = _stops(f"light-dark({light[label].colour},{dark[label].colour})", dash(name))
        line = f'<span style="width:34px;height:3px;background:repeating-linear-gradient(90deg,{stops})"></span>'
        items.append(f'<span style="display:inline-flex;align-items:center;gap:.45em">{line}{escape(label)}</span>')
    return f'<div style="display:flex;flex-wrap:wrap;gap:.2em 1.3em;font-size:.9rem">{"".join(items)}</div>'


def _stops(colour: str, pattern: str) -> str:
    """A dash pattern as the stops of a CSS gradient."""
    if pattern == "solid":
        return f"{colour} 0 34px"
    at, stops = 0, []
    for number, part in enumerate(pattern.split(",")):
        end = at + int(part.removesuffix("px"))
        stops.append(f"{'transparent' if number % 2 else colour} {at}px {end}px")
        at = end
    return ",".join(stops)


def mix(hex_colour: str, other: str, share: float) -> str:
    """A colour with a share of another."""
    pairs = ((int(hex_colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p + (q - p) * share):02X}" for p, q in pairs)


def tint(hex_colour: str, white: float) -> str:
    """A colour mixed with a share of white."""
    return mix(hex_colour, "#FFFFFF", white)


def transparent(hex_colour: str, alpha: float) -> str:
    """A colour as "rgba(...)"."""
    r, g, b = (int(hex_colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({r},{g},{b},{alpha:g})"


def alarm(dark: bool = False) -> str:
    """Colour of an error that a figure points at; no policy has it."""
    return "#F2827A" if dark else "#B3261E"


def estimate(dark: bool = False) -> str:
    """Colour of what is estimated from moments; no policy has it."""
    return "#C99BE3" if dark else "#7B3294"


def ink(dark: bool = False) -> str:
    """Colour of text and of arrows."""
    return "#E4E7EB" if dark else "#1F2328"


def muted(dark: bool = False) -> str:
    """Colour of axes, secondary text and evicted entries."""
    return "#9AA3AD" if dark else "#6B7280"


def grid(dark: bool = False) -> str:
    """Colour of grid lines."""
    return "#2A3037" if dark else "#E6E8EB"


def paper(dark: bool = False) -> str:
    """The page's background, for halos; figures themselves are transparent."""
    return "#15181C" if dark else "#FFFFFF"


def diverging(dark: bool = False) -> list[list]:
    """PuOr around zero: orange below, purple above; its middle is the background's."""
    colours = _PUOR_DARK if dark else _PUOR
    return [[i / (len(colours) - 1), c] for i, c in enumerate(colours)]


def number(value: float | None, digits: int = 2) -> str:
    """A measured number in `digits` significant digits: "0.23", "12", "1,400", "0.0012"; "no value" where there is none."""
    if value is None or not math.isfinite(value):
        return "no value"
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    places = digits - 1 - math.floor(math.log10(abs(rounded)))  # 0.996 -> 1.0
    if abs(rounded) < 1e-4:
        return f"{rounded:.{digits - 1}e}"
    return f"{rounded:,.{max(places, 0)}f}".replace("-", "\u2212")


def draw(traces: list[dict], dark: bool = False, **more) -> go.Figure:
    """A figure of plain traces in the common look; `more` is its layout.

    Plotly's validation would take longer than the numbers do, so it is left out here: the tests validate every figure.
    """
    return go.Figure({"data": traces, "layout": {**more, "template": _plain(dark)}}, _validate=False)


def across(x: float, colour: str) -> dict:
    """A vertical line over the whole height, as a shape."""
    return dict(type="line", x0=x, x1=x, xref="x", y0=0, y1=1, yref="paper", line=dict(color=colour, width=1.5))


def here(x: float, dark: bool = False) -> dict:
    """The line at what the sidebar says now; `lift` takes it out of a figure again."""
    return across(x, ink(dark)) | {"name": HERE}


class Line(NamedTuple):
    """Where a vertical line stands over a figure: `at` is a share of the plot's width; then pixels, and its axis."""

    at: float
    left: float
    right: float
    top: float
    height: float
    low: float
    high: float
    log: bool


def lift(figure: go.Figure) -> Line | None:
    """Take the line `here` out of a baked figure, in place, so that the figure is the same wherever the line stands.

    The figure's x axis needs a range, which it keeps from then on, and margins that do not follow the labels.
    """
    layout = figure._layout
    lines = [shape for shape in layout.get("shapes", ()) if shape.get("name") == HERE]
    if not lines:
        return None
    layout["shapes"] = [shape for shape in layout["shapes"] if shape not in lines]
    layout["xaxis"]["fixedrange"] = True
    low, high = layout["xaxis"]["range"]
    at, log = lines[0]["x0"], layout["xaxis"].get("type") == "log"
    at = ((math.log10(at) if log else at) - low) / (high - low)
    margin = layout["margin"]
    height = layout["height"] - margin["t"] - margin["b"]
    return Line(at, margin["l"], margin["r"], margin["t"], height, low, high, log)


def decades(low: float, high: float) -> dict:
    """A log axis from 10^low to 10^high, with 2 and 5 between the powers of ten where there is room for them."""
    steps = (1, 2, 5) if high - low < 1.7 else (1,)
    ticks = [float(f"{step}e{power}") for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return dict(type="log", range=[low, high], tickvals=ticks, exponentformat="none")


@cache
def _plain(dark: bool) -> dict:
    return template(dark).to_plotly_json()


def layout(figure: go.Figure, dark: bool = False, **more) -> go.Figure:
    """Give a figure the common look, in place; `more` goes to `update_layout`. Returns the figure."""
    figure.update_layout(template=template(dark), **more)
    return figure


def bake(figure: go.Figure, dark: bool = False) -> go.Figure:
    """Write the common look into a figure's own layout, in place, for Streamlit's browser side. Returns the figure.

    Streamlit gives Plotly every new figure twice, the second time as a copy, and Plotly takes a template or an array at another
    place in memory for a new one: it draws all of it again. Without a template, with lists in place of typed arrays and with a
    revision of the data that stays, it sees that nothing is new.
    """
    own = figure.layout.to_plotly_json()
    own.pop("template", None)
    look = _plain(dark)["layout"]
    axes = {key: look[key[:5]] for key in {*own, "xaxis", "yaxis"} if key[:5] in ("xaxis", "yaxis")}
    figure._layout = _over(look | axes | {"datarevision": 1, "dragmode": "pan"}, own)
    figure._data = [_listed(trace) for trace in figure._data]
    return figure


def _listed(part: dict) -> dict:
    """A part of a trace with its arrays as lists."""
    return {
        key: value.tolist() if isinstance(value, np.ndarray) else _listed(value) if _nested(value) else value
        for key, value in part.items()
    }


def _over(under: dict, over: dict) -> dict:
    """The second of two nested dictionaries laid over the first."""
    both = {key: _over(under[key], value) for key, value in over.items() if _nested(value) and _nested(under.get(key))}
    return under | over | both


def _nested(value: object) -> bool:
    return isinstance(value, dict)


@cache
def template(dark: bool = False) -> go.layout.Template:
    """The one template: transparent, quiet axes, the legend above."""
    axis = dict(
        gridcolor=grid(dark),
        linecolor=muted(dark),
        zerolinecolor=grid(dark),
        tickcolor=muted(dark),
        tickfont=dict(color=muted(dark), size=12),
        title=dict(font=dict(color=muted(dark), size=13), standoff=8),
        showline=False,
        ticks="",
        automargin=True,
    )
    return go.layout.Template(
        layout=dict(
            font=dict(family=FONT, size=13, color=ink(dark)),
            title=dict(font=dict(size=14, color=ink(dark)), x=0, xanchor="left"),
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            margin=dict(l=8, r=8, t=40, b=8),
            colorway=[colour(name, dark) for name in COLOURS],
            colorscale=dict(sequential=SEQUENTIAL, diverging=diverging(dark)),
            hoverlabel=dict(
                bgcolor="#1F242A" if dark else "#FFFFFF",
                bordercolor=grid(dark),
                font=dict(family=FONT, size=13, color=ink(dark)),
                align="left",
            ),
            legend=dict(
                orientation="h",
                x=0,
                xanchor="left",
                y=1.02,
                yanchor="bottom",
                font=dict(size=13),
                bgcolor="rgba(0,0,0,0)",
            ),
            modebar=dict(bgcolor="rgba(0,0,0,0)", color=muted(dark), activecolor=ink(dark)),
            xaxis=axis,
            yaxis=axis,
        )
    )
