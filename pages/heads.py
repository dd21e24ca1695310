"""Heads: the eviction error of every layer and head; a click, or the two boxes, opens one in Values."""

import streamlit as st

import ui
from kvviz import analysis
from kvviz.analysis import MEASURES
from kvviz.figures import heads
from ui import scrub


def controls() -> tuple:
    """Measure, policy, and the policy that is taken away from it."""
    left, middle, right = st.columns(3, vertical_alignment="bottom")
    measure = left.selectbox(
        "Measure",
        list(MEASURES),
        **ui.shows("measure", ui.start_from_link("measure", list(MEASURES)), choices=list(MEASURES)),
        format_func=lambda key: MEASURES[key].title,
        help="\n\n".join(f"**{m.title}.** {m.help}" for m in MEASURES.values()),
    )
    ui.put_into_link("measure", measure, next(iter(MEASURES)))
    with middle:
        policy = ui.policy_picker(experiment)
    with right:
        other = ui.other_picker(experiment)
    return measure, policy, other


def clicked() -> None:
    """A click on a cell opens its head in Values."""
    points = st.session_state.map.selection.points
    if points:
        choose(*points[0]["customdata"])


def choose(layer: int, head: int) -> None:
    st.session_state._open = (layer, head)


experiment = ui.experiment()
if place := st.session_state.pop("_open", None):
    ui.open_page("values", layer=place[0], head=place[1])
ui.header(experiment)
state = ui.prompt_state(experiment, probes=True)
measure, policy, other = controls()
numbers = analysis.of(state)
slot = st.container()
with slot.skeleton(height=560):
    try:
        data = numbers.error_map(policy, experiment.budget_of(policy))
        minus = other and numbers.error_map(other, experiment.budget_of(other))
    except ValueError as error:  # the method needs what this prompt was not read with
        st.warning(str(error))
        st.stop()
with slot:
    ui.chart(
        heads.head_map(data, measure, ui.is_dark(), minus),
        key="map",
        alt=heads.map_alt(data, measure, minus),
        on_select=clicked,
    )
st.caption(
    f"{MEASURES[measure].help} Means over {data.probes:,} queries of the question and of the full cache's answer; the gaps "
    "between columns part the query heads of one KV head from the next."
)
left, right = st.columns([3, 1], vertical_alignment="bottom")
with left:
    layer, head = ui.head_picker(*data[measure].shape)
right.button(
    "Open in Values",
    key="open",
    on_click=choose,
    args=(layer, head),
    width="stretch",
    help="Shows this layer and head on the page Values.",
)
scrub.maps(numbers, ui.experiment(), measure, other, ui.is_dark())  # last: it is needed only with the next move
