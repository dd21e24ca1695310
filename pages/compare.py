"""Compare: policies write side by side from what each of them kept; below, how far they are from the full cache."""

import streamlit as st

import ui
from ui import cards, html, jobs, results
from ui.export import export
from ui.histories import beside, histories, origin, pinned, shown
from ui.tour import why_the_needle

LENGTHS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def run() -> None:
    made = ui.experiment()
    jobs.start(made.generate, made)


def controls(current: jobs.Task | None, record: jobs.Record | None) -> None:
    running = jobs.is_run(current) and current.job.active
    with st.container(horizontal=True, vertical_alignment="bottom", key="controls"):
        st.button(
            "Run",
            type="primary",
            key="run",
            on_click=run,
            disabled=bool(running or experiment.fault),
            shortcut="ctrl+enter",
            help=experiment.fault or "Read the prompt, evict, and write under every policy.",
        )
        st.button(
            "Cancel",
            key="cancel",
            on_click=current.job.cancel if running else None,
            disabled=not running,
            help="Stops between two layers or two tokens; what is written so far stays.",
        )
        st.select_slider(
            "New tokens",
            sorted({*LENGTHS, st.session_state.tokens}),
            key="tokens",
            width=220,
            persist_state="session",
            help="Each policy writes so many tokens at most; it stops when the model ends its answer.",
        )
        with st.popover("Sampling", type="tertiary"):
            st.number_input(
                "Temperature",
                0.0,
                10.0,
                step=0.1,
                key="temperature",
                persist_state="session",
                help="0 is greedy: always the likeliest token.",
            )
            st.number_input(
                "Seed",
                0,
                2**31 - 1,
                key="seed",
                persist_state="session",
                help="The same seed serves every policy alike.",
            )
        histories(experiment)
        export(record)


def status() -> st.delta_generator.DeltaGenerator:
    """A line above the cards, of one height whatever stands in it."""
    return st.container(key="status", gap=None)


@st.fragment(run_every=jobs.EVERY)
def live(current: jobs.Task) -> None:
    if not current.job.active:
        st.rerun()
    status().progress(min(max(current.job.doing.share, 0.0), 1.0), text=jobs.line(current.job))
    st.html(cards.cards(cards.so_far(jobs.rows(current), current.experiment), active=True))


def finished(current: jobs.Task | None, record: jobs.Record | None) -> None:
    broken = jobs.is_run(current) and current.job.result is None
    if broken:
        with status():
            jobs.outcome(current)
    if broken and (jobs.rows(current) or record is None):
        st.html(cards.cards(cards.so_far(jobs.rows(current), current.experiment)))
    elif record is None:
        status().markdown(
            "Run this experiment to see what each policy writes from the part of the cache that it keeps."
        )
        st.html(cards.cards(cards.waiting(experiment)))
        why_the_needle(experiment)
    else:
        status().caption(about(record))
        st.html(cards.cards(record.run.rows))
        why_the_needle(record.experiment)
        beside(pinned(), record)
        results.timeline(record.run)
        results.token_diff(record.run)
        results.costs(record.run)
        results.counts(record.run)


def about(record: jobs.Record) -> str:
    """Which run is shown; in full where the sidebar says something else by now."""
    took = record.run.reference.seconds.get("prefill", 0.0)
    if record.experiment.generate == experiment.generate:
        return f"{html.plain(origin(record))}. Prompt read in {took:.3g} s, once for all policies."
    words = html.plain(record.experiment.words())
    return f"{html.plain(origin(record))}: {words}. :orange[The sidebar has changed since.]"


experiment = ui.experiment()
ui.header(experiment)
task, record = jobs.task(), shown()
controls(task, record)
if jobs.is_run(task) and task.job.active:
    live(task)
else:
    finished(task, record)
