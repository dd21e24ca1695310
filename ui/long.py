"""The parts of the page Long generation: who can evict while it writes and what it keeps, the cards, the figures, the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import streamlit as st

from kvviz.experiment import Experiment
from kvviz.figures import long
from kvviz.limits import Limits
from kvviz.policies.policy import Policy
from kvviz.prompts import PromptError, encode_question
from kvviz.runs import Row
from ui import cards
from ui.frame import chart, is_dark
from ui.host import encoded, engine_for
from ui.html import both

UNKNOWN = 8192
"""Stands for the room in the model until it is loaded."""

STYLE = """<style>
.kv-text.kv-tail { display: flex; flex: none; flex-direction: column-reverse; overflow-y: auto; height: 12rem; min-height: 0 }
</style>"""


def refusal(policy: Policy, every: int) -> str:
    """Why a policy cannot evict while it writes, or nothing."""
    try:
        policy.scorer.while_decoding(every)
    except ValueError as error:
        return str(error)
    return ""


def room(experiment: Experiment) -> int:
    """How many tokens can be written before the model's positions end, or this server's limit."""
    engine, prompt = engine_for(experiment.model), experiment.prompt
    if engine is None or not experiment.n_tokens:
        return UNKNOWN
    try:
        tail = encoded(engine, prompt)[1]
        asked = [] if prompt.seen else encode_question(engine.tokenizer, prompt.question, tail, prompt.answer)
    except PromptError:
        asked = []
    most = engine.loaded.positions - experiment.n_tokens - len(asked)
    return max(1, min(most, Limits.from_environment().new_tokens or most))


def words(experiment: Experiment, every: int) -> None:
    """What stays, and how often is evicted; and who is left out."""
    how = "After every token" if every == 1 else f"After every {every:,} tokens"
    stays = [_stays(experiment, policy) for policy in experiment.policies if not refusal(policy, every)]
    if stays:
        st.caption(f"{how} entries are evicted: {'; '.join(stays)}. The full cache evicts nothing and grows.")
    for policy in experiment.policies:
        if why := refusal(policy, every):
            st.info(f"{policy.label} is left out. {why}")


def _stays(experiment: Experiment, policy: Policy) -> str:
    budget = experiment.budget_of(policy)
    sinks, recent = policy.protection(max(experiment.n_tokens, budget), budget)
    first = f"{sinks:,} sink{'s' * (sinks > 1)}" if sinks else ""
    last = f"the last {recent:,}" if recent > 1 else "the last one" if recent else ""
    always = " and ".join(part for part in (first, last) if part)
    return f"{policy.label} is cut back to {budget:,} a head" + (
        f", always with {always}" if always else ", none of them protected"
    )


def written(rows: Sequence[Row], active: bool) -> None:
    """The cards, each with the end of its text in view."""
    html = cards.cards(rows, active=active).replace('<div class="kv-text">', '<div class="kv-text kv-tail"><div>')
    st.html(STYLE + html.replace("</div><footer>", "</div></div><footer>"))


def figures(rows: Sequence[Row], steps: int, live: bool) -> None:
    """Memory, divergence and raster, as far as they go."""
    dark, key = is_dark(), "live" if live else "done"
    st.subheader("What each policy holds", anchor=False)
    chart(long.memory(rows, steps, dark), key=f"memory_{key}", alt=long.memory_alt(rows))
    st.caption(
        "Entries a head are means over all layers that can be evicted. Memory is keys, values and moment statistics."
    )
    st.subheader("Which positions are in the cache", anchor=False)
    prompt = round(rows[0].entries)
    question = round(rows[0].entries_by_step[0]) - prompt
    if any(row.raster for row in rows):
        chart(
            long.raster(rows, prompt, question, steps, dark),
            key=f"raster_{key}",
            alt="Share of the heads that hold each position of the sequence, at steps of the generation, one map a policy.",
        )
        st.caption(
            "All layers and heads together. The dashed line is the end of the prompt"
            + (f", the dotted one that of the question, {question:,} tokens later" if question else "")
            + ". What is below the growing edge is not written yet."
        )
    st.subheader("Distance from the full cache", anchor=False)
    chart(long.divergence(rows, steps, dark), key=f"kl_{key}", alt=long.divergence_alt(rows))
    st.caption(
        "A second copy of each policy reads the full cache's own words as they come and is asked at each step what comes next. "
        f"Thin: every step; thick: mean of {long.SMOOTH} steps on the log scale."
    )


def costs(rows: Sequence[Row]) -> None:
    """The end of it in numbers: a line a fact, a column a policy."""
    heads = "".join(
        f'<th scope="col"><span class="kv-dot" style="--kv-c:{both(row.policy)}"></span>{escape(row.label)}</th>'
        for row in rows
    )
    lines = "".join(
        f'<tr><th scope="row">{name} <span class="kv-unit">{unit}</span></th>'
        + "".join(f"<td>{escape(value)}</td>" for value in values)
        + "</tr>"
        for name, unit, values in long.facts(rows)
    )
    st.html(
        f'<div class="kv-scroll"><table class="kv-table" data-testid="kv-long"><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )
