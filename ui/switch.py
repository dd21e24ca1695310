"""Going from one page to another without losing the experiment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import streamlit as st

from kvviz.experiment import to_query
from ui.state import experiment

PAGES = Path(__file__).parents[1] / "pages"


def open_page(name: str, own: dict[str, str] | None = None, **changes: Any) -> None:
    """Go to another page of this app, with the experiment changed in these fields; `own` are parameters of that page alone.

    st.switch_page alone forgets every widget; with the experiment in the address the next run finds it again.
    """
    made = replace(experiment(), **changes)
    for key in ("link", *(own or {})):
        st.session_state.pop(f"_{key}", None)  # the address says it
    st.switch_page(PAGES / f"{name}.py", query_params=to_query(made) | (own or {}))
