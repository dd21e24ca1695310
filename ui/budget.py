"""The budget: one slider on a log scale, three units, the papers' stops."""

from __future__ import annotations

import streamlit as st

from kvviz.experiment import ENTRIES, MIB, SHARE, UNITS, Experiment, Shape, Size
from ui.controls import shows
from ui.state import experiment, set_size

STOPS = {ENTRIES: (64, 128, 256, 512, 1024), SHARE: (25, 50, 75, 90)}
"""What the papers measured at."""

STEPS = 4
"""Slider positions from one power of two to the next."""

UNKNOWN = 4096
"""Stands for the prompt's length until the model is loaded."""


def section() -> None:
    """Unit, slider, stops, and the same budget in the other two units."""
    made = experiment()
    with st.expander("Budget", type="compact", expanded=True, key="part_budget"):
        known = bool(made.n_tokens and made.shape)
        units = UNITS if known else (ENTRIES,) if made.unit == ENTRIES else (ENTRIES, made.unit)
        st.segmented_control(
            "Unit",
            units,
            **shows("unit", made.unit, change=_convert, given="default"),
            required=True,
            width="stretch",
            label_visibility="collapsed",
            help="Entries a head, averaged over the model, sinks and window included; the share of them that is removed (the "
            "papers' compression ratio); or MiB for each policy, in which MomentKV's statistics count.",
        )
        _slider(made)
        _stops(made)
        st.caption(words(made))


def _slider(made: Experiment) -> None:
    choices = [str(size) for size in grid(made.size, made.n_tokens or UNKNOWN, made.shape)]
    st.select_slider(
        "Budget",
        choices,
        **shows("budget", str(made.size), change=lambda text: set_size(Size.parse(text))),
        format_func=label,
        label_visibility="collapsed",
        help="How much of the prompt's cache each policy may keep. Log scale.",
    )


def label(text: str) -> str:
    """A slider position as people read it."""
    return f"{int(text):,}" if text.isdecimal() else text.replace("MiB", " MiB")


def _stops(made: Experiment) -> None:
    """The papers' budgets, one click each."""
    stops = [stop for stop in STOPS.get(made.unit, ()) if made.unit == SHARE or stop <= (made.n_tokens or UNKNOWN)]
    if stops:
        here = next((stop for stop in stops if stop == made.size.amount), None)  # the stop itself: 64, not 64.0
        st.pills(
            "Budgets of the papers",
            stops,
            **shows("stop", here, change=lambda stop: stop and set_size(Size(stop, made.unit)), given="default"),
            format_func=lambda stop: f"{stop}%" if made.unit == SHARE else f"{stop:,}",
            label_visibility="collapsed",
            width="stretch",
            help="Budgets at which the papers measured, one click each.",
        )


def _convert(unit: str) -> None:
    made = experiment()
    if made.n_tokens and made.shape:
        set_size(made.size.to(unit, made.n_tokens, made.shape))
    elif unit == ENTRIES:
        set_size(Size(256))


def grid(size: Size, n_tokens: int, shape: Shape | None) -> list[Size]:
    """The slider's positions: a log grid from a few entries to all of them, the stops, and the present budget."""
    entries = {round(2 ** (4 + step / STEPS)) for step in range(20 * STEPS)} | set(STOPS[ENTRIES])
    entries = sorted(e for e in entries if e < n_tokens)
    if size.unit == ENTRIES:
        found = {Size(e) for e in [*entries, n_tokens]}
    elif size.unit == SHARE:
        found = {Size(share, SHARE) for share in (*range(0, 90, 5), *range(90, 100))} | {
            Size(97.5, SHARE),
            Size(99.5, SHARE),
        }
    elif shape is not None:
        found = {Size.of(e, MIB, n_tokens, shape) for e in [*entries, n_tokens]}
    else:
        found = set()
    found = {f.amount: f for f in found} | {size.amount: size}
    return sorted(found.values(), key=lambda f: -f.amount if f.unit == SHARE else f.amount)


def words(made: Experiment) -> str:
    """The budget in all three units: "256 entries a head = 82% removed = 5.6 of 31 MiB"."""
    n, shape = made.n_tokens, made.shape
    if not n or shape is None:
        return f"{made.budget:,} entries a head" if made.unit == ENTRIES else "Known when the model is loaded."
    if made.budget >= n:
        return f"{made.budget:,} entries a head cover all {n:,} tokens: nothing is evicted."
    share = Size.of(made.budget, SHARE, n, shape).amount
    kept, full = shape.bytes(made.budget) / 2**20, shape.bytes(n) / 2**20
    return f"{made.budget:,} entries a head = {share:.2g}% removed = {kept:.2g} of {full:.2g} MiB"
