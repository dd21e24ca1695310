"""Tokens: the prompt as text, shaded by the share of heads that keep each token; and for one of them, why."""

from html import escape

import streamlit as st

import ui
from kvviz import analysis
from kvviz.analysis import tokens
from kvviz.figures import tokens as figures
from kvviz.figures.style import number
from ui import jobs
from ui import tokens as text

NONE = -1


def pick() -> None:
    """The token that was clicked, or reached with the arrow keys."""
    if (chosen := text.picked()) is not None:
        st.session_state.token = chosen


def step(by: int, count: int) -> None:
    st.session_state.token = (int(st.session_state.token) + by) % count


def seek(texts: list[str], after: bool) -> None:
    """Go to the next place where the wanted text stands (or stay, if it stands here)."""
    found, here = tokens.find(texts, st.session_state.find), int(st.session_state.token)
    if found:
        st.session_state.token = next((i for i in found if i > here - (not after)), found[0])


def clicked() -> None:
    """A click on the map of heads: look at the first query head of that KV head."""
    points = st.session_state.why_map.selection.points
    if points:
        layer, kv_head = points[0]["customdata"][:2]
        st.session_state.layer, st.session_state.head = int(layer), int(kv_head) * state.layers[0].groups


def policies() -> tuple:
    """The policy, and the one that it is compared with."""
    left, right = st.columns(2, vertical_alignment="bottom")
    with left:
        policy = ui.policy_picker(experiment)
    if st.session_state.get("minus", NONE) >= len(experiment.policies):
        st.session_state.minus = NONE
    other = right.selectbox(
        "Compared with",
        [NONE, *range(len(experiment.policies))],
        key="minus",
        format_func=lambda i: "nothing" if i == NONE else experiment.policies[i].label,
        persist_state="session",
        help="A second policy shades the difference: purple and a solid line where the first keeps a token in more heads, "
        "orange and a dotted line where the second does.",
    )
    return policy, None if other == NONE else experiment.policies[other]


def token_picker(texts: list[str]) -> int:
    """Choose a token by number, by its text, step by step; a click on the text does the same."""
    count = len(texts)
    if (st.session_state.get("token") or 0) >= count:
        st.session_state.token = count - 1
    left, middle, right = st.columns([2, 3, 4], vertical_alignment="bottom")
    token = left.number_input(
        "Token",
        0,
        count - 1,
        count // 2,
        key="token",
        bind="query-params",
        help="Position in the prompt, counted from 0. A click on the text chooses, too; so do the arrow keys on it.",
    )
    wanted = middle.text_input(
        "Find",
        key="find",
        on_change=seek,
        args=(texts, False),
        help="Goes to the next place in the prompt where it stands.",
    )
    found = tokens.find(texts, wanted) if wanted else []
    with right.container(horizontal=True, gap="small", key="token_steps"):
        st.button(
            f"Next of {len(found):,}" if wanted else "Next match",
            key="find_next",
            disabled=not found,
            on_click=seek,
            args=(texts, True),
            help="The next place where the text stands." if found or not wanted else "It does not stand in the prompt.",
        )
        for by, way in ((-1, "left"), (1, "right")):
            st.button(
                "",
                icon=f":material/keyboard_arrow_{way}:",
                key=f"token_{way}",
                on_click=step,
                args=(by, count),
                shortcut=f"Shift+{way.capitalize()}",
                help=f"{'Next' if by > 0 else 'Previous'} token (Shift and the arrow key)",
            )
    return int(token)


def verdict(shares: tokens.Shares, why: tokens.Why, layer: int, kv_head: int) -> str:
    """What happened to the token, in words."""
    if shares.always[token]:
        return f"{shares.label} never evicts it: it is protected, or the budget holds everything."
    kept = f"{shares.label} keeps it in {shares.counts[token]:,} of {shares.heads:,} heads of all layers"
    if why.sliding[layer]:
        return f"{kept}. Layer {layer} has a sliding window and is never evicted."
    rank, stay = why.rank[layer, kv_head], why.cutoff[layer, kv_head]
    word = "kept" if why.kept[layer, kv_head] else "evicted"
    return (
        f"{kept}. In layer {layer}, KV head {kv_head}, it has rank {rank:,} of {why.candidates:,} that may leave, and the first "
        f"{stay:,} stay: {word}."
    )


def parts(policy, why: tokens.Why, layer: int, head: int) -> None:
    """The score in one head, part by part, and what the continuation really looked at."""
    found = tokens.facts(numbers, policy, budget(policy), token, layer, head)
    rows = [
        (f"{f.name}, {f.symbol}", number(f.value, 3), "not scored" if f.rank is None else f"{f.rank:,}") for f in found
    ]
    if why.attention is not None:
        share, rank = why.attention[layer, head], why.attention_rank[layer, head]
        rows.append(("attention it really got", f"{number(100 * float(share))}%", f"{rank:,}"))
    st.html(text.table((f"layer {layer}, head {head}", "value", f"rank of {len(state.ids):,}"), rows))
    st.caption(" ".join(f"{f.name[:1].upper()}{f.name[1:]}: {f.help}" for f in found))


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
token = token_picker(texts)
try:
    first = tokens.kept_by(numbers, policy, budget(policy))
    second = other and tokens.kept_by(numbers, other, budget(other))
    why = tokens.why(numbers, policy, budget(policy), token)
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
    layer, head = ui.head_picker(experiment, len(state.layers), state.layers[0].queries.shape[0])
    st.markdown(verdict(first, why, layer, head // state.layers[0].groups))
    if state.layers[layer].sliding:
        st.caption("Choose a layer without a sliding window for the parts of the score.")
    else:
        parts(policy, why, layer, head)
ui.chart(
    figures.profile([s for s in (first, second) if s], token, ui.is_dark()),
    key="profile",
    alt=figures.profile_alt([first]),
)
st.html(f'<h2 class="kv-h2">Token {token:,} in every layer and head, {escape(first.label)}</h2>')
ui.chart(
    figures.why_map(why, state.layers[0].groups, ui.is_dark()),
    key="why_map",
    alt=figures.why_alt(why, texts[token]),
    on_select=clicked,
)
if why.attention is None:
    st.caption("How much attention the full cache's answer pays to the token is known once it has written one.")
    st.button("Write a short answer", key="read", on_click=jobs.start, args=(experiment.generate, experiment))
