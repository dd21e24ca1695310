"""Tour: eight steps from what a cache is to what the two papers do about it, each with one control and real numbers."""

import streamlit as st

import ui
from kvviz import analysis, tour
from kvviz.analysis import tokens
from ui import tour as steps
from ui.pages import PAGES

COUNT = len(tour.STEPS)


def go(by: int) -> None:
    """To the next step or the one before."""
    st.session_state._step = min(max(st.session_state._step + by, 1), COUNT)


def navigation() -> int:
    """Back, the steps, Next: always in the same place."""
    here = ui.start_from_link("step", range(1, COUNT + 1))
    with st.container(horizontal=True, vertical_alignment="center", key="tour_way"):
        st.button(
            "Back",
            key="tour_back",
            icon=":material/arrow_back:",
            disabled=here == 1,
            on_click=go,
            args=(-1,),
            shortcut="Shift+Left",
            help="The step before (Shift and the left arrow key).",
        )
        step = st.segmented_control(
            "Step",
            list(range(1, COUNT + 1)),
            **ui.shows("step", here, given="default"),
            required=True,
            label_visibility="collapsed",
            help=f"The tour's {COUNT} steps. A link to this page opens the step that is shown.",
        )
        st.button(
            "Next",
            key="tour_next",
            icon=":material/arrow_forward:",
            icon_position="right",
            type="primary",
            disabled=here == COUNT,
            on_click=go,
            args=(1,),
            shortcut="Shift+Right",
            help="The next step (Shift and the right arrow key).",
        )
    ui.put_into_link("step", step)
    return step


experiment = ui.experiment()
made = steps.prepared(experiment)
ui.header(made)
number = navigation()
step = tour.STEPS[number - 1]
st.html(f'<h2 class="kv-h2" data-testid="kv-step">{number}. {step.title}</h2>')
state = ui.prompt_state(made, probes=True)
numbers = analysis.of(state)
decode = ui.engine_for(made.model).tokenizer.decode
texts = numbers.result(("pieces",), lambda: tokens.pieces(state.ids, decode))
left, right = st.columns([2, 3], gap="large")
with left:
    told = st.empty()
with right:
    st.markdown(f"**{step.try_it}**")
    scene = steps.Scene(made, numbers, texts, st.container(), st.container())
try:
    found = steps.DRAW[number - 1](scene)
except ValueError as error:  # a model that the tour's text does not suit
    st.warning(str(error))
    st.stop()
told.html(steps.paragraphs(found.sentences))
with left:
    name = PAGES[step.page][0]
    if st.button(
        f"Open this in {name}",
        key="tour_open",
        icon=":material/open_in_new:",
        help=f"{PAGES[step.page][2]} The sidebar takes over this step's prompt, policies and budget.",
    ):
        settings = {"preset": made.preset, "prompt": made.prompt, "size": made.size, "chosen": made.chosen}
        settings |= {"equal": made.equal, "policy_index": 0, "max_new_tokens": made.max_new_tokens}
        ui.open_page(step.page, own=found.own, **settings | found.changes)
    st.caption("The tour has its own prompt and settings, so that everybody sees the same; the sidebar stays as it is.")
