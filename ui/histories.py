"""The session's runs: look at an earlier one, pin one beside the next, take its settings back, open a run from a file."""

from __future__ import annotations

import streamlit as st

from kvviz import report
from kvviz.experiment import Experiment, from_query
from kvviz.runs import Run
from ui import html, jobs
from ui.state import take_back

KEEP_NONE = "none"


def shown() -> jobs.Record | None:
    """The run that Compare shows: the chosen one, else the latest."""
    chosen = st.session_state.get("_shown")
    return next((r for r in choices() if r.number == chosen), jobs.latest())


def pinned() -> jobs.Record | None:
    """The run that stays beside the others, if any."""
    chosen = st.session_state.get("_pinned")
    return next((r for r in choices() if r.number == chosen), None)


def choices() -> list[jobs.Record]:
    """Runs that can be looked at, the latest first."""
    return [r for r in reversed(jobs.history()) if not r.run.config.get("evict_every")]


def histories(made: Experiment) -> None:
    """A button that opens the list of runs."""
    records = choices()
    with st.popover("Runs", icon=":material/history:", key="runs"):
        if records:
            by_number = {r.number: r for r in records}
            here = shown()
            _chooser("Shown", "show", list(by_number), here.number if here else None, by_number)
            pin = pinned()
            _chooser("Pinned beside it", "pin", [KEEP_NONE, *by_number], pin.number if pin else KEEP_NONE, by_number)
            st.button(
                "Take its settings",
                key="take",
                on_click=take_back,
                args=(here.experiment,),
                disabled=here.experiment.generate == made.generate,
                help="Puts the sidebar back to what the shown run was made with.",
            )
        else:
            st.caption("Runs of this session are listed here.")
        st.file_uploader(
            "Open a run file",
            "json",
            key="run_file",
            on_change=_open,
            max_upload_size=2,
            help="A JSON file that was exported here. It is read as data and checked; nothing in it is executed.",
        )
        if fault := st.session_state.get("_run_fault"):
            st.error(html.plain(fault))


def _chooser(label: str, key: str, options: list, value: int | str | None, records: dict[int, jobs.Record]) -> None:
    """A list of runs that follows `_shown` or `_pinned`."""
    if st.session_state.get(key) != value:
        st.session_state[key] = value
    st.selectbox(
        label, options, key=key, format_func=lambda n: _words(records[n]) if n in records else n, on_change=_choose
    )


def _words(record: jobs.Record) -> str:
    names = ", ".join(row.label for row in record.run.rows[1:])
    return f"{record.number}: {record.experiment.title}, {record.experiment.size}, {names}"


def _choose() -> None:
    state = st.session_state
    state._shown = state.show
    state._pinned = None if state.pin == KEEP_NONE else state.pin


def _open() -> None:
    state = st.session_state
    state.pop("_run_fault", None)
    if state.run_file is None:
        return
    try:
        run = report.from_json(state.run_file.getvalue())
    except report.ReportError as error:
        state._run_fault = str(error)
        return
    record = jobs.add(run, experiment_of(run))
    state._shown = record.number


def experiment_of(run: Run) -> Experiment:
    """The experiment that a run file names, as far as it can be read."""
    link = run.config.get("link")
    if not isinstance(link, dict):
        return Experiment()
    query = {str(k): [str(v) for v in value] if isinstance(value, list) else [str(value)] for k, value in link.items()}
    return from_query(query, Experiment())[0]
