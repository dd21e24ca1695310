"""Values while a slider is moved: the kept sets at its other positions, so that the browser can show them at once.

A small component of our own, which has nothing to show itself, draws them on the plane until the server's answer is there.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import numpy as np
import streamlit as st

from kvviz.analysis import Analysis, HeadView
from kvviz.experiment import Experiment
from kvviz.figures.values import look
from kvviz.policies.policy import Policy, policy
from ui import budget, options
from ui.controls import key_of

SECONDS = 0.05
"""Spent at most, each time, on sets that are not known yet; the nearest come first."""

Settings = dict[str, tuple[Policy, int]]
"""A slider's position as it is written -> the policy and the budget that it stands for."""

_component = st.components.v2.component("kvviz_scrub", js=(Path(__file__).parent / "scrub.js").read_text())


def plane(numbers: Analysis, view: HeadView, made: Experiment, dark: bool) -> None:
    """Let the points follow the budget's slider, and those of the policy's options where they are open.

    Args:
        view: what the plane shows: one head under `made.policy`.
    """
    sliders = {key_of("budget"): _budgets(made)} | _options(made)
    known = numbers.sides(
        [s for settings in sliders.values() for s in settings.values()], view.layer, view.head, SECONDS
    )
    packed = {setting: b64encode(np.packbits(kept)).decode() for setting, kept in known.items()}
    _component(
        key="scrub",
        data={
            "count": view.n_kept,
            "kept": b64encode(np.packbits(view.kept)).decode(),
            "sides": {
                slider: {label: packed[s] for label, s in settings.items() if s in packed}
                for slider, settings in sliders.items()
            },
            "points": b64encode(view.points.astype(np.float32)).decode(),
            "look": look(view, dark),
        },
    )


def _budgets(made: Experiment) -> Settings:
    """Every position of the budget's slider, the present one first, then those near it."""
    sizes = budget.grid(made.size, made.n_tokens, made.shape)
    here = sizes.index(made.size)
    near = [sizes[i] for i in sorted(range(len(sizes)), key=lambda i: abs(i - here))]
    return {budget.label(str(s)): (made.policy, replace(made, size=s).budget_of(made.policy)) for s in near}


def _options(made: Experiment) -> dict[str, Settings]:
    """The same for the sliders of the policy's options."""
    found = {}
    for slot in st.session_state.chosen:
        mine: Policy = st.session_state._slots[slot]
        protected = (lambda p: p) if made.equal is None else (lambda p: p.with_protection(*made.equal))
        if protected(mine) != made.policy or not st.session_state.get(f"options_{slot}"):
            continue
        for name, here, values in options.dragged(mine):
            near = sorted(values, key=lambda value: abs(value - here))
            found[f"{slot}-{name}"] = {
                f"{v:.3g}": (each := protected(policy(mine.name, **mine.changes() | {name: v})), made.budget_of(each))
                for v in near
            }
    return found
