"""Figures while a slider is moved: what they are to show at its other positions, so that the browser can show it at once.

Sliders are those of the sidebar, and the lines at the budget, which can be dragged by their handles. Each function here belongs
to a page and is called last on it, since what it does is needed only with the next move. It works for a second at most, the
nearest positions first; while the person does nothing, the browser asks for more until all are known. A small component of our
own, which has nothing to show itself, changes the figures until the server's answer is there.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, zip_longest
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import plotly.graph_objects as go
import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from kvviz.analysis import CAPACITIES, Analysis, HeadView, Pace, Setting, tokens
from kvviz.experiment import Experiment
from kvviz.figures import capacity, heads, values
from kvviz.figures import tokens as token_figures
from kvviz.policies.policy import Policy, policy
from ui import budget, options
from ui import tokens as text
from ui.controls import key_of
from ui.host import host
from ui.state import experiment, set_size

SECONDS = 1.0
"""Spent at most, each time, on what is not known yet."""

REST, SOON, LATER = 1500, 500, 5000
"""Milliseconds without a move after which the browser asks for more: at first, then, and where others are at work."""

Positions = dict[str, dict[str, Experiment]]
"""Key of a slider -> its positions as they are written -> the experiment there."""

Numbers = dict[tuple[str, int, str], np.ndarray]
"""What may move in a figure: ("data" or "annotations", index, field) -> float32, or words for `LOOKS`."""

LOOKS = ("symbol", "color")
"""Fields of each single marker."""

_component = st.components.v2.component("kvviz_scrub", js=(Path(__file__).parent / "scrub.js").read_text())
_AHEAD = Lock()  # of all sessions one at a time works ahead


def plane(numbers: Analysis, view: HeadView, made: Experiment, dark: bool, facts: Callable[[HeadView], str]) -> None:
    """Let the points of Values change sides, its arrows and facts follow, and its curves where they depend on the slider.

    Args:
        view: what the plane shows: one head under `made.policy`. facts: the HTML beside it.
    """

    def work(positions: Positions, pace: Pace) -> dict[str, Any]:
        mine = lambda each: _setting(each, made.policy_index)  # noqa: E731
        views = numbers.heads(map(mine, _every(positions)), view.layer, view.head, pace)
        lines = numbers.errors_by_budget(_choices(positions), view.layer, view.head, pace)
        at = lambda each: views.get(mine(each))  # noqa: E731
        curve = lambda each: (own := lines.get(each.policies)) and values.strip(own, 1, dark, mine(each)[0].label)  # noqa: E731
        return {
            "sides": _known(positions, lambda each: (own := at(each)) and _bits(own.kept)),
            "lines": _known(positions, lambda each: mine(each)[1]),
            "html": {"facts": _known(positions, lambda each: (own := at(each)) and facts(own))},
            "figures": {
                "plane": _figure(
                    positions, lambda each: (own := at(each)) and _fields(*values.arrows(own), values.ARROWS_AT)
                ),
                "strip": _figure(positions, lambda each: (drawn := curve(each)) and _numbers(drawn)),
            },
            "count": view.n_kept,
            "kept": _bits(view.kept),
            "points": _text(view.points.astype(np.float32)),
            "look": values.look(view, dark),
        }

    _follow("plane", numbers, made, work)


def strip(numbers: Analysis, made: Experiment, other: Policy | None, token: int, dark: bool) -> None:
    """Let the text of Tokens change its shades, those of `made.policy` or its difference to another, and the figures."""
    of = _looked_at(made, other)

    def work(positions: Positions, pace: Pace) -> dict[str, Any]:
        settings = [_setting(each, i) for each in _every(positions) for i in of]
        known = tokens.kept_by_each(numbers, settings, pace)
        soon = Pace(SECONDS / 2, _give_way)  # cheap for what is known
        whys = tokens.why_each(numbers, [setting for setting in settings[:: len(of)] if setting in known], token, soon)
        pace.over |= soon.over
        at = lambda each: _all(known.get(_setting(each, i)) for i in of)  # noqa: E731
        why = lambda each: whys.get(_setting(each, of[0]))  # noqa: E731
        return {
            "sides": _known(positions, lambda each: (own := at(each)) and _text(text.codes(*own))),
            "classes": text.CLASSES,
            "figures": {
                "profile": _figure(positions, lambda each: (own := at(each)) and _fields(token_figures.lines(own))),
                "why_map": _figure(
                    positions, lambda each: (own := why(each)) and _fields(token_figures.kv_heads(own, dark))
                ),
            },
        }

    _follow("strip", numbers, made, work)


def maps(numbers: Analysis, made: Experiment, measure: str, other: Policy | None, dark: bool) -> None:
    """Let the map of Heads change its colours, and the spread beside it."""
    of = _looked_at(made, other)

    def work(positions: Positions, pace: Pace) -> dict[str, Any]:
        known = numbers.error_maps([_setting(each, i) for each in _every(positions) for i in of], pace)
        at = lambda each: _all(known.get(_setting(each, i)) for i in of)  # noqa: E731
        draw = lambda own: _numbers(heads.head_map(own[0], measure, dark, *own[1:]))  # noqa: E731
        return {"figures": {"map": _figure(positions, lambda each: (own := at(each)) and draw(own))}}

    _follow("map", numbers, made, work)


def curves(numbers: Analysis, made: Experiment, head: tuple[int, int]) -> None:
    """Let the curves of Capacity follow an option, one head's and the means, and their lines the budget.

    Args:
        head: (layer, KV head).
    """

    def work(positions: Positions, pace: Pace) -> dict[str, Any]:
        removed = lambda each: 100 * (1 - min(each.budget, made.n_tokens) / made.n_tokens)  # noqa: E731
        figures = {}
        for prefix, only in (("one", head), ("all", None)):
            known = numbers.capacities(_choices(positions), pace, only)
            for which in CAPACITIES:

                def at(each: Experiment, known=known, which=which, only=only) -> Numbers | None:
                    own = known.get(each.policies)
                    return own and _numbers(capacity.curve(own, which, 0.0, head=only))

                figures[f"{prefix}_{which}"] = _figure(positions, at)
        return {"lines": _known(positions, removed), "figures": figures}

    _follow("lines", numbers, made, work)


def _follow(kind: str, numbers: Analysis, made: Experiment, work: Callable[[Positions, Pace], dict[str, Any]]) -> None:
    """Give the browser what `work` finds in a while, and more whenever it asks."""
    calls, packed = count(), ""

    @st.fragment
    def ahead() -> None:
        nonlocal packed
        if st.session_state.pop("_let_go", False):
            st.rerun()
        if not (state := numbers.held()):  # held until the end
            return  # the prompt has left memory; the next move reads it again
        asked = next(calls) > 0
        with _turn(asked) as mine:
            wait = LATER
            if mine:
                pace, positions = Pace(SECONDS, _give_way), _positions(made)
                found = {"kind": kind, "sliders": list(positions)} | work(positions, pace)
                packed = _text(zlib.compress(json.dumps(found).encode(), 1))
                wait = (SOON if asked else REST) if pace.over else None
        told = {"on_more_change": lambda: None, "on_dragged_change": _let_go}
        _component(key="scrub", data={"packed": packed, "wait": wait}, **told)
        del state

    ahead()


def _let_go() -> None:
    """A line at the budget was dragged to another of the slider's positions."""
    made = experiment()
    for size in budget.grid(made.size, made.n_tokens, made.shape):
        if budget.label(str(size)) == st.session_state.scrub.dragged:
            set_size(size)
            st.session_state._let_go = True


