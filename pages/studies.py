"""Studies: the figures and tables of both papers, measured again on the loaded model, each with what came out."""

import streamlit as st

import ui
from kvviz.exceptions import KvvizError
from kvviz.host import QUEUED
from kvviz.studies import GROUPS, STUDIES, Study, StudyRequest, StudyResult
from kvviz.studies.study import HELP, setting_text
from ui import jobs

SEED, PROMPT = "texts written for it", "this prompt"

COLUMNS = 4  # settings side by side


def collect() -> jobs.Task | None:
    """The session's study job; a finished one's result is kept, one for each study."""
    current = st.session_state.get("_study")
    if current and not current.kept and not current.job.active:
        current.kept = True
        if current.job.result is not None:
            st.session_state.setdefault("_studies", {})[current.job.result.study] = current.job.result
    return current


def settings(study: Study) -> dict:
    """The settings that a person has changed."""
    changed, columns = {}, st.columns(COLUMNS)
    for number, (key, usual) in enumerate(study.settings.items()):
        text = columns[number % COLUMNS].text_input(
            key.replace("_", " "),
            setting_text(usual),
            key=f"{study.name}_{key}",
            persist_state="session",
            max_chars=400,
            help=HELP[key],
        )
        if text.strip() != setting_text(usual):
            changed[key] = text
    return changed


def request(study: Study) -> StudyRequest | None:
    """What Run submits, or nothing where a setting is at fault."""
    with st.popover("Settings", icon=":material/tune:", key=f"settings_{study.name}", width="content"):
        changed = settings(study)
        st.caption(f"At the defaults it takes one or two minutes on two CPU cores. Full size: {study.full}")
    try:
        study.chosen(changed)
    except KvvizError as error:
        st.error(str(error))
        return None
    prompt = experiment.prompt if source == PROMPT and study.on_prompt else None
    return StudyRequest(experiment.model, study.name, tuple(changed.items()), prompt)


def controls(study: Study, current: jobs.Task | None) -> None:
    """Settings, Run, and the bar with Cancel while it runs."""
    busy = bool(current and current.job.active)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        wanted = request(study)
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


def outcome(study: Study, result: StudyResult) -> None:
    """Figure, finding, what it was measured with, and ways to take it along."""
    finding = study.finding(result)
    st.markdown(f"**Here:** {finding}")
    panels = study.chart.panels
    for row in range(0, len(panels), 2):
        for number, place in enumerate(st.columns(min(2, len(panels))), row):
            if number < len(panels):
                with place:
                    figure = study.figure(result, ui.is_dark(), number)
                    ui.chart(figure, key=f"figure_{study.name}_{number}", alt=f"{panels[number].title}. {finding}")
    config = result.config
    times = " Its numbers are times, which other work on the machine disturbs." if study.timings else ""
    st.caption(f"{config['model']}, {config['dtype']} on {config['device']}, {config['seconds']:g} s.{times}")
    name = f"kvviz-{study.name}"
    with st.container(horizontal=True):
        common = {"on_click": "ignore"}
        st.download_button("CSV", result.to_csv(), f"{name}.csv", "text/csv", key=f"csv_{study.name}", **common)
        st.download_button(
            "JSON", result.to_json(), f"{name}.json", "application/json", key=f"json_{study.name}", **common
        )
    st.code(config["command"], language="bash", wrap_lines=True)


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
            outcome(study, result)


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
