"""Why a token stays or goes: the verdict in words, and its score part by part."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from kvviz.analysis.tokens import Fact, Shares, Why
from kvviz.figures.style import number
from ui import tokens


def verdict(shares: Shares, why: Why, layer: int, kv_head: int) -> str:
    """What happened to the token, in words."""
    if shares.always[why.token]:
        return f"{shares.label} never evicts it: it is protected, or the budget holds everything."
    kept = f"{shares.label} keeps it in {shares.counts[why.token]:,} of {shares.heads:,} heads of all layers"
    if why.sliding[layer]:
        return f"{kept}. Layer {layer} has a sliding window and is never evicted."
    rank, stay = why.rank[layer, kv_head], why.cutoff[layer, kv_head]
    word = "kept" if why.kept[layer, kv_head] else "evicted"
    return (
        f"{kept}. In layer {layer}, KV head {kv_head}, it has rank {rank:,} of {why.candidates:,} that may leave, and the first "
        f"{stay:,} stay: {word}."
    )


def parts(facts: Sequence[Fact], why: Why, layer: int, head: int, n_tokens: int) -> None:
    """The score in one head, part by part, and what the continuation really looked at."""
    rows = [
        (f"{f.name}, {f.symbol}", number(f.value, 3), "not scored" if f.rank is None else f"{f.rank:,}") for f in facts
    ]
    if why.attention is not None:
        share, rank = why.attention[layer, head], why.attention_rank[layer, head]
        rows.append(("attention it really got", f"{number(100 * float(share))}%", f"{rank:,}"))
    st.html(tokens.table((f"layer {layer}, head {head}", "value", f"rank of {n_tokens:,}"), rows))
    st.caption(" ".join(f"{f.name[:1].upper()}{f.name[1:]}: {f.help}" for f in facts))
