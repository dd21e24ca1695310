"""The pages, and the frame around whichever is open: page settings, navigation, styles, sidebar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import streamlit as st
from streamlit.navigation.page import StreamlitPage
from streamlit.runtime import Runtime, get_instance
from streamlit.runtime.scriptrunner import get_script_run_ctx

from kvviz.experiment import Experiment
from ui import controls
from ui.frame import head, styles
from ui.sidebar import sidebar
from ui.state import experiment as collect
from ui.state import restore

ROOT = Path(__file__).parents[1]

PAGES = {
    "compare": (
        "Compare",
        ":material/view_column:",
        "Policies write side by side: what they say, how far they are from the full cache, what it cost.",
    ),
    "tour": (
        "Tour",
        ":material/tour:",
        "Three to five minutes, eight steps: what a cache is, what eviction takes, and what the two papers do about it.",
    ),
    "values": (
        "Values",
        ":material/scatter_plot:",
        "One head: its values on a plane, what is kept and evicted, and the error between them.",
    ),
    "capacity": (
        "Capacity",
        ":material/show_chart:",
        "How much of the full cache's capacity each policy keeps.",
    ),
    "heads": (
        "Heads",
        ":material/grid_on:",
        "Where in the model the eviction error is large, layer by head.",
    ),
    "tokens": (
        "Tokens",
        ":material/format_color_text:",
        "The prompt as text, shaded by what is kept; and why, token by token.",
    ),
    "long": (
        "Long generation",
        ":material/timeline:",
        "Far past the budget: eviction goes on while the policies write.",
    ),
    "studies": (
        "Studies",
        ":material/science:",
        "The figures and tables of both papers, measured again on the loaded model.",
    ),
}
"""File in pages/ -> title, icon, what it shows."""


@contextmanager
def frame() -> Iterator[StreamlitPage]:
    """Draw all that surrounds a page; gives the page that is to run inside."""
    st.set_page_config("kvviz", ROOT / "ui" / "icon.svg", layout="wide", initial_sidebar_state=348)
    styles()
    page = st.navigation(
        [
            st.Page(ROOT / "pages" / f"{name}.py", title=title, icon=icon, help=about, default=name == "compare")
            for name, (title, icon, about) in PAGES.items()
            if (ROOT / "pages" / f"{name}.py").exists()
        ],
        position="top",
    )
    if st.session_state.get("_title") != page.title:
        st.session_state._title = page.title
        controls.forget()
    st.session_state._framed = True
    try:
        sidebar()
        yield page
    finally:
        st.session_state._framed = False


def framed() -> None:
    """Draw the frame if the page runs without it.

    Streamlit takes a folder named pages/ for its own kind of multipage app until st.navigation has been called once in the
    process: the very first visit, if it is to a page's own address, runs the page and not app.py. It starts again, for app.py
    knows the page's controls under other names. (AppTest runs pages so, always, and has no server.)
    """
    context = get_script_run_ctx()
    if not st.session_state.get("_framed") and not (context and context.fragment_ids_this_run):
        with frame():
            pass
        if type(get_instance()) is Runtime:
            st.rerun()


def experiment() -> Experiment:
    """What the sidebar says. Callbacks may ask, too."""
    if "_link" not in st.session_state:
        restore()
    return collect()


def header(made: Experiment) -> None:
    """The head of a page, and the frame around it where Streamlit left it out."""
    framed()
    head(st.session_state._title, made)
