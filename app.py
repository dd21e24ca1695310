"""kvviz: a dashboard in which a language model forgets. Run it with `make run`."""

from pathlib import Path

import streamlit as st

import ui

PAGES = {
    "compare": (
        "Compare",
        ":material/view_column:",
        "Policies write side by side: what they say, how far they are from the full cache, what it cost.",
    ),
    "values": (
        "Values",
        ":material/scatter_plot:",
        "One head: its values on a plane, what is kept and evicted, and the error between them.",
    ),
    "capacity": ("Capacity", ":material/show_chart:", "How much of the full cache's capacity each policy keeps."),
    "heads": ("Heads", ":material/grid_on:", "Where in the model the eviction error is large, layer by head."),
}

st.set_page_config(page_title="kvviz", page_icon="ui/icon.svg", layout="wide", initial_sidebar_state=348)
ui.styles()
folder = Path(__file__).parent / "pages"
pages = [
    st.Page(folder / f"{name}.py", title=title, icon=icon, help=about, default=name == "compare")
    for name, (title, icon, about) in PAGES.items()
    if (folder / f"{name}.py").exists()
]
page = st.navigation(pages, position="top")
st.session_state._title = page.title
ui.sidebar()
page.run()