@contextmanager
def _turn(asked: bool) -> Iterator[bool]:
    """Whether this session may work now: ahead only where nobody has a job and no other session does it."""
    if not asked:
        yield True
    elif host().queue_length or not _AHEAD.acquire(blocking=False):
        yield False
    else:
        try:
            yield True
        finally:
            _AHEAD.release()


def _give_way() -> None:
    """Ends the script where the person has made another move."""
    if (context := get_script_run_ctx()) is not None:
        context.yield_check()


def _known(positions: Positions, find: Callable[[Experiment], Any]) -> dict[str, dict[str, Any]]:
    """Slider -> position -> what is found for it, if anything."""
    return {
        slider: {label: found for label, each in choices.items() if (found := find(each)) not in (None, False)}
        for slider, choices in positions.items()
    }


def _every(positions: Positions) -> list[Experiment]:
    """All positions, the nearest of every slider first."""
    rows = zip_longest(*(slider.values() for slider in positions.values()))
    return [each for row in rows for each in row if each is not None]


def _choices(positions: Positions) -> list[tuple[Policy, ...]]:
    """The policies at all positions of the options' sliders; with the budget they stay the same."""
    return [each.policies for each in _every({k: v for k, v in positions.items() if k != key_of("budget")})]


def _all(found: Iterable[Any]) -> list | None:
    """What was found, if all of it was."""
    found = list(found)
    return None if None in found else found


