"""The figures of the tour: each one thing, in the look of all others."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go

from kvviz.figures import style
from kvviz.figures.timeline import visible
from kvviz.tour import TAUS, Correction, Growth, Needle, Price, Protection

HEIGHT = 330


def growth(found: Growth, dark: bool = False) -> go.Figure:
    """MiB of the cache against tokens read, with the present place."""
    tokens = np.array([0, found.n_tokens])
    here, mib = found.read, found.mib(found.read)
    line = dict(type="scatter", mode="lines", x=tokens, y=[found.mib(int(t)) for t in tokens], hoverinfo="skip")
    line |= dict(line=dict(color=style.muted(dark), width=1.5, dash="4px,4px"), showlegend=False)
    done = dict(type="scatter", mode="lines", x=[0, here], y=[0, mib], fill="tozeroy", showlegend=False)
    done |= dict(line=dict(color=style.colour("capkv", dark), width=3), hoverinfo="skip")
    done |= dict(fillcolor=style.transparent(style.colour("capkv", dark), 0.15))
    note = dict(x=here, y=mib, text=f"<b>{style.number(mib, 3)} MiB</b>", showarrow=False, yshift=14, xanchor="right")
    note |= dict(font=dict(color=style.ink(dark), size=15))
    point = dict(type="scatter", mode="markers", x=[here], y=[mib], showlegend=False)
    point |= dict(marker=dict(size=11, color=style.colour("capkv", dark)))
    point |= dict(hovertemplate="%{x:,d} tokens: %{y:.3g} MiB<extra></extra>")
    return style.draw(
        [line, done, point],
        dark,
        height=HEIGHT,
        annotations=[note],
        xaxis=dict(title=dict(text="tokens read"), range=[0, found.n_tokens * 1.03], fixedrange=True),
        yaxis=dict(
            title=dict(text="keys and values, MiB"), range=[0, found.mib(found.n_tokens) * 1.12], fixedrange=True
        ),
    )


def growth_alt(found: Growth) -> str:
    """What it shows, in a sentence."""
    return (
        f"The cache grows in a straight line with the tokens read: {found.read:,} tokens take "
        f"{style.number(found.mib(found.read), 3)} MiB, all {found.n_tokens:,} take "
        f"{style.number(found.mib(found.n_tokens), 3)} MiB."
    )


def needle(found: Needle, dark: bool = False) -> go.Figure:
    """Share of heads that keep each token of the needle's sentence, one bar a policy."""
    words = [escape(visible(word)) for word in found.words]
    places = np.arange(len(words))
    traces = []
    for label, shares in found.kept.items():
        counts = np.rint(shares * found.heads).astype(int)
        bar = dict(type="bar", x=places, y=100 * shares, name=escape(label), customdata=counts)
        bar |= dict(marker=dict(color=style.colour(found.policies[label], dark), **_pattern(found.policies[label])))
        bar |= dict(text=counts, textposition="outside", textfont=dict(size=11), textangle=0, cliponaxis=False)
        bar |= dict(
            hovertemplate=f"{escape(label)}: %{{customdata}} of {found.heads} heads (%{{y:.0f}}%)<extra></extra>"
        )
        traces.append(bar)
    box = dict(
        type="rect", x0=found.digits.start - 0.5, x1=found.digits.stop - 0.5, y0=0, y1=1, yref="paper", layer="below"
    )
    box |= dict(fillcolor=style.transparent(style.muted(dark), 0.13), line=dict(width=0))
    note = dict(x=(found.digits.start + found.digits.stop - 1) / 2, y=1, yref="paper", yanchor="top", showarrow=False)
    note |= dict(text="the number", font=dict(color=style.muted(dark), size=12))
    top = max(40.0, *(110 * float(shares.max()) for shares in found.kept.values()))
    return style.draw(
        traces,
        dark,
        height=HEIGHT,
        barmode="group",
        bargap=0.25,
        shapes=[box],
        annotations=[note],
        xaxis=dict(
            tickvals=places, ticktext=words, tickangle=-60, tickfont=dict(family="ui-monospace, monospace", size=13)
        ),
        yaxis=dict(title=dict(text="heads that keep it, %"), range=[0, min(top, 108)], fixedrange=True),
    )


def needle_alt(found: Needle) -> str:
    """What it shows, in a sentence."""
    means = [f"{label} {100 * shares[list(found.digits)].mean():.0f}%" for label, shares in found.kept.items()]
    return f"Share of the {found.heads} heads that keep a digit at {found.budget:,} entries a head, mean: {', '.join(means)}."


def _pattern(policy: str) -> dict:
    """Hatching that tells bars apart without colour."""
    shape = {"snapkv": "/", "momentkv": "/"}.get(policy, "")
    return dict(pattern=dict(shape=shape, size=6, solidity=0.35))


def protection(found: Protection, on: bool, dark: bool = False) -> go.Figure:
    """Mean error of each method, protected or not; the other of the two as an outline."""
    labels = list(found.errors)
    chosen = [100 * found.errors[label][on] for label in labels]
    other = [100 * found.errors[label][not on] for label in labels]
    colours = [style.colour(found.policies[label], dark) for label in labels]
    ghost = dict(type="bar", x=labels, y=other, name="not protected" if on else "protected")
    ghost |= dict(marker=dict(color="rgba(0,0,0,0)", line=dict(color=style.muted(dark), width=1.2)))
    ghost |= dict(hovertemplate="%{x}: %{y:.0f}%<extra></extra>")
    bar = dict(type="bar", x=labels, y=chosen, name="protected" if on else "not protected", marker=dict(color=colours))
    bar |= dict(text=[f"{value:.0f}%" for value in chosen], textposition="outside", width=0.42)
    bar |= dict(hovertemplate="%{x}: %{y:.0f}%<extra></extra>", cliponaxis=False)
    top = 112 * max(max(pair) for pair in found.errors.values())
    return style.draw(
        [ghost, bar],
        dark,
        height=HEIGHT,
        barmode="overlay",
        bargap=0.45,
        showlegend=False,
        yaxis=dict(title=dict(text="mean error of a head's output, %"), range=[0, top], fixedrange=True),
        xaxis=dict(fixedrange=True),
    )


