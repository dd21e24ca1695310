"""Studies: the figures and tables of both papers, measured again on the loaded model, each with what came out."""

import streamlit as st

import ui
from kvviz.host import QUEUED
from kvviz.studies import GROUPS, STUDIES, Study
from ui import jobs, studies

SEED, PROMPT = "texts written for it", "this prompt"


def collect() -> jobs.Task | None:
    """The session's study job; a finished one's result is kept, one for each study."""
    current = st.session_state.get("_study")
    if current and not current.kept and not current.job.active:
        current.kept = True
        if current.job.result is not None:
            st.session_state.setdefault("_studies", {})[current.job.result.study] = current.job.result
    return current


def controls(study: Study, current: jobs.Task | None) -> None:
    """Settings, Run, and the bar with Cancel while it runs."""
    busy = bool(current and current.job.active)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        wanted = studies.request(study, experiment.model, experiment.prompt if source == PROMPT else None)
        fault = experiment.fault if wanted and wanted.prompt else ""
        why = fault or ("One study runs at a time." if busy else "Measure it on the model of the sidebar.")
        st.button(
            "Run",
            type="primary",
            key=f"run_{study.name}",
            disabled=busy or wanted is None or bool(fault),
            help=why,
            on_click=jobs.start,
            args=(wanted, experiment, "_study"),
        )
    if current and current.job.request.study == study.name:
        if busy:
            jobs.bar(current, key=f"cancel_{study.name}")
        elif current.job.status != QUEUED and current.job.result is None:
            jobs.outcome(current)


def card(study: Study, current: jobs.Task | None) -> None:
    """One study."""
    result = st.session_state.get("_studies", {}).get(study.name)
    mine = bool(current and current.job.request.study == study.name)
    with st.expander(f"{study.title} ({study.source})", expanded=mine or result is not None, key=f"card_{study.name}"):
        st.markdown(f"**The paper:** {study.paper}")
        if study.doubt:
            st.caption(study.doubt)
        if study.name == "directional_gap":
            st.page_link("pages/values.py", label="Any head, policy and budget: Values")
        controls(study, current)
        if result is not None:
            studies.outcome(study, result)


experiment = ui.experiment()
ui.header(experiment)
task = collect()
left, right = st.columns([3, 2], vertical_alignment="bottom")
group = left.segmented_control(
    "Group",
    GROUPS,
    default=GROUPS[0],
    key="group",
    required=True,
    persist_state="session",
    help="Which studies are shown.",
)
source = right.segmented_control(
    "Measured on",
    (SEED, PROMPT),
    default=SEED,
    key="measured_on",
    required=True,
    persist_state="session",
    help="Samples from a seed, the same everywhere, or the prompt of the sidebar. Task scores write their own prompts.",
)
for each in STUDIES.values():
    if each.group == group:
        card(each, task)
