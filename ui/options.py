"""A policy's options, generated from its scorer's fields: every one with its published value and one click back to it."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from functools import cache, partial
from typing import Any

import streamlit as st

from kvviz.allocation import ALLOCATIONS, Adaptive, Pyramid
from kvviz.experiment import MAX_POLICIES
from kvviz.policies import METHODS
from kvviz.policies.capkv import CHOICES
from kvviz.policies.momentkv import ORDERS
from kvviz.policies.policy import Policy, policy
from kvviz.policies.snapkv import KERNELS
from ui import html
from ui.controls import shows

WORDS = {**CHOICES, "order_of_eviction": ORDERS, "pooling": tuple(KERNELS), "allocation": tuple(ALLOCATIONS)}
"""Options that are one of several words."""

SYMBOLS = {"tau": "τ", "window": "w", "partition": "p", "epsilon": "ε", "alpha": "α", "beta": "β"}
"""The papers' symbols."""

HELP = {
    "allocation": "How the budget is spread: the same for every head; more for the lower layers (PyramidKV); or where the "
    "heads of a layer compete for it (Ada-KV).",
    "alpha": "Share of the even budget that each head is sure of, α in Ada-KV.",
    "beta": "How steeply the layers' budgets fall, β in PyramidKV.",
    "correction": "Order of the moments that stand in for what was evicted: their mean value (0), also their linear part (1).",
    "partition": "How much of the evicted keys' variance enters the estimate of their weight, p: 0 is the paper's lower "
    "bound, 1 is exact for Gaussian keys.",
    "bits": "Bits of what is kept: 16 stands for the model's own precision, 4 for HQQ.",
    "sinks": "First entries that are never evicted.",
    "recent": "Last entries that are never evicted; below 1 it is a share of the budget.",
}
STEPS = {"tau": 0.5, "epsilon": 0.001, "partition": 0.05, "alpha": 0.05, "beta": 1.0, "kernel": 2}
DRAGGED = {"tau": 20.0, "partition": 1.0, "alpha": 1.0}
"""Options with a slider, from 0 to this or as far as a link says."""
NO_CORRECTION = "none"


def slot_title(slot: str) -> str:
    """The name of a policy's place in the sidebar: "CapKV", or "CapKV 2"."""
    name, _, number = slot.partition("-")
    return METHODS[name].title + (f" {number}" if number else "")


def published(slot: str) -> Policy:
    """A slot's policy as it was published."""
    return policy(slot.partition("-")[0])


def popover(slot: str) -> None:
    """The folded options of a chosen policy."""
    state = st.session_state
    mine: Policy = state._slots[slot]
    changes = mine.label.removeprefix(mine.title).strip(" ()")
    with st.popover(slot_title(slot), key=f"options_{slot}", width="stretch", on_change="rerun") as place:
        if place.open:
            _inside(slot, mine)
    if changes:  # not part of the button's name: with another name it would be another button, and close
        st.caption(changes)


def _inside(slot: str, mine: Policy) -> None:
    """What the method does, and all its options. Drawn only while it is open: that halves what a page has to send."""
    state = st.session_state
    st.html(html.method(METHODS[mine.name]))
    if METHODS[mine.name].formula:
        st.latex(METHODS[mine.name].formula)
    if error := state.get(f"_error_{slot}"):
        st.error(html.plain(error))
    for name, value in _values(mine).items():
        _option(slot, name, value, _values(published(slot)).get(name, value))
    with st.container(horizontal=True):
        st.button(
            "As published",
            key=f"{slot}:reset",
            on_click=_reset,
            args=(slot,),
            disabled=not mine.changes(),
            help="All options of this policy back to their published values.",
        )
        full = len(state.chosen) >= MAX_POLICIES
        st.button(
            "Compare with itself",
            key=f"{slot}:twice",
            on_click=_twice,
            args=(slot,),
            disabled=full,
            help="A second column of the same method, to be given other options.",
        )


def _values(mine: Policy) -> dict[str, Any]:
    """Every option with its value: the scorer's, then what any policy has."""
    own = {f.name: getattr(mine.scorer, f.name) for f in fields(mine.scorer)}
    shared = {"allocation": mine.allocation.name}
    if isinstance(mine.allocation, Adaptive):
        shared["alpha"] = mine.allocation.alpha
    if isinstance(mine.allocation, Pyramid):
        shared["beta"] = mine.allocation.beta
    shared["correction"] = mine.correction
    if mine.correction is not None:
        shared["partition"] = mine.partition
    shared |= {"bits": mine.bits}
    return own | {key: value for key, value in shared.items() if key not in own}


