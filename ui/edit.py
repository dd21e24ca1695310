"""The dialog that opens a prompt's text: read it, change it, paste another, upload a file."""

from __future__ import annotations

import streamlit as st

from kvviz.experiment import Experiment
from kvviz.jobs import Prompt
from kvviz.presets import PRESETS
from kvviz.prompts import PromptError, check_text, read_text
from ui.host import encoded, engine_for
from ui.html import plain
from ui.state import take_text

MAX_CHARACTERS = 400_000


@st.dialog("Prompt", width="large", on_dismiss=lambda: forget())
def edit(made: Experiment) -> None:
    """Change the text, its form and the answer's first words."""
    state = st.session_state
    state.setdefault("draft", made.prompt.context)
    state.setdefault("draft_chat", made.prompt.chat)
    state.setdefault("draft_answer", made.prompt.answer)
    st.file_uploader(
        "Text file", key="upload", on_change=_uploaded, help="Plain text in UTF-8. It replaces the text below."
    )
    if error := state.get("_upload_error"):
        st.error(plain(error))
    st.text_area(
        "Text",
        key="draft",
        height=380,
        max_chars=MAX_CHARACTERS,
        persist_state="session",
        help="What the model reads, and what is evicted. It stays on this server and is not part of the link.",
    )
    fault = _count(made)
    left, right = st.columns([1, 2], vertical_alignment="bottom")
    left.toggle(
        "Chat template",
        key="draft_chat",
        persist_state="session",
        help="On: text and question are one message of a user. Off: plain text that is continued.",
    )
    right.text_input(
        "First words of the answer",
        key="draft_answer",
        persist_state="session",
        help="Written for the model, after the question. Small models need them to come to the point.",
    )
    with st.container(horizontal=True):
        if st.button(
            "Use this text",
            type="primary",
            key="use",
            disabled=bool(fault),
            help="Takes the text as the prompt. Policies and budget stay as they are.",
        ):
            _use(made)
            st.rerun()
        if st.button("Leave as it was", key="leave", help="Closes without a change."):
            forget()
            st.rerun()


def _count(made: Experiment) -> str:
    """Tokens of the draft against the model's positions; returns what is wrong with it."""
    state = st.session_state
    try:
        check_text(state.draft or "")
        engine = engine_for(made.model)
        if engine is None:
            st.caption(f"{len(state.draft):,} characters; tokens are counted once the model is loaded.")
            return ""
        chat = state.draft_chat and engine.loaded.chat
        ids, _ = encoded(engine, Prompt(state.draft, made.prompt.question, made.prompt.seen, chat, state.draft_answer))
    except PromptError as error:
        st.error(plain(str(error)))
        return str(error)
    limit = engine.loaded.positions
    if len(ids) + made.max_new_tokens > limit:
        fit = max(limit - made.max_new_tokens, 0)
        fault = f"{len(ids):,} tokens; with {made.max_new_tokens} new ones at most {fit:,} fit. Shorten the text."
        st.error(fault)
        return fault
    st.caption(f"{len(ids):,} of {limit:,} tokens")
    return ""


def _uploaded() -> None:
    state = st.session_state
    state.pop("_upload_error", None)
    if state.upload is not None:
        try:
            state.draft = read_text(state.upload.getvalue())[:MAX_CHARACTERS]
        except PromptError as error:
            state._upload_error = str(error)


def _use(made: Experiment) -> None:
    state = st.session_state
    preset = PRESETS.get(made.preset)
    if preset and state.draft == preset.context and state.draft_chat == preset.chat:
        state._answer = state.draft_answer
    else:
        take_text(state.draft, state.draft_chat, state.draft_answer)
    forget()


def forget() -> None:
    """Drop the draft, so that the dialog opens with the prompt as it is."""
    for key in ("draft", "draft_chat", "draft_answer", "_upload_error"):
        st.session_state.pop(key, None)
