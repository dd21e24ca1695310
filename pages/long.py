"""Long generation: eviction goes on while the policies write, so that memory stays bounded however long the text becomes."""

from dataclasses import replace

import streamlit as st

import ui
from ui import cards, jobs, long

LENGTH, EVERY = 300, 64
PAPERS = {1: "MomentKV: 1", 512: "CapKV: 512"}


def run() -> None:
    """Every chosen policy that can evict while it writes."""
    made, state = ui.experiment(), st.session_state
    able = tuple(p for p in made.policies if not long.refusal(p, int(state.every or EVERY)))
    request = replace(
        made.generate,
        policies=able,
        max_new_tokens=int(state.length or LENGTH),
        evict_every=int(state.every or EVERY),
        stop=not state.endless,
    )
    jobs.start(request, made)


def fault() -> str:
    """Why it cannot run, with the remedy, or nothing."""
    if found := replace(experiment, max_new_tokens=1).fault:
        return found
    if all(long.refusal(p, EVERY) for p in experiment.policies):
        return "No chosen policy can evict while it writes. Choose another one in the sidebar."
    return ""


def controls(running: bool) -> None:
    wrong, most, state = fault(), long.room(experiment), st.session_state
    for key, usual in (("length", min(LENGTH, most)), ("every", EVERY)):
        if state.get(key) is None and key not in st.query_params:
            state[key] = usual
    if (state.get("length") or 1) > most:
        state.length = most
    with st.container(horizontal=True, vertical_alignment="bottom", key="controls"):
        st.button(
            "Run",
            type="primary",
            key="run",
            on_click=run,
            disabled=bool(running or wrong),
            shortcut="ctrl+enter",
            help=wrong or "Read the prompt, evict, and go on evicting while every policy writes.",
        )
        st.button(
            "Cancel",
            key="cancel",
            on_click=task.job.cancel if running else None,
            disabled=not running,
            help="Stops between two layers or two tokens; what is written so far stays.",
        )
        st.number_input(
            "New tokens",
            1,
            most,
            None,
            step=50,
            key="length",
            bind="query-params",
            width=150,
            help=f"How many tokens each policy writes at most; here {most:,} are the limit.",
        )
        st.number_input(
            "Evict every, tokens",
            1,
            512,
            None,
            key="every",
            bind="query-params",
            width=160,
            help="After so many tokens each policy is cut back to the budget; in between the cache grows. 1 is one entry a step.",
        )
        st.pills(
            "As in the papers",
            list(PAPERS),
            **ui.shows(
                "every_of",
                state.every if state.every in PAPERS else None,
                change=lambda every: every and state.update(every=every),
                given="default",
            ),
            format_func=PAPERS.__getitem__,
            help="MomentKV evicts one entry a step, CapKV every 512 steps.",
        )
        st.toggle(
            "Go on after the end token",
            True,
            key="endless",
            bind="query-params",
            help="The model's end of the answer does not stop it, so that short answers become long generations, too.",
        )


@st.fragment(run_every=0.5)
def follow() -> None:
    if not task.job.active:
        st.rerun()
    st.progress(min(max(task.job.doing.share, 0.0), 1.0), text=jobs.line(task.job))
    long.written(jobs.rows(task) or cards.waiting(task.experiment), active=True)


@st.fragment(run_every=4.0)
def follow_figures() -> None:
    rows = jobs.rows(task)
    if task.job.active and rows and rows[0].entries_by_step:
        long.figures(rows, task.job.request.max_new_tokens, live=True)


experiment = ui.experiment()
ui.header(experiment)
task, record = jobs.task(), jobs.latest(live=True)
mine = jobs.is_run(task, live=True)
controls(mine and task.job.active)
long.words(experiment, int(st.session_state.every or EVERY))
if mine and task.job.active:
    follow()
    follow_figures()
elif mine and task.job.result is None:
    jobs.outcome(task)
    long.written(jobs.rows(task) or cards.waiting(experiment), active=False)
elif record is None:
    st.markdown("Run this experiment to see what stays in each cache when the text grows far past the budget.")
    long.written(cards.waiting(experiment), active=False)
else:
    rows, config = record.run.rows, record.run.config
    if record.experiment.generate != experiment.generate:
        st.caption(f":material/history: Shown is run {record.number}: {record.experiment.words()}.")
    long.written(rows, active=False)
    long.costs(rows)
    long.figures(rows, config["max_new_tokens"], live=False)
