"""The session's runs: look at an earlier one, pin one beside the next, take its settings back, open a run from a file."""

from __future__ import annotations

from dataclasses import replace
from html import escape

import streamlit as st

from kvviz import report
from kvviz.experiment import Experiment, from_query, size_words
from kvviz.runs import Row, Run
from ui import cards, html, jobs, results
from ui.controls import shows
from ui.state import take_back

KEEP_NONE = "none"

HELP = {
    "show": "Which run of this session the page shows. The last ten are kept.",
    "pin": "A run that stays while others come: its numbers and texts stand beside those of the run that is shown.",
}


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
    return jobs.history(live=False)[::-1]


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
    st.selectbox(
        label,
        options,
        **shows(key, value, change=CHOOSE[key], choices=options),
        format_func=lambda n: _words(records[n]) if n in records else n,
        help=HELP[key],
    )


def _words(record: jobs.Record) -> str:
    names = ", ".join(row.label for row in record.run.rows if row is not record.run.reference)
    budget = size_words(record.experiment.size)
    return f"{record.number}: {record.experiment.title}, {budget}, {names}, {record.file or record.at}"


def _show(number: int) -> None:
    st.session_state._shown = number


def _pin(number: int | str) -> None:
    st.session_state._pinned = None if number == KEEP_NONE else number


CHOOSE = {"show": _show, "pin": _pin}


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
    jobs.add(run, experiment_of(run), state.run_file.name[:60])


def experiment_of(run: Run) -> Experiment:
    """The experiment that a run file names, as far as it can be read."""
    link = run.config.get("link")
    if not isinstance(link, dict):
        return Experiment()
    query = {str(k): [str(v) for v in value] if isinstance(value, list) else [str(value)] for k, value in link.items()}
    tokens = run.config.get("prompt_tokens")
    return replace(from_query(query, Experiment())[0], n_tokens=tokens if isinstance(tokens, int) else 0)


def origin(record: jobs.Record) -> str:
    """A run's number, and the file that it came from."""
    return f"Run {record.number}" + (f", opened from the file {record.file}" if record.file else "")


def beside(pin: jobs.Record | None, record: jobs.Record) -> None:
    """The pinned run against the one that is shown: its cards, numbers policy by policy, and two texts."""
    if pin is None or pin.number == record.number:
        return
    st.subheader(f"Beside the pinned run {pin.number}", anchor=False)
    st.caption(f":material/keep: {html.plain(origin(pin))}: {html.plain(pin.experiment.words())}.")
    st.html(cards.cards(pin.run.rows))
    pairs = _pairs(pin.run, record.run)
    st.html(_table(pin, record, pairs))
    both = {label: pair for label, pair in pairs.items() if all(pair)}
    if both:
        label = st.selectbox(
            "Texts of",
            list(both),
            key="pin_text",
            width=320,
            help="The policy whose two answers are compared token by token: the pinned run's and that of the run that is shown.",
        )
        st.html(results.side_by_side(*both[label], names=(f"run {pin.number}", f"run {record.number}")))


def _pairs(pin: Run, run: Run) -> dict[str, tuple[Row | None, Row | None]]:
    """Label -> its row in both runs, None where a run has none."""
    labels = dict.fromkeys([row.label for row in (*run.rows, *pin.rows)])
    find = lambda rows, label: next((row for row in rows if row.label == label), None)  # noqa: E731
    return {label: (find(pin.rows, label), find(run.rows, label)) for label in labels}


COMPARED = ("mean KL", "first difference", "entries a head", "memory")


def _table(pin: jobs.Record, record: jobs.Record, pairs: dict[str, tuple[Row | None, Row | None]]) -> str:
    """A line a policy, two columns a fact."""
    facts = [fact for name in COMPARED for fact in results.FACTS if fact[0] == name]
    unit = lambda text: f' <span class="kv-unit">{text}</span>' if text else ""  # noqa: E731
    top = "".join(
        f'<th scope="colgroup" colspan="2" title="{about}">{name}{unit(of)}</th>' for name, of, about, _ in facts
    )
    runs = f'<th scope="col">run {pin.number}</th><th scope="col">run {record.number}</th>' * len(facts)
    lines = ""
    for label, pair in pairs.items():
        cells = ""
        for name, _, _, value in facts:
            for row, run in zip(pair, (pin.run, record.run), strict=True):
                none = row is None or (row is run.reference and name in results.FULL_HAS_NONE)
                cells += f"<td>{'' if none else escape(value(row))}</td>"
        lines += f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>'
    head = f"<thead><tr><th></th>{top}</tr><tr><th></th>{runs}</tr></thead>"
    return f'<div class="kv-scroll"><table class="kv-table" data-testid="kv-pinned">{head}<tbody>{lines}</tbody></table></div>'
