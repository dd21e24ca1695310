"""f_R, f_E and f in the plane that they span, as a small SVG: Plotly would take longer to draw three arrows than all else."""

from __future__ import annotations

from math import atan2, cos, degrees, pi, radians, sin

import numpy as np

from kvviz.analysis.views import HeadView
from kvviz.figures import style

UNIT = 150
"""Pixels of the longer one of f_R and f_E."""

LEFT, TOP, WIDTH, HEIGHT = -1.15, 1.16, 2.4, 1.32
"""What is shown of the plane, in those units."""

ROOM = 0.12
"""Labels are at least so far apart, up and down."""

SYMBOLS = {"f": ("f", ""), "f_R": ("f", "R"), "f_E": ("f", "E")}


def tips(view: HeadView) -> dict[str, np.ndarray]:
    """Where the arrows end, [2] each; f_R lies on the x axis, and the longer one of f_R and f_E has length 1.

    f lies on the line from f_R to f_E, the share w_E along it.
    """
    found = {"f_R": _at(view.lengths["f_R"], 0), "f_E": _at(view.lengths["f_E"], view.angle)}
    found["f"] = found["f_R"] + view.w_E * (found["f_E"] - found["f_R"])
    scale = max(np.linalg.norm(found["f_R"]), np.linalg.norm(found["f_E"]), 1e-9)
    return {name: tip / scale for name, tip in found.items()}


def angle(view: HeadView, dark: bool = False) -> str:
    """The drawing, true to length and angle, with the arc between f_R and f_E; the thick piece of the dotted line is the error.

    Returns SVG.
    """
    ends, soft = tips(view), style.muted(dark)
    colours = {
        "f": style.ink(dark),
        "f_R": style.colour(view.policy, dark),
        "f_E": style.mix(soft, style.ink(dark), 0.35),
    }
    parts = [
        _arc(view.angle, soft),
        _line(ends["f_R"], ends["f_E"], soft, 1.2, "2 3"),
        _line(ends["f_R"], ends["f"], style.alarm(dark), 5),
        *(_arrow(ends[name], colours[name], "5 3" if name == "f_E" else "") for name in ("f_E", "f_R", "f")),
        *_labels(view, ends, colours, dark),
    ]
    size = f"{UNIT * LEFT:g} {-UNIT * TOP:g} {UNIT * WIDTH:g} {UNIT * HEIGHT:g}"
    look = f"font-family:{style.FONT};paint-order:stroke;stroke-linejoin:round".replace("'", "")
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" style="{look}">{"".join(parts)}</svg>'


def angle_alt(view: HeadView) -> str:
    """What the angle shows, in a sentence."""
    return (
        f"f_R and f_E are {view.angle:.0f} degrees apart; {style.number(100 * view.w_E)}% of the attention is lost, "
        f"so f is {style.number(100 * view.relative_error)}% of its length away from f_R."
    )


def _at(length: float, turned: float) -> np.ndarray:
    return length * np.array([cos(radians(turned)), sin(radians(turned))])


def _xy(point: np.ndarray) -> str:
    """In pixels, y downwards."""
    return f"{UNIT * point[0]:.1f},{-UNIT * point[1]:.1f}"


def _arc(turned: float, colour: str) -> str:
    radius = 0.3 * UNIT
    path = f"M0,0L{_xy(_at(0.3, 0))}A{radius:g},{radius:g} 0 0 0 {_xy(_at(0.3, turned))}Z"
    return f'<path d="{path}" fill="{colour}" fill-opacity=".16" stroke="{colour}" stroke-width="1.2"/>'


def _line(start: np.ndarray, end: np.ndarray, colour: str, width: float, dash: str = "") -> str:
    return f'<path d="M{_xy(start)}L{_xy(end)}" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dash}"/>'


def _arrow(tip: np.ndarray, colour: str, dash: str) -> str:
    """From the origin; its head is 13 pixels long, or the arrow's whole length."""
    long = float(np.linalg.norm(tip))
    head = min(13 / UNIT, long)
    neck = tip * (1 - head / long) if long > 1e-9 else tip
    turned = -degrees(atan2(tip[1], tip[0]))
    move = f"translate({_xy(tip)})rotate({turned:.1f})scale({head * UNIT / 13:.2f})"
    wing = f'<path d="M0,0L-13,-5L-13,5Z" fill="{colour}" transform="{move}"/>'
    return _line(np.zeros(2), neck, colour, 2.8, dash) + wing


def _labels(view: HeadView, ends: dict[str, np.ndarray], colours: dict[str, str], dark: bool) -> list[str]:
    places = {name: tip * (1 + 0.1 / max(float(np.linalg.norm(tip)), 1e-6)) for name, tip in ends.items()}
    heights = _apart({name: float(place[1]) for name, place in places.items()})
    found = [
        _text((places[name][0], heights[name]), *SYMBOLS[name], colour=colour, size=17, dark=dark, slant="italic")
        for name, colour in colours.items()
    ]
    half = radians(view.angle / 2)
    where = (0.44 * cos(half), 0.44 * sin(half)) if view.angle >= 25 else (0.36, -0.09)
    found.append(_text(where, f"{view.angle:.0f}°", colour=style.ink(dark), size=18, dark=dark))
    error = f"error {style.number(100 * view.relative_error)}%"
    corner = (LEFT + WIDTH - 0.02, TOP - HEIGHT + 0.03)
    return [*found, _text(corner, error, colour=style.alarm(dark), size=15, dark=dark, anchor="end")]


def _apart(heights: dict[str, float]) -> dict[str, float]:
    """Push labels up until none covers the one below."""
    found, below = {}, -pi
    for name in sorted(heights, key=heights.get):
        below = found[name] = max(heights[name], below + ROOM)
    return found


def _text(
    place: tuple[float, float],
    text: str,
    below: str = "",
    *,
    colour: str,
    size: int,
    dark: bool,
    anchor="middle",
    slant="normal",
) -> str:
    """A label with a halo of the page's colour; `below` is set below the line."""
    x, y = UNIT * place[0], -UNIT * place[1] + size / 3
    index = f'<tspan dy="4" font-size="{0.7 * size:.0f}">{below}</tspan>' if below else ""
    halo = f'stroke="{style.paper(dark)}" stroke-width="4" stroke-opacity=".8"'
    font = f'font-size="{size}" font-weight="600" font-style="{slant}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" {halo} {font}>{text}{index}</text>'