def protection_alt(found: Protection) -> str:
    """What it shows, in a sentence."""
    parts = [f"{label} {100 * a:.0f}% and {100 * b:.0f}%" for label, (a, b) in found.errors.items()]
    return f"Mean error without and with protected sinks and recent tokens: {', '.join(parts)}."


def taus(capacity: np.ndarray, attention: np.ndarray, tau: float, dark: bool = False) -> go.Figure:
    """Capacity and attention kept against τ, the chosen one marked. The axis has the stops at equal distances."""
    at, places = TAUS.index(tau), np.arange(len(TAUS))
    traces = []
    for name, values, ink, dash, shape in (
        ("capacity U: variety", capacity, style.colour("capkv", dark), "solid", "circle"),
        ("attention of the answer", attention, style.ink(dark), "6px,3px", "square"),
    ):
        sizes = np.where(places == at, 13, 7)
        line = dict(type="scatter", mode="lines+markers", x=places, y=100 * values, name=name)
        line |= dict(line=dict(color=ink, width=2.5, dash=dash), marker=dict(size=sizes, symbol=shape, color=ink))
        traces.append(line | dict(hovertemplate=f"{name}: %{{y:.0f}}%<extra></extra>"))
    return style.draw(
        traces,
        dark,
        height=HEIGHT,
        shapes=[style.across(at, style.muted(dark))],
        xaxis=dict(title=dict(text="τ"), tickvals=places, ticktext=[f"{t:g}" for t in TAUS], fixedrange=True),
        yaxis=dict(title=dict(text="kept, % of the full cache's"), range=[0, 100], fixedrange=True),
    )


def taus_alt(capacity: np.ndarray, attention: np.ndarray) -> str:
    """What it shows, in a sentence."""
    return (
        f"From τ 0 to 20 the kept share of capacity U goes from {100 * capacity[0]:.0f}% to {100 * capacity[-1]:.0f}%, that of "
        f"attention from {100 * attention[0]:.0f}% to {100 * attention[-1]:.0f}%."
    )


def correction(found: Correction, on: bool, dark: bool = False) -> go.Figure:
    """MomentKV's error by layer, without the correction and, when it is on, with it."""
    top = 115 * float(np.nanmax(found.before))
    traces = [_layers(found.layers, found.before, "without correction", style.muted(dark), "4px,3px", "circle-open")]
    if on:
        ink = style.colour("momentkv", dark)
        traces.append(_layers(found.layers, found.after, "with correction", ink, "solid", style.symbol("momentkv")))
    return style.draw(
        traces,
        dark,
        height=HEIGHT,
        showlegend=True,
        xaxis=dict(title=dict(text="layer"), fixedrange=True),
        yaxis=dict(title=dict(text="error, mean over heads, %"), range=[0, top], fixedrange=True),
    )


def _layers(layers: Sequence[int], values: np.ndarray, name: str, ink: str, dash: str, shape: str) -> dict:
    line = dict(type="scatter", mode="lines+markers", x=np.asarray(layers), y=100 * values, name=name)
    line |= dict(line=dict(color=ink, width=2, dash=dash), marker=dict(size=7, symbol=shape, color=ink))
    return line | dict(hovertemplate=f"layer %{{x}}, {name}: %{{y:.0f}}%<extra></extra>")


def correction_alt(found: Correction) -> str:
    """What it shows, in a sentence."""
    before, after = (100 * float(np.nanmean(values)) for values in (found.before, found.after))
    return f"MomentKV's error by layer; mean {before:.0f}% without the correction, {after:.0f}% with it."


def price(found: Price, dark: bool = False) -> go.Figure:
    """MiB of entries and of statistics, one bar a policy."""
    labels = list(found.entries)
    inks = [style.colour(label.lower(), dark) for label in labels]
    texts = [f"{count:,} entries a head" for count in found.entries.values()]
    stored = dict(type="bar", y=labels, x=list(found.stored.values()), orientation="h", name="keys and values")
    stored |= dict(marker=dict(color=inks), text=texts, textposition="inside", insidetextanchor="start", textangle=0)
    stored |= dict(insidetextfont=dict(color="#FFFFFF" if not dark else "#15181C", size=14))
    extra = dict(
        type="bar", y=labels, x=list(found.statistics.values()), orientation="h", name="statistics of the evicted"
    )
    extra |= dict(marker=dict(color=style.estimate(dark), pattern=dict(shape="/", size=6, solidity=0.4)))
    for bar in (stored, extra):
        bar |= dict(hovertemplate="%{y}: %{x:.3g} MiB<extra></extra>")
    return style.draw(
        [stored, extra],
        dark,
        height=HEIGHT - 70,
        barmode="stack",
        bargap=0.4,
        legend=dict(traceorder="normal"),
        xaxis=dict(title=dict(text="MiB"), fixedrange=True),
        yaxis=dict(autorange="reversed", fixedrange=True),
    )


def price_alt(found: Price) -> str:
    """What it shows, in a sentence."""
    parts = [
        f"{label} {count:,} entries, {style.number(found.stored[label] + found.statistics[label], 3)} MiB"
        for label, count in found.entries.items()
    ]
    return f"Entries a head and memory: {'; '.join(parts)}."
