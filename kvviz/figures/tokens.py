"""How much of the text is kept, along the text; and one token in every layer and head."""

from __future__ import annotations

from html import escape

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvviz.analysis.tokens import Shares, Why
from kvviz.figures import style

BINS = 400
"""Longer texts are drawn as means over so many equal parts."""

WIDEST = 6.0
"""Ranks further than 2 to this power from the cutoff all look alike."""


def profile(shares: list[Shares], token: int | None, dark: bool = False) -> go.Figure:
    """Share of heads that keep each part of the text, one line a policy; the chosen token is a vertical line."""
    chosen = style.across(token or 0, style.ink(dark))
    chosen["line"]["dash"] = "dot"
    share = dict(title=dict(text="kept by, % of heads"), range=[-3, 103], tickvals=[0, 50, 100], fixedrange=True)
    return style.draw(
        lines(shares, dark),
        dark,
        height=170,
        margin=dict(l=8, r=8, t=26, b=8),
        hovermode="x unified",
        showlegend=True,
        xaxis=dict(title=dict(text="position in the prompt, tokens"), range=[-1, len(shares[0].counts)]),
        yaxis=share,
        shapes=[] if token is None else [chosen],
    )


def lines(shares: list[Shares], dark: bool = False) -> list[dict]:
    """The traces of `profile`."""
    looks, found = style.looks({each.label: each.policy for each in shares}, dark), []
    for each in shares:
        places, means, size = binned(each.shares)
        look, after = looks[each.label], " and after" * (size > 1)
        found.append(
            dict(
                type="scatter",
                x=places,
                y=100 * means,
                name=escape(each.label),
                mode="lines",
                line=dict(color=look.colour, width=1.6, shape="hvh", dash=look.dash),
                hovertemplate=f"token %{{x:,.0f}}{after}: %{{y:.0f}}% of heads<extra></extra>",
            )
        )
    return found