def _option(slot: str, name: str, value: Any, usual: Any) -> None:
    """One option with the way back to its published value."""
    key = f"{slot}:{name}"
    value = float(value) if isinstance(usual, float) else value
    symbol = f" {SYMBOLS[name]}" if name in SYMBOLS else ""
    label = f"{name.replace('_', ' ').capitalize()}{symbol}"
    left, right = st.columns([6, 1], vertical_alignment="bottom", gap="small")
    with left:
        how = {"given": "default" if name in ("correction", "bits") else "value", "choices": WORDS.get(name)}
        common = shows(key, _shown(name, value), change=partial(_changed, slot, name), **how)
        common["help"] = _help(slot, name)
        _control(f"{label}, published {_shown(name, usual)}", name, value, common)
    right.button(
        "",
        icon=":material/undo:",
        key=f"{key}:undo",
        type="tertiary",
        help=f"Back to the published value, {_shown(name, usual)}",
        disabled=value == usual,
        on_click=_set,
        args=(slot, name, usual),
    )


def _control(label: str, name: str, value: Any, common: dict[str, Any]) -> None:
    if name == "correction":
        st.segmented_control(label, (NO_CORRECTION, "0", "1"), required=True, **common)
    elif name == "bits":
        st.segmented_control(label, ("16", "4"), required=True, **common)
    elif name in WORDS:
        st.selectbox(label, WORDS[name], **common)
    elif isinstance(value, bool):
        st.toggle(label, **common)
    elif name in DRAGGED:
        st.slider(label, 0.0, max(DRAGGED[name], float(value)), step=STEPS[name], format="%.3g", **common)
    elif isinstance(value, float):
        st.number_input(label, 0.0, None, step=STEPS.get(name, 0.1), format="%.3g", **common)
    else:
        st.number_input(label, 0, None, step=STEPS.get(name, 1), **common)


def dragged(mine: Policy) -> list[tuple[str, float, list[float]]]:
    """The options that have a slider: name, value, and every position of the slider."""
    found = []
    for name, value in _values(mine).items():
        if name in DRAGGED:
            here, step = float(value), STEPS[name]
            steps = (round(i * step, 6) for i in range(round(max(DRAGGED[name], here) / step) + 1))
            found.append((name, here, sorted({here, *steps})))
    return found


def _shown(name: str, value: Any) -> Any:
    """A value as its control has it."""
    if name == "correction":
        return NO_CORRECTION if value is None else str(value)
    if name in DRAGGED:
        return float(value)
    return str(value) if name == "bits" else value


def _changed(slot: str, name: str, value: Any) -> None:
    if name == "correction":
        value = None if value == NO_CORRECTION else int(value)
    if name == "bits":
        value = int(value)
    _set(slot, name, value)


def _set(slot: str, name: str, value: Any) -> None:
    """Give an option a value, unless the method refuses it."""
    mine: Policy = st.session_state._slots[slot]
    changes = mine.changes() | {name: value}
    if name == "pooling":
        changes.pop("kernel", None)  # each pooling has its own
    if name == "allocation":
        changes = {key: v for key, v in changes.items() if key not in ("alpha", "beta")}
    try:
        st.session_state._slots[slot] = policy(mine.name, **changes)
        st.session_state.pop(f"_error_{slot}", None)
    except ValueError as error:
        st.session_state[f"_error_{slot}"] = str(error)


def _reset(slot: str) -> None:
    st.session_state._slots[slot] = published(slot)
    st.session_state.pop(f"_error_{slot}", None)


def _twice(slot: str) -> None:
    name = slot.partition("-")[0]
    new = next(f"{name}-{n}" for n in range(2, 100) if f"{name}-{n}" not in st.session_state.chosen)
    st.session_state._slots[new] = st.session_state._slots[slot]
    at = st.session_state.chosen.index(slot) + 1
    st.session_state.chosen = [*st.session_state.chosen[:at], new, *st.session_state.chosen[at:]]


def _help(slot: str, name: str) -> str:
    return _documented(slot.partition("-")[0]).get(name) or HELP.get(name, "")


@cache
def _documented(name: str) -> dict[str, str]:
    """What the scorers' docstrings say about their options."""
    found: dict[str, str] = {}
    for kind in reversed(METHODS[name].__mro__):
        _, _, listed = (inspect.getdoc(kind) or "").partition("Attributes:")
        for option, text in re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", listed, flags=re.M):
            words = " ".join(text.split())
            found[option] = words[:1].upper() + words[1:]
    return found