def _looked_at(made: Experiment, other: Policy | None) -> list[int]:
    """Places of the policy that a page shows and of the one that it is compared with."""
    return [made.policy_index] + ([] if other is None else [made.policies.index(other)])


def _figure(positions: Positions, find: Callable[[Experiment], Numbers | None]) -> dict[str, Any]:
    """The numbers of a figure that change with a slider, at all of its positions that are known.

    Returns `parts`, [[kind, index], field, how many, words] of each run of numbers, and `sets`, slider -> position -> all of them
    as float32, one after the other; where there are words, the numbers are places in them. A figure of another make (of which
    nothing is evicted, say) is left out.
    """
    found = _known(positions, find)
    every = [numbers for slider in found.values() for numbers in slider.values()]
    make = lambda numbers: [(part, len(values)) for part, values in numbers.items()]  # noqa: E731
    alike = [numbers for numbers in every if make(numbers) == make(every[0])]
    parts = [part for part in (alike[0] if alike else ()) if len({numbers[part].tobytes() for numbers in alike}) > 1]
    words = {part: sorted({*np.concatenate([n[part] for n in alike]).tolist()}) for part in parts if part[2] in LOOKS}
    place = lambda part, own: np.searchsorted(words[part], own) if part in words else own  # noqa: E731
    pack = lambda numbers: np.concatenate([place(part, numbers[part]) for part in parts]).astype(np.float32)  # noqa: E731
    return {
        "parts": [[part[:2], part[2], len(alike[0][part]), words.get(part)] for part in parts],
        "sets": {
            slider: {
                position: _text(pack(numbers))
                for position, numbers in choices.items()
                if parts and make(numbers) == make(every[0])
            }
            for slider, choices in found.items()
        },
    }


def _numbers(figure: go.Figure) -> Numbers:
    """Everything in a figure that may move."""
    return _fields(figure._data, figure._layout.get("annotations", ()))


def _fields(traces: Sequence[dict], labels: Sequence[dict] = (), first: int = 0) -> Numbers:
    """Coordinates and colours of traces, the first of which has this index, and of labels; and looks, marker by marker."""
    found = {}
    for kind, items, start in (("data", traces, first), ("annotations", labels, 0)):
        for index, item in enumerate(items, start):
            for field in ("x", "y", "z"):
                own = np.asarray(item.get(field, ()))
                if own.size and np.issubdtype(own.dtype, np.number):
                    found[kind, index, field] = own.astype(np.float32).ravel()
            for field in LOOKS:
                if isinstance(own := item.get("marker", {}).get(field), np.ndarray):
                    found[kind, index, field] = own
    return found


def _setting(made: Experiment, index: int) -> Setting:
    """One of the policies, and its budget."""
    mine = made.policies[min(index, len(made.policies) - 1)]
    return mine, made.budget_of(mine)


def _positions(made: Experiment) -> Positions:
    """All positions of the sliders that are there: the present one first, then those near it."""
    sizes = budget.grid(made.size, made.n_tokens, made.shape)
    found = {
        key_of("budget"): {
            budget.label(str(size)): replace(made, size=size) for size in _near(sizes, sizes.index(made.size))
        }
    }
    for i, slot in enumerate(st.session_state.chosen):
        if not st.session_state.get(f"options_{slot}"):
            continue
        mine = made.chosen[i]
        for name, here, steps in options.dragged(mine):
            others = {v: policy(mine.name, **mine.changes() | {name: v}) for v in _near(steps, steps.index(here))}
            found[key_of(f"{slot}:{name}")] = {
                f"{v:.3g}": replace(made, chosen=(*made.chosen[:i], each, *made.chosen[i + 1 :]))
                for v, each in others.items()
            }
    return found


def _near(values: Sequence, here: int) -> list:
    """Those near a position first."""
    return [values[i] for i in sorted(range(len(values)), key=lambda i: abs(i - here))]


def _bits(kept: np.ndarray) -> str:
    return _text(np.packbits(kept))


def _text(numbers: np.ndarray | bytes) -> str:
    return b64encode(numbers).decode()