def binned(values: np.ndarray, bins: int = BINS) -> tuple[np.ndarray, np.ndarray, int]:
    """First positions, means and length of equal parts (the last one may be shorter)."""
    size = -(-len(values) // bins)
    starts = np.arange(0, len(values), size)
    sums = np.add.reduceat(values.astype(np.float64), starts)
    return starts, (sums / np.diff(np.append(starts, len(values)))).astype(np.float32), size


def margin(why: Why) -> np.ndarray:
    """[L, Hkv]: how far the token's rank is inside (above 0) or outside (below) the cutoff, in factors of two."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.log2((why.cutoff + 0.5) / np.maximum(why.rank, 1))
    found = np.where(why.rank == 0, WIDEST, np.clip(found, -WIDEST, WIDEST)).astype(np.float32)
    found[why.sliding] = np.nan
    return found


def why_map(why: Why, groups: int, dark: bool = False) -> go.Figure:
    """Layers from left to right. Above: rank against the cutoff in every KV head, circles where kept, crosses where evicted.
    Below, once later queries are known: how much of their attention the token got in every query head."""
    layers, heads = why.kept.shape
    seen = why.attention is not None
    queries = why.attention.shape[1] if seen else 0
    high = [max(5, heads), max(6, queries)] if seen else [1]
    figure = make_subplots(len(high), 1, shared_xaxes=True, row_heights=high, vertical_spacing=0.1)
    for trace in kv_heads(why, dark):
        figure.add_trace(trace, 1, 1)
    if seen:
        figure.add_trace(_attention(why, dark), 2, 1)
        for edge in range(groups, queries, groups):
            figure.add_hline(y=edge - 0.5, line=dict(color=style.paper(dark), width=2), row=2, col=1)
    height = 160 + 20 * max(5, heads) + (40 + 15 * max(6, queries) if seen else 0)
    style.layout(figure, dark, height=height, showlegend=False, hovermode="closest", margin=dict(l=8, r=8, t=50, b=8))
    plain = dict(showgrid=False, zeroline=False, fixedrange=True)
    step = 1 if heads <= 8 else 4
    figure.update_yaxes(title="KV head", range=[heads - 0.5, -0.5], dtick=step, row=1, col=1, **plain)
    if seen:
        step = 1 if queries <= 4 else 4
        figure.update_yaxes(title="query head", range=[queries - 0.5, -0.5], dtick=step, row=2, col=1, **plain)
    figure.update_xaxes(range=[-0.5, layers - 0.5], **plain)
    figure.update_xaxes(title="layer", dtick=1 if layers <= 12 else 5, row=len(high), col=1)
    return figure


def kv_heads(why: Why, dark: bool = False) -> list[dict]:
    """The first two traces of `why_map`: the KV heads."""
    return [_ranks(why, dark), _marks(why, dark)]


def _ranks(why: Why, dark: bool) -> dict:
    powers, words = (-6, -3, 0, 3, 6), ("1/64", "1/8", "1", "8", "64")
    return dict(
        type="heatmap",
        z=margin(why).T,
        zmin=-WIDEST,
        zmax=WIDEST,
        colorscale=style.diverging(dark),
        xgap=1,
        ygap=1,
        hoverinfo="skip",
        colorbar=_bar("cutoff / rank", powers, words, "left"),
    )


def _marks(why: Why, dark: bool) -> dict:
    layer, head = np.indices(why.kept.shape).reshape(2, -1)
    kept, sliding = why.kept.ravel(), why.sliding[layer]
    shape = np.where(sliding, "line-ew-open", np.where(kept, "circle", "x-thin-open"))
    strong = np.abs(np.nan_to_num(margin(why))).ravel() > WIDEST / 2  # cells whose colour is far from the background's
    inks = np.where(strong, style.paper(dark), style.ink(dark))
    return dict(
        type="scatter",
        x=layer.astype(np.int32),
        y=head.astype(np.int32),
        mode="markers",
        marker=dict(symbol=shape, size=6, color=inks, line=dict(width=1.2, color=inks)),
        selected=dict(marker=dict(opacity=1)),
        unselected=dict(marker=dict(opacity=1)),
        customdata=np.stack([layer, head], axis=1).astype(np.int32),
        text=[_standing(why, i, h) for i, h in zip(layer, head, strict=True)],
        hovertemplate="layer %{x}, KV head %{y}<br>%{text}<extra></extra>",
        name="heads",
    )


def _standing(why: Why, layer: int, head: int) -> str:
    """A head's verdict in words."""
    if why.sliding[layer]:
        return "sliding window, never evicted"
    if why.rank[layer, head] == 0:
        return "kept: protected, it is never evicted"
    word = "kept" if why.kept[layer, head] else "evicted"
    return f"{word}: rank {why.rank[layer, head]:,} of {why.candidates:,}, the first {why.cutoff[layer, head]:,} stay"


def _attention(why: Why, dark: bool) -> go.Heatmap:
    share = 100 * why.attention.T
    words = [
        [f"{style.number(float(v))}% of the attention, rank {r:,}" for v, r in zip(*row, strict=True)]
        for row in zip(share, why.attention_rank.T, strict=True)
    ]
    top = float(np.nanmax(share)) if np.isfinite(share).any() else 1.0
    high = max(np.log10(max(top, 1e-9)), -2.0)
    ticks = np.arange(np.ceil(high - 4), np.floor(high) + 1)
    return go.Heatmap(
        z=np.log10(np.maximum(share, 1e-9)),
        zmin=high - 4,
        zmax=high,
        colorscale=style.SEQUENTIAL,
        xgap=1,
        ygap=1,
        text=words,
        hovertemplate="layer %{x}, query head %{y}<br>%{text}<extra></extra>",
        colorbar=_bar("attention it got", ticks, [f"{10.0**t:g}%" for t in ticks], "right"),
    )


def _bar(title: str, values, words, side: str) -> dict:
    """A scale above the map, at its left or right end."""
    return dict(
        title=dict(text=title, side="top", font=dict(size=12)),
        orientation="h",
        tickvals=list(values),
        ticktext=list(words),
        thickness=8,
        len=0.42,
        x=0 if side == "left" else 1,
        xanchor=side,
        y=1.02,
        yanchor="bottom",
        ticklabelposition="outside top",
        tickfont=dict(size=11),
        outlinewidth=0,
    )


def why_alt(why: Why, text: str) -> str:
    """What the map shows, in a sentence."""
    open_heads = why.kept[~why.sliding]
    return (
        f"Token {why.token:,}, {text!r}, by layer and KV head: kept in {int(open_heads.sum()):,} of {open_heads.size:,} heads; "
        "colour is the rank against the cutoff."
    )


def profile_alt(shares: list[Shares]) -> str:
    """What the profile shows, in a sentence."""
    parts = [f"{each.label} keeps {100 * each.shares.mean():.0f}% on average" for each in shares]
    return f"Share of heads that keep each token along the prompt: {'; '.join(parts)}."
