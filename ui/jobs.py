"""Jobs of this session: start one, follow it with a bar, keep what it leaves. Nothing here blocks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo

import streamlit as st

from kvviz.events import Evicted
from kvviz.exceptions import KvvizError
from kvviz.experiment import Experiment
from kvviz.host import CANCELLED, FAILED, QUEUED, Job, Request
from kvviz.jobs import Generate, Load
from kvviz.runs import Row, Run
from kvviz.state import PromptState
from ui.host import Alive, encoded, engine_for, host, loading_for_all, session_id
from ui.html import plain

HISTORY = 10
"""Runs that a session keeps."""

EVERY = 0.3
"""Seconds between two looks at a job."""


@dataclass
class Task:
    """A job and the experiment that it is for."""

    job: Job
    experiment: Experiment
    kept: bool = False


@dataclass(frozen=True)
class Record:
    """A finished run of this session, with the experiment that it is of.

    Attributes:
        at: the time of day when it ended. file: name of the file that it was opened from, or "".
    """

    number: int
    experiment: Experiment
    run: Run
    at: str = ""
    file: str = ""


def start(request: Request, experiment: Experiment, slot: str = "_task") -> None:
    """Submit a job for this session in place of the one before it."""
    before, session = st.session_state.get(slot), session_id()
    if before and before.job.active and before.job.session == session:
        before.job.cancel()
    try:
        st.session_state[slot] = Task(host().submit(request, session, Alive(session)), experiment)
    except KvvizError as error:  # too many are waiting
        st.session_state._refused = str(error)


def task() -> Task | None:
    """The session's latest job, if any; a load is none."""
    return st.session_state.get("_task")


def loading() -> Task | None:
    """The session's latest load, if any."""
    return st.session_state.get("_load")


def load(experiment: Experiment) -> None:
    """Make the experiment's model ready; a load that began with the server is followed like one's own."""
    if job := loading_for_all(experiment.model):
        st.session_state._load = Task(job, experiment)
    else:
        start(Load(experiment.model), experiment, slot="_load")


def keep_results() -> None:
    """Move a finished run into the session's history; called at the top of every script run."""
    current = task()
    if current and not current.kept and not current.job.active:
        current.kept = True
        if current.job.result is not None:
            add(current.job.result, current.experiment)


def add(run: Run, experiment: Experiment, file: str = "") -> Record:
    """Put a run into the session's history, and show it; a pinned one stays."""
    state = st.session_state
    state._runs = state.get("_runs", 0) + 1
    record = Record(state._runs, experiment, run, clock(), file)
    kept = [r for r in history() if r.number == state.get("_pinned")]
    rest = [r for r in history() if r not in kept]
    state._history = sorted([*kept, *rest[-(HISTORY - 1 - len(kept)) :], record], key=lambda r: r.number)
    state._shown = record.number
    return record


def clock() -> str:
    """The time of day where the person is."""
    try:
        zone = ZoneInfo(st.context.timezone or "")
    except (ValueError, OSError, KeyError):
        zone = None
    return datetime.now(zone).strftime("%H:%M")


def history(live: bool | None = None) -> list[Record]:
    """The session's finished runs, the latest last; `live`: only those that evicted while they wrote, or only the others."""
    runs = st.session_state.get("_history", [])
    return [r for r in runs if live is None or bool(r.run.config.get("evict_every")) == live]


def latest(live: bool = False) -> Record | None:
    """The run that is looked at; `live`: of those that evicted while they wrote."""
    return next(reversed(history(live)), None)


def rows(current: Task) -> list[Row]:
    """The rows of a run so far; the worker still writes to them."""
    return [event.facts for event in list(current.job.events) if isinstance(event, Evicted)]


def bar(current: Task, key: str) -> None:
    """What a job is doing, the time left, and Cancel; reruns the page when it is over."""

    @st.fragment(run_every=EVERY)
    def live() -> None:
        if not current.job.active:
            st.rerun()
        st.progress(min(max(current.job.doing.share, 0.0), 1.0), text=line(current.job))

    left, right = st.columns([5, 1], vertical_alignment="bottom")
    with left:
        live()
    right.button(
        "Cancel",
        key=key,
        on_click=current.job.cancel,
        width="stretch",
        help="Stops between two layers or two tokens; what is written so far stays.",
    )


def line(job: Job) -> str:
    """What a job is doing now, in one line."""
    if job.status == QUEUED:
        before = host().place(job)
        return (
            f"Waiting, {before} {'job comes' if before == 1 else 'jobs come'} before this one" if before else "Starting"
        )
    left = job.seconds_left()
    text = job.doing.text[:1].upper() + job.doing.text[1:]
    return text + (f", about {max(1, round(left))} s left" if left is not None else "")


def outcome(current: Task) -> None:
    """Say why a job ended without a result."""
    if current.job.status == FAILED:
        st.error(plain(current.job.error))
    elif current.job.status == CANCELLED:
        st.info("Cancelled.")


def prompt_state(experiment: Experiment, probes: bool = False) -> PromptState:
    """The state of the experiment's prompt, or the way to it; then the page stops here.

    Args:
        probes: also wait for real later queries, which a run leaves.
    """
    state = _cached(experiment, probes)
    if state is not None:
        return state
    current = task()
    if experiment.fault:
        st.warning(plain(experiment.fault))
    elif current and current.job.active:
        bar(current, key="cancel_read")
    else:
        if current and current.experiment.prompt == experiment.prompt:
            outcome(current)
        what = "write a short answer from the full cache" if probes else "read the prompt"
        st.markdown(f"This page shows what happens inside the cache. For that the model has to {what} once.")
        st.button(
            "Read the prompt",
            type="primary",
            key="read",
            on_click=_read,
            args=(experiment, probes),
            help="The model reads the text once; the pages then look into its cache without running it again.",
        )
    st.stop()


def _read(experiment: Experiment, probes: bool) -> None:
    start(experiment.generate if probes else experiment.read, experiment)


def _cached(experiment: Experiment, probes: bool) -> PromptState | None:
    engine = engine_for(experiment.model)
    if engine is None or experiment.fault:
        return None
    state = engine.find(*encoded(engine, experiment.prompt))
    if state is None or (probes and state.layers[0].probes is None):
        return None
    has_mass = any(layer.attention_mass is not None for layer in state.layers)
    return None if experiment.wants_mass and not has_mass else state


def is_run(current: Task | None, live: bool = False) -> bool:
    """Whether a job writes (and is not only a reading); `live`: and evicts while it does."""
    request = current and current.job.request
    return isinstance(request, Generate) and bool(request.evict_every) == live
