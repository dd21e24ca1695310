"""What stands below the cards: the timeline, the diff of any two, what was kept and what it cost, entries by layer and head."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import streamlit as st

from kvviz import diff
from kvviz.figures.counts import head_counts
from kvviz.figures.style import number
from kvviz.figures.timeline import kl_timeline
from kvviz.runs import Row, Run
from ui import cards
from ui.cards import readable
from ui.frame import chart, is_dark
from ui.html import both, plain

MIB = 2**20
INLINE, BESIDE = "inline", "side by side"


def timeline(run: Run) -> None:
    """KL along the full cache's own words."""
    st.subheader("Distance from the full cache, word by word", anchor=False)
    st.caption(
        "Every policy reads the full cache's own words and is asked at each step what comes next. KL is in nats on a log scale; "
        "0 is drawn at the bottom. All layers and heads act together here. Point at a step for the likeliest words."
    )
    if any(row.kl for row in run.rows if row is not run.reference):
        chart(kl_timeline(run, is_dark()), key="timeline", alt=_timeline_alt(run))


def _timeline_alt(run: Run) -> str:
    means = [
        f"{row.label} {row.mean_kl:.2g}" for row in run.rows if row is not run.reference and row.mean_kl is not None
    ]
    return f"KL divergence to the full cache at each of its {len(run.reference.kl)} tokens; mean in nats: {', '.join(means)}"


def token_diff(run: Run) -> None:
    """Two outputs token by token."""
    st.subheader("Token diff", anchor=False)
    labels = [row.label for row in run.rows]
    with st.container(horizontal=True, vertical_alignment="bottom", key="diff_controls"):
        first = st.selectbox(
            "From",
            range(len(labels)),
            format_func=labels.__getitem__,
            key="diff_from",
            width=260,
            help="The text that the other one is compared with.",
        )
        second = st.selectbox(
            "To",
            range(len(labels)),
            format_func=labels.__getitem__,
            key="diff_to",
            width=260,
            index=min(1, len(labels) - 1),
            help="The text that is compared with it.",
        )
        how = st.segmented_control(
            "Shown",
            (BESIDE, INLINE),
            key="diff_how",
            default=BESIDE,
            required=True,
            help="Two texts beside each other, or one with both marked.",
        )
    a, b = run.rows[first], run.rows[second]
    stretches = diff.parts(a.token_ids, b.token_ids)
    st.html(_inline(a, b, stretches) if how == INLINE else _beside(a, b, stretches))
    st.caption(
        f"{diff.shared(a.token_ids, b.token_ids):.0%} of the tokens are shared, in the same order. Struck through: only "
        f"in {plain(a.label)}. Underlined: only in {plain(b.label)}."
    )


def _inline(a: Row, b: Row, stretches: list[diff.Part]) -> str:
    first, second = readable(a), readable(b)
    inner = "".join(
        _plain(first, part.first)
        if part.kind == diff.EQUAL
        else _marked("del", first, part.first) + _marked("ins", second, part.second)
        for part in stretches
    )
    return _frame(a, b, f'<div class="kv-text">{inner}</div>')


def side_by_side(a: Row, b: Row, names: tuple[str, str]) -> str:
    """Two rows' texts with what differs marked, under names of their own."""
    return _beside(a, b, diff.parts(a.token_ids, b.token_ids), names)


def _beside(a: Row, b: Row, stretches: list[diff.Part], names: tuple[str, str] | None = None) -> str:
    sides = []
    for row, tag, side, name in zip(
        (a, b), ("del", "ins"), ("first", "second"), names or (a.label, b.label), strict=True
    ):
        pieces = readable(row)
        text = "".join(
            _plain(pieces, getattr(part, side))
            if part.kind == diff.EQUAL
            else _marked(tag, pieces, getattr(part, side))
            for part in stretches
        )
        head = f'<span class="kv-dot" style="--kv-c:{both(row.policy)}"></span><b>{escape(name)}</b>'
        sides.append(f'<div><div class="kv-small">{head}</div><div class="kv-text">{text}</div></div>')
    return _frame(a, b, "".join(sides))


