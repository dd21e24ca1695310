"""What the sidebar says: widget state <-> Experiment <-> link.

Every control keeps its value in st.session_state under its own key, on all pages. `restore` fills the keys from the link (on the
first visit, and when the person goes back in the browser), `experiment` reads them, `write_link` puts them into the address.
"""

from __future__ import annotations

from dataclasses import replace

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from kvviz.experiment import OWN, PARAMETERS, Experiment, Shape, Size, from_query, to_query
from kvviz.host import ModelSpec
from kvviz.jobs import Prompt
from kvviz.models import ModelError, default_name
from kvviz.policies.policy import Policy
from kvviz.presets import PRESETS
from kvviz.prompts import PromptError
from ui.host import encoded, engine_for
from ui.html import plain

BEST, USUAL = "best there is", "usual for the device"
AFTER, SEEN = "asked after eviction", "seen by eviction"
PUBLISHED, EQUAL = "as published", "equal for all"


def restore() -> None:
    """Bring the widgets in line with the address; call it before any widget is drawn."""
    known = "_link" in st.session_state
    if known and not went_back():  # an address that only differs is late: the person was faster than the answer
        return
    query = {key: st.query_params.get_all(key) for key in PARAMETERS if key in st.query_params}
    made, notes = from_query(query, _start())
    if known and "preset" not in query:  # another page's address with less in it
        return
    _fill(made)
    st.session_state._notes = [plain(note) for note in notes]
    st.session_state.pop("_noted", None)
    st.session_state._link = query


def went_back() -> bool:
    """Whether the person came by the browser's Back or Forward: then the address says how things are to be."""
    context = get_script_run_ctx()
    return context is not None and context.is_history_navigation


def _start() -> Experiment:
    """Where a link says nothing; a text of one's own stays in its session."""
    try:
        name = default_name()
    except ModelError as error:
        st.session_state._refused = str(error)
        name = Experiment().model.name
    start = Experiment(model=ModelSpec(name))
    own = st.session_state.get("_own")
    return replace(start, preset=OWN, prompt=Prompt(own, "", chat=True)) if own and _is_own() else start


def _is_own() -> bool:
    return st.query_params.get("preset") == OWN


def _fill(made: Experiment) -> None:
    """Put an experiment into the widgets' keys."""
    state = st.session_state
    state.model, state.device, state.dtype = made.model.name, made.model.device or BEST, made.model.dtype or USUAL
    state.preset, state._own = made.preset, made.prompt.context if made.preset == OWN else state.get("_own", "")
    state.question, state._answer, state._chat = made.prompt.question, made.prompt.answer, made.prompt.chat
    state.seen = SEEN if made.prompt.seen else AFTER
    state._size = made.size
    state.protect = PUBLISHED if made.equal is None else EQUAL
    state.sinks, state.recent = made.equal or (4, 32)
    state.tokens, state.temperature, state.seed = made.max_new_tokens, made.temperature, made.seed
    state._layer, state._head, state._policy = made.layer, made.head, made.policy_index
    fill_policies(made.chosen)


def fill_policies(chosen: tuple[Policy, ...]) -> None:
    """Give every chosen policy a slot: its name, or name-2, name-3 where a method is compared with itself."""
    slots: dict[str, Policy] = dict(st.session_state.get("_slots", {}))
    used: list[str] = []
    for each in chosen:
        slot = next(s for s in _slot_names(each.name) if s not in used)
        slots[slot] = each
        used.append(slot)
    st.session_state._slots, st.session_state.chosen = slots, used


def _slot_names(name: str):
    yield name
    yield from (f"{name}-{number}" for number in range(2, 100))


def experiment() -> Experiment:
    """What the sidebar says, with the prompt's length and the model's shape where its model is loaded."""
    state = st.session_state
    model = ModelSpec(
        state.model or Experiment().model.name,
        None if state.device == BEST else state.device,
        None if state.dtype == USUAL else state.dtype,
    )
    made = Experiment(
        model=model,
        prompt=_prompt(),
        preset=state.preset,
        chosen=tuple(state._slots[slot] for slot in state.chosen),
        size=state._size,
        equal=(int(state.sinks), int(state.recent)) if state.protect == EQUAL else None,
        policy_index=state._policy,
        layer=state._layer,
        head=state._head,
        max_new_tokens=int(state.tokens),
        temperature=float(state.temperature),
        seed=int(state.seed),
    )
    return measured(made)


def _prompt() -> Prompt:
    state = st.session_state
    context = PRESETS[state.preset].context if state.preset in PRESETS else state.get("_own", "")
    return Prompt(context, state.question or "", state.seen == SEEN, state._chat, state._answer)


def measured(made: Experiment) -> Experiment:
    """The experiment with the prompt's length and the model's shape, where its model is loaded."""
    engine = engine_for(made.model)
    if engine is None:
        return made
    if made.prompt.chat and not engine.loaded.chat:
        made = replace(made, prompt=replace(made.prompt, chat=False))
    shape = Shape.of(engine.loaded)
    made = replace(made, shape=shape, layer=min(made.layer, shape.all_layers - 1), head=min(made.head, shape.heads - 1))
    try:
        ids, _ = encoded(engine, made.prompt)
    except PromptError:
        return made
    return replace(made, n_tokens=len(ids))


def take_back(made: Experiment) -> None:
    """Put the sidebar to an experiment, from a callback."""
    _fill(made)


def write_link() -> None:
    """Put the experiment into the address."""
    made = to_query(experiment())
    wanted = {key: value if isinstance(value, list) else [value] for key, value in made.items()}
    written, st.session_state._link = st.session_state._link, wanted
    for key in PARAMETERS:
        new, here = wanted.get(key, []), st.query_params.get_all(key)
        if new == here == written.get(key, []):  # `here` alone may be late
            continue
        if new or not here:
            st.query_params[key] = new
        if not new:
            del st.query_params[key]


def set_size(size: Size) -> None:
    """Choose a budget."""
    st.session_state._size = size


def take_preset() -> None:
    """The question, answer and form of the chosen preset."""
    preset = PRESETS.get(st.session_state.preset)
    if preset:
        st.session_state.question, st.session_state._answer = preset.question, preset.answer
        st.session_state._chat = preset.chat


def take_text(text: str, chat: bool, answer: str) -> None:
    """A text of one's own in place of the preset."""
    st.session_state._own, st.session_state.preset = text, OWN
    st.session_state._chat, st.session_state._answer = chat, answer
