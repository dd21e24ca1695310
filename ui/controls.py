"""Controls that show what other controls move, too: the budget in three of them, the layer and the arrow keys, a link's choice.

With every move the browser sends what all controls say. Of one that the server has just moved it still says the old value, until
the answer is there; taken as it comes, a quick second move would undo the first. So a control that something else has moved is
drawn as a new one: what the browser says of the old one does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

from ui.state import went_back


def shows(
    name: str,
    value: Any,
    words: Sequence[str] = (),
    change: Callable[[Any], None] | None = None,
    given: str = "value",
    choices: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """What Streamlit needs for a control that shows `value`: its key, its callback, and what it shows at first.

    The control's own argument says that, and not its state, which reaches the browser a moment after the control is there:
    a move in between would send the control's default (a number's least, say) as if the person had chosen it.

    Args:
        name: of the control; without `change` the session keeps the person's choice as "_name".
        words: how the choices are called, where that changes: the browser knows a choice by its name.
        change: told what the person chose.
        given: the control's argument for its value, "value" or "default".
        choices: of a list that is told the place of its choice.
    """
    state, words = st.session_state, list(words)
    turns = state.setdefault("_turns", {})
    turn, before = turns.get(name, (0, words))
    if before != words or state.get(_key(name, turn), value) != value:
        turn += 1
    turns[name], key = (turn, words), _key(name, turn)

    def changed() -> None:
        if turns[name][0] == turn:
            (change or keep)(state[key])

    def keep(chosen: Any) -> None:
        state[f"_{name}"] = chosen

    start = {given: value} if choices is None else {"index": list(choices).index(value)}
    return {"key": key, "on_change": changed} | start


def forget() -> None:
    """On another page: its controls are new to the browser, so that their values have to be said again."""
    state = st.session_state
    for name, (turn, _) in state.get("_turns", {}).items():
        state.pop(_key(name, turn), None)


def key_of(name: str) -> str:
    """The key of a control that was drawn, as it stands in the page's classes."""
    return _key(name, st.session_state._turns[name][0]).replace(":", "-")


def _key(name: str, turn: int) -> str:
    return f"{name}_{turn}" if turn else name


def start_from_link(name: str, choices: Sequence[Any], usual: Any = None) -> Any:
    """A page's own choice: the session's if it has one, else what the link says, else the usual one (the first)."""
    state, asked = st.session_state, st.query_params.get(name)
    if f"_{name}" not in state or went_back():
        state[f"_{name}"] = next((choice for choice in choices if str(choice) == asked), None)
    if state[f"_{name}"] not in choices:
        state[f"_{name}"] = choices[0] if usual is None else usual
    return state[f"_{name}"]


def put_into_link(name: str, value: Any, usual: Any = None) -> None:
    """After it was drawn: its choice becomes part of the address, unless it is the usual one."""
    if value != usual:
        st.query_params[name] = str(value)
    elif name in st.query_params:
        del st.query_params[name]
