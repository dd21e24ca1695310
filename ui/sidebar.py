"""The sidebar: the experiment, part by part. Every page shows it, and no page asks again."""

from __future__ import annotations

import streamlit as st

from kvviz import memory
from kvviz.experiment import MAX_POLICIES, OWN, Experiment
from kvviz.host import ModelSpec
from kvviz.models import ModelError, available, default_name, yarn
from kvviz.policies import METHODS
from kvviz.presets import PRESETS
from ui import budget, html, jobs, options
from ui.controls import shows
from ui.edit import edit
from ui.host import engine_for, host, loading_for_all
from ui.state import (
    AFTER,
    BEST,
    EQUAL,
    PUBLISHED,
    SEEN,
    USUAL,
    experiment,
    fill_policies,
    restore,
    take_preset,
    write_link,
)

DEVICES = (BEST, "cpu", "cuda", "mps", "auto")
DTYPES = (USUAL, "bf16", "fp16", "fp32")
FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0)


def sidebar() -> None:
    """Draw it, and put what it says into the link."""
    restore()
    jobs.keep_results()
    with st.sidebar, st.container(key="experiment", gap="small"):
        _model()
        _prompt()
        budget.section()
        _policies()
        _protection()
    write_link()
    _notes()


def _notes() -> None:
    """What was wrong with the link, until something is changed, and what the host refused, once."""
    state = st.session_state
    notes, link = state.get("_notes", []), state._link
    if notes and state.setdefault("_noted", link) == link:
        st.warning("  \n".join(notes), icon=":material/link_off:")
    if refused := state.pop("_refused", ""):
        st.error(html.plain(refused))


def _model() -> None:
    state = st.session_state
    made = experiment()
    with st.expander("Model", type="compact", expanded=True, key="part_model"):
        try:
            offers = {offer["name"]: offer["description"] for offer in available()}
        except ModelError as error:
            st.error(html.plain(str(error)))
            offers = {}
        row = st.container(horizontal=True, vertical_alignment="bottom", gap="small")
        row.selectbox(
            "Model",
            list(dict.fromkeys([*offers, state.model])),
            key="model",
            accept_new_options=True,
            label_visibility="collapsed",
            help="A name from the list, or type a Hugging Face id, a local folder or a .gguf file of the supported families.",
            on_change=_load,
        )
        about = "Device, precision and positions"
        with row.popover("", icon=":material/tune:", key="place", help=about, on_change="rerun") as place:
            if place.open:
                _place()
        _status(made)


def _place() -> None:
    """Where and how the model runs."""
    st.selectbox(
        "Device",
        DEVICES,
        key="device",
        on_change=_load,
        persist_state="session",
        help="Where the model runs. The best there is: CUDA, then Apple's MPS, then the CPU.",
    )
    st.selectbox(
        "Precision",
        DTYPES,
        key="dtype",
        on_change=_load,
        persist_state="session",
        help="Of weights and cache. As usual: bf16 on a GPU, fp32 on a CPU.",
    )
    _positions()


def _positions() -> None:
    """YaRN's factor; it is part of the model's name."""
    state = st.session_state
    try:
        _, factor = yarn.split(state.model)
    except ModelError:  # a mistyped factor; loading says so
        factor = 1.0
    st.selectbox(
        "Positions",
        factors := list(dict.fromkeys([*FACTORS, factor])),
        **shows("yarn", factor, change=_stretch, choices=factors),
        format_func=lambda factor: "as the model has them" if factor == 1 else f"× {factor:g} (YaRN)",
        help="YaRN slows the rotations down, so that texts longer than the model was trained on fit. It costs some quality.",
    )


def _stretch(factor: float) -> None:
    state = st.session_state
    state.model = yarn.join(state.model.split(":yarn=")[0], factor)
    _load()


def _load() -> None:
    jobs.load(experiment())


def _status(made: Experiment) -> None:
    """Device, dtype and memory of the loaded model, the queue; or the load's progress."""
    task, engine = jobs.loading(), engine_for(made.model)
    idle = host().engine is None and (host().queue_length == 0 or loading_for_all(made.model) is not None)
    if (
        engine is None
        and idle
        and made.model.name == _usual()
        and (task is None or task.experiment.model != made.model)
    ):
        jobs.load(made)
        task = jobs.loading()
    if task and task.job.active and task.experiment.model == made.model:
        _follow_load(task)
    elif engine is None:
        if task and task.experiment.model == made.model and task.job.error:
            st.error(html.plain(task.job.error))
        st.caption(_other(made.model))
        st.button(
            "Load",
            key="load",
            on_click=_load,
            width="stretch",
            help="Loads the model; another one that is loaded makes room for it.",
        )
    else:
        st.html(html.model_facts(engine.loaded) + html.memory_bar(memory.of(engine.loaded), made))
    _queue()


def _usual() -> str:
    """The model that is loaded without being asked for; what a link names is loaded at a click."""
    try:
        return default_name()
    except ModelError:
        return ""


