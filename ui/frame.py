"""What every page shares: its head, its figures, and which policy, layer and head it looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from kvviz.experiment import OWN, PARAMETERS, Experiment, to_query
from kvviz.figures import style
from kvviz.policies.policy import Policy
from ui import html
from ui.controls import put_into_link, shows, start_from_link
from ui.glossary import glossary

CSS = Path(__file__).parent / "style.css"

CHART = {
    "displaylogo": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "svg", "filename": "kvviz"},
}
"""Plotly's own settings: the camera saves an SVG."""


def styles() -> None:
    """Our few classes."""
    st.html(CSS)


def is_dark() -> bool:
    """Whether the person sees the dark theme (Streamlit may be wrong on a session's first run)."""
    return st.context.theme.type == "dark"


def head(title: str, experiment: Experiment) -> None:
    """The page's title, the experiment in one line, and its link."""
    left, right = st.columns([3, 1], vertical_alignment="bottom", gap="small")
    left.html(html.heading(title, experiment.words()))
    row = right.container(horizontal=True, horizontal_alignment="right", gap="small", key="title")
    with row:
        glossary()
    help = "This view, to be opened elsewhere"
    with row.popover(
        "Link", icon=":material/link:", type="tertiary", key="link", help=help, on_change="rerun"
    ) as place:
        if place.open:
            st.caption("Opens this page with the same experiment." + OWN_TEXT * (experiment.preset == OWN))
            st.code(link(experiment), language=None, wrap_lines=True)


OWN_TEXT = " Your own text is not part of it: paste it there under Edit."


def link(experiment: Experiment) -> str:
    """The address of this page with the experiment in it, and what the page has there of its own (a token, a step)."""
    place = urlsplit(st.context.url or "")
    own = {key: st.query_params.get_all(key) for key in st.query_params if key not in PARAMETERS}
    if place.path.endswith("tokens") and st.session_state.get("_token") is not None:
        own["token"] = [st.session_state._token]  # the address follows only after the page is drawn
    return f"{place.scheme}://{place.netloc}{place.path or '/'}?{urlencode(to_query(experiment) | own, doseq=True)}"


def chart(figure: go.Figure, key: str, alt: str, on_select: Callable | str | None = None):
    """A figure in the width of its place; returns what was selected where `on_select` is given.

    A line at the present budget (`style.here`) is drawn over the figure, which need not be drawn anew when the line moves.
    """
    options = {} if on_select is None else {"on_select": on_select, "selection_mode": "points"}
    if on_select is not None:
        figure.update_layout(clickmode="event+select")  # what Streamlit sets, from the start
    line = style.lift(style.bake(figure, is_dark()))
    with st.container(gap=None, key=f"under_{key}") if line else nullcontext():
        if line:
            st.html(html.line_over(line))
        return st.plotly_chart(figure, key=key, alt=alt, theme=None, width="stretch", config=CHART, **options)


def policy_picker(experiment: Experiment) -> Policy:
    """Choose one of the policies to look at."""
    policies = experiment.policies
    if not policies:
        st.info("No policy is chosen. Choose one in the sidebar.")
        st.stop()
    labels, chosen = [p.label for p in policies], st.session_state._policy
    index = st.selectbox(
        "Policy",
        range(len(policies)),
        **shows("policy", chosen if chosen < len(policies) else 0, labels, choices=range(len(policies))),
        format_func=labels.__getitem__,
        help="Which of the chosen policies this page looks at.",
    )
    return policies[index]


def other_picker(experiment: Experiment) -> Policy | None:
    """Choose a second policy to compare with, or none; the pages that ask share it, and it stands in the link."""
    policies, none = experiment.policies, -1
    choices = [none, *range(len(policies))]
    labels = ["nothing", *(p.label for p in policies)]
    index = st.selectbox(
        "Compared with",
        choices,
        **shows("minus", start_from_link("minus", choices), labels, choices=choices),
        format_func=lambda i: labels[i - none],
        help="A second policy shows the difference of the two: purple (and a solid line) where the first is higher or keeps "
        "a token in more heads, orange (and a dotted line) where the second is or does.",
    )
    put_into_link("minus", index, none)
    return None if index == none else policies[index]


def head_picker(layers: int, heads: int, places: Sequence[DeltaGenerator] | None = None) -> tuple[int, int]:
    """Choose a layer and a query head, side by side or in two given places."""
    state = st.session_state
    left, right = places or st.columns(2)
    layer = left.selectbox(
        "Layer",
        range(layers),
        **shows("layer", min(state._layer, layers - 1), choices=range(layers)),
        help="Counted from 0, the layer next to the embeddings.",
    )
    head = right.selectbox(
        "Head",
        range(heads),
        **shows("head", min(state._head, heads - 1), choices=range(heads)),
        help="Query head, counted from 0. Heads of a group share keys and values.",
    )
    return layer, head
