"""Tokens: the prompt as text, shaded by the share of heads that keep each token; and for one of them, why."""

from html import escape

import streamlit as st

import ui
from kvviz import analysis
from kvviz.analysis import tokens
from kvviz.figures import tokens as figures
from ui import jobs, scrub, why
from ui import tokens as text


def pick() -> None:
    """The token that was clicked, or reached with the arrow keys."""
    if (chosen := text.picked()) is not None:
        st.session_state._token = chosen


def clicked() -> None:
    """A click on the map of heads: look at the first query head of that KV head."""
    points = st.session_state.why_map.selection.points
    if points:
        layer, kv_head = points[0]["customdata"][:2]
        st.session_state._layer, st.session_state._head = int(layer), int(kv_head) * state.layers[0].groups


def policies() -> tuple:
    """The policy, and the one that it is compared with."""
    left, right = st.columns(2, vertical_alignment="bottom")
    with left:
        policy = ui.policy_picker(experiment)
    with right:
        other = ui.other_picker(experiment)
    return policy, other


def budget(policy) -> int:
    return experiment.budget_of(policy)


experiment = ui.experiment()
ui.header(experiment)
state = ui.prompt_state(experiment)
numbers = analysis.of(state)
decode = ui.engine_for(experiment.model).tokenizer.decode
texts = numbers.result(("pieces",), lambda: tokens.pieces(state.ids, decode))
st.html(text.styles())
policy, other = policies()
token = text.picker(texts)
try:
    first = tokens.kept_by(numbers, policy, budget(policy))
    second = other and tokens.kept_by(numbers, other, budget(other))
    reason = tokens.why(numbers, policy, budget(policy), token)
except ValueError as error:  # the method needs what this prompt was not read with
    st.warning(str(error))
    st.stop()
left, right = st.columns([3, 2], gap="medium")
with left:
    st.html(text.legend(first, second))
    with st.container(height=520, border=False, key="strip"):
        st.html(text.strip(texts, first, second, token))
    text.listen(token, pick)
with right:
    st.html(f'<h2 class="kv-h2">Why token {token:,}</h2>' + text.quote(texts, token))
    layer, head = ui.head_picker(len(state.layers), state.layers[0].queries.shape[0])
    st.markdown(why.verdict(first, reason, layer, head // state.layers[0].groups))
    if state.layers[layer].sliding:
        st.caption("Choose a layer without a sliding window for the parts of the score.")
    else:
        why.parts(tokens.facts(numbers, policy, budget(policy), token, layer, head), reason, layer, head, len(texts))
ui.chart(
    figures.profile([s for s in (first, second) if s], token, ui.is_dark()),
    key="profile",
    alt=figures.profile_alt([first]),
)
st.html(f'<h2 class="kv-h2">Token {token:,} in every layer and head, {escape(first.label)}</h2>')
ui.chart(
    figures.why_map(reason, state.layers[0].groups, ui.is_dark()),
    key="why_map",
    alt=figures.why_alt(reason, texts[token]),
    on_select=clicked,
)
st.caption(
    "KV heads: the cutoff over the token's rank; from 1 on it is kept (circle), below it is evicted (cross). Query heads: mean "
    "share of the attention that the answer's queries pay to the prompt. A click on a KV head opens it above."
)
if reason.attention is None:
    st.caption("How much attention the full cache's answer pays to the token is known once it has written one.")
    st.button(
        "Write a short answer",
        key="read",
        on_click=jobs.start,
        args=(experiment.generate, experiment),
        help="The full cache answers once, so that its queries are known.",
    )
scrub.strip(numbers, ui.experiment(), other, token, ui.is_dark())  # last: it is needed only with the next move