def _other(wanted: ModelSpec) -> str:
    here = host().spec
    busy = f" The host has {here.name} loaded, which makes room for it." if here and here != wanted else ""
    return f"Not loaded yet. Running loads it first.{busy}"


@st.fragment(run_every=0.2)
def _follow_load(task: jobs.Task) -> None:
    if not task.job.active:
        st.rerun()
    st.progress(min(max(task.job.doing.share, 0.0), 1.0), text=jobs.line(task.job))


def _queue() -> None:
    """Queue length and my place; it follows a job of mine on whatever page it was started."""
    task = jobs.task()
    if task and task.job.active:
        _follow_queue(task)
    else:
        st.html(html.queue(host().queue_length, None))


@st.fragment(run_every=1.0)
def _follow_queue(task: jobs.Task) -> None:
    if not task.job.active:
        st.rerun()
    st.html(html.queue(host().queue_length, host().place(task.job), jobs.line(task.job)))


def _prompt() -> None:
    state = st.session_state
    with st.expander("Prompt", type="compact", expanded=True, key="part_prompt"):
        with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
            st.selectbox(
                "Preset",
                [*PRESETS, *([OWN] if state.preset == OWN or state.get("_own") else [])],
                format_func=lambda name: PRESETS[name].title if name in PRESETS else "A text of your own",
                key="preset",
                label_visibility="collapsed",
                on_change=take_preset,
                help="Six texts that show different things. Edit opens the text, for reading, changing, pasting or uploading.",
            )
            st.button(
                "Edit",
                key="edit",
                on_click=lambda: state.update(_editing=True),
                help="Opens the text: read it, change it, paste another, upload a file.",
            )
        made = experiment()
        if state.pop("_editing", False):
            edit(made)
        st.html(html.prompt_facts(made, PRESETS[state.preset].shows if state.preset in PRESETS else ""))
        st.text_area(
            "Question",
            key="question",
            height=84,
            max_chars=4000,
            placeholder="None: the text is continued",
            help="Read by every policy after the text. Without one the text is continued.",
        )
        st.segmented_control(
            "The question is",
            (AFTER, SEEN),
            key="seen",
            required=True,
            width="stretch",
            label_visibility="collapsed",
            help="After eviction the cache must serve any question (CapKV's setting). Seen by eviction, the question is part "
            "of what the scores look at (SnapKV's and MomentKV's setting).",
        )
        if made.fault:
            st.warning(html.plain(made.fault))


def _policies() -> None:
    state = st.session_state
    with st.expander("Policies", type="compact", expanded=True, key="part_policies"):
        slots = _offered()
        st.pills(
            "Policies",
            slots,
            selection_mode="multi",
            key="chosen",
            format_func=options.slot_title,
            on_change=_choose,
            label_visibility="collapsed",
            help=f"Up to {MAX_POLICIES} ways to evict, beside the full cache, which always runs.",
        )
        st.html(html.pill_colours([slot.split("-")[0] for slot in slots]))
        for slot in state.chosen:
            options.popover(slot)
        if state.pop("_too_many", False):
            st.caption(f"At most {MAX_POLICIES} at once.")


def _offered() -> list[str]:
    """Every method, and after it the further settings of it that are chosen."""
    chosen = st.session_state.chosen
    return [
        slot for name in METHODS if name != "full" for slot in (name, *(c for c in chosen if c.startswith(f"{name}-")))
    ]


def _choose() -> None:
    """Sort the chosen policies as they are offered, and keep to the limit."""
    state = st.session_state
    order = _offered()
    chosen = sorted(state.chosen, key=order.index)
    state._too_many = len(chosen) > MAX_POLICIES
    kept = [s for s in chosen if s in state._slots][:MAX_POLICIES]
    new = [s for s in chosen if s not in state._slots][: MAX_POLICIES - len(kept)]
    for slot in new:
        state._slots[slot] = options.published(slot)
    fill_policies(tuple(state._slots[s] for s in sorted([*kept, *new], key=order.index)))


def _protection() -> None:
    state = st.session_state
    equal = state.protect == EQUAL
    with st.expander("Protection", type="compact", key="part_protection", expanded=equal, on_change="rerun") as part:
        if not part.open:
            return
        st.segmented_control(
            "Protection",
            (PUBLISHED, EQUAL),
            key="protect",
            required=True,
            persist_state="session",
            width="stretch",
            label_visibility="collapsed",
            help="Entries that are never evicted. Published settings differ, and that alone can decide a comparison; equal for "
            "all puts every policy on the same footing.",
        )
        if state.protect == EQUAL:
            left, right = st.columns(2)
            left.number_input(
                "Sinks", 0, 1024, key="sinks", persist_state="session", help="First entries that every policy keeps."
            )
            right.number_input(
                "Recent", 0, 4096, key="recent", persist_state="session", help="Last entries that every policy keeps."
            )
