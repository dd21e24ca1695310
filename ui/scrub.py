"""Figures while a slider is moved: what they are to show at its other positions, so that the browser can show it at once.

A small component of our own, which has nothing to show itself, changes the figure until the server's answer is there.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from kvviz.analysis import Analysis, HeadView, tokens
from kvviz.experiment import Experiment
from kvviz.figures.values import look
from kvviz.policies.policy import Policy, policy
from ui import budget, options
from ui import tokens as text
from ui.controls import key_of

SECONDS = 1.0
"""Spent at most, each time, on sets that are not known yet, the nearest first; the next move does not wait for the rest."""

_component = st.components.v2.component("kvviz_scrub", js=(Path(__file__).parent / "scrub.js").read_text())


def plane(numbers: Analysis, view: HeadView, made: Experiment, dark: bool) -> None:
    """Let the points of Values change sides.

    Args:
        view: what the plane shows: one head under `made.policy`.
    """
    positions = _positions(made)
    wanted = [_setting(each, made.policy_index) for slider in positions.values() for each in slider.values()]
    known = numbers.sides(wanted, view.layer, view.head, SECONDS, _give_way)
    packed = {setting: _text(np.packbits(kept)) for setting, kept in known.items()}
    _follow(
        "plane",
        positions,
        sides=_known(positions, lambda each: packed.get(_setting(each, made.policy_index))),
        lines=_known(positions, lambda each: _setting(each, made.policy_index)[1]),
        count=view.n_kept,
        kept=_text(np.packbits(view.kept)),
        points=_text(view.points.astype(np.float32)),
        look=look(view, dark),
    )


def strip(numbers: Analysis, made: Experiment, other: Policy | None) -> None:
    """Let the text of Tokens change its shades: those of `made.policy`, or its difference to another."""
    positions, of = _positions(made), [made.policy_index]
    if other is not None:
        of.append(made.policies.index(other))
    wanted = [_setting(each, i) for slider in positions.values() for each in slider.values() for i in of]
    known = tokens.kept_by_each(numbers, wanted, SECONDS, _give_way)

    def shades(each: Experiment) -> str | None:
        found = [known.get(_setting(each, i)) for i in of]
        return None if None in found else _text(text.codes(*found))

    _follow("strip", positions, sides=_known(positions, shades), classes=text.CLASSES)


def lines(made: Experiment) -> None:
    """Let the lines of Capacity go along, on axes of the share removed in percent."""
    positions = _positions(made)
    removed = lambda each: 100 * (1 - min(each.budget, made.n_tokens) / made.n_tokens)  # noqa: E731
    _follow("lines", positions, lines=_known(positions, removed))


def _give_way() -> None:
    """Ends the script where the person has made another move."""
    if (context := get_script_run_ctx()) is not None:
        context.yield_check()


def _follow(kind: str, positions: dict, **more: Any) -> None:
    _component(key="scrub", data={"kind": kind, "sliders": list(positions)} | more)


def _known(positions: dict, find: Callable[[Experiment], Any]) -> dict[str, dict[str, Any]]:
    """Slider -> position -> what is found for it, if anything."""
    return {
        slider: {label: found for label, each in choices.items() if (found := find(each)) is not None}
        for slider, choices in positions.items()
    }


def _setting(made: Experiment, index: int) -> tuple[Policy, int]:
    """One of the policies, and its budget."""
    mine = made.policies[min(index, len(made.policies) - 1)]
    return mine, made.budget_of(mine)


def _positions(made: Experiment) -> dict[str, dict[str, Experiment]]:
    """Key of a slider -> its positions as they are written -> the experiment there: the present one first, then those near it."""
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
        for name, here, values in options.dragged(mine):
            others = {v: policy(mine.name, **mine.changes() | {name: v}) for v in _near(values, values.index(here))}
            found[key_of(f"{slot}:{name}")] = {
                f"{v:.3g}": replace(made, chosen=(*made.chosen[:i], each, *made.chosen[i + 1 :]))
                for v, each in others.items()
            }
    return found


def _near(values: Sequence, here: int) -> list:
    """Those near a position first."""
    return [values[i] for i in sorted(range(len(values)), key=lambda i: abs(i - here))]


def _text(numbers: np.ndarray) -> str:
    return b64encode(numbers).decode()