def _frame(a: Row, b: Row, inner: str) -> str:
    return f'<div class="kv-diff" style="--kv-a:{both(a.policy)};--kv-b:{both(b.policy)}">{inner}</div>'


def _plain(pieces: list[str], where: range) -> str:
    return escape("".join(pieces[i] for i in where))


def _marked(tag: str, pieces: list[str], where: range) -> str:
    text = _plain(pieces, where)
    return f"<{tag}>{text}</{tag}>" if text else ""


FACTS = (
    ("entries a head", "", "Mean over all layers that can be evicted, sinks and window included.", cards.entries),
    ("memory", "MiB", "Keys, values and moment statistics of the prompt.", lambda r: number(r.bytes / MIB, 3)),
    ("of it moments", "MiB", "MomentKV's statistics.", lambda r: number(r.moments_bytes / MIB, 3)),
    ("sinks", "entries", "First entries that were never evicted.", lambda r: f"{r.sinks:,}"),
    ("recent", "entries", "Last entries that were never evicted.", lambda r: f"{r.recent:,}"),
    ("mean KL", "nats", "KL to the full cache, mean over its own words.", lambda r: number(r.mean_kl)),
    ("first difference", "token", "First token that is not the full cache's.", lambda r: first(r.first_difference)),
    ("written", "tokens", "How many tokens it wrote.", lambda r: f"{len(r.token_ids):,}"),
    ("prefill", "s", "Reading the prompt, once for all policies.", lambda r: seconds(r, "prefill")),
    ("evict", "s", "Scores, allocation, selection, moments.", lambda r: seconds(r, "evict")),
    ("decode", "s", "Until this row ended. Rows write together, as one batch.", lambda r: seconds(r, "decode")),
    ("speed", "tokens/s", "Tokens written over the decode time.", lambda r: number(r.tokens_per_second, 3)),
)
"""Name, unit, explanation and value of every line of the table."""

FULL_HAS_NONE = ("mean KL", "first difference", "sinks", "recent", "of it moments")
"""Lines that mean nothing for the full cache."""


def first(index: int | None) -> str:
    """The number of the first token that differs."""
    return "none" if index is None else f"{index + 1:,}"


def seconds(row: Row, stage: str) -> str:
    """How long a stage took."""
    return number(row.seconds.get(stage), 2)


def costs(run: Run) -> None:
    """What was really kept, and what it cost: a line a fact, a column a policy."""
    st.subheader("What was kept, what it cost", anchor=False)
    head = "".join(
        f'<th scope="col"><span class="kv-dot" style="--kv-c:{both(row.policy)}"></span>{escape(row.label)}</th>'
        for row in run.rows
    )
    lines = "".join(_line(run, *fact) for fact in FACTS)
    st.html(
        f'<div class="kv-scroll"><table class="kv-table" data-testid="kv-costs"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _line(run: Run, name: str, unit: str, about: str, value: Callable[[Row], str]) -> str:
    cells = "".join(
        f"<td>{'' if row is run.reference and name in FULL_HAS_NONE else escape(value(row))}</td>" for row in run.rows
    )
    of = f' <span class="kv-unit">{unit}</span>' if unit else ""
    return f'<tr><th scope="row" title="{escape(about)}">{name}{of}</th>{cells}</tr>'


def counts(run: Run) -> None:
    """Entries by layer and head, folded."""
    folded = st.expander("Entries by layer and head", key="counts", on_change="rerun")
    if folded.open and len(run.rows) > 1 and all(row.head_counts for row in run.rows):
        with folded:
            chart(
                head_counts(run, is_dark()), key="head_counts", alt="Entries kept in each layer and KV head, by policy"
            )
            st.caption("Prompt entries that each KV head of each layer kept. A uniform budget is one colour.")
