"""One study on its page: its settings, what Run submits, and what came out."""

from __future__ import annotations

import streamlit as st

from kvviz.exceptions import KvvizError
from kvviz.host import ModelSpec
from kvviz.jobs import Prompt
from kvviz.studies import Study, StudyRequest, StudyResult
from kvviz.studies.study import HELP, setting_text
from ui.frame import chart, is_dark
from ui.html import plain

COLUMNS = 4
"""Settings side by side."""


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


def request(study: Study, model: ModelSpec, prompt: Prompt | None) -> StudyRequest | None:
    """What Run submits, or nothing where a setting is at fault.

    Args:
        prompt: measure on this one, where the study can, and not on samples of its own.
    """
    with st.popover("Settings", icon=":material/tune:", key=f"settings_{study.name}", width="content"):
        changed = settings(study)
        st.caption(f"At the defaults it takes one or two minutes on two CPU cores. Full size: {study.full}")
    wanted = StudyRequest(model, study.name, tuple(changed.items()), prompt if study.on_prompt else None)
    try:
        paths = wanted.paths()
    except KvvizError as error:
        st.error(plain(str(error)))
        return None
    if paths:
        st.error("The browser reads no files of the server. Paste the text under Edit, or run the study there:")
        st.code(wanted.command(), language="bash", wrap_lines=True)
        return None
    return wanted


def outcome(study: Study, result: StudyResult) -> None:
    """Figure, finding, what it was measured with, and ways to take it along."""
    finding = study.finding(result)
    st.markdown(f"**Here:** {finding}")
    panels = study.chart.panels
    for row in range(0, len(panels), 2):
        for number, place in enumerate(st.columns(min(2, len(panels))), row):
            if number < len(panels):
                with place:
                    figure = study.figure(result, is_dark(), number)
                    chart(figure, key=f"figure_{study.name}_{number}", alt=f"{panels[number].title}. {finding}")
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
