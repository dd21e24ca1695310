"""The tour's steps on the screen: each draws its control and its figure, and tells what it says and what it opens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import streamlit as st

from kvviz import tour
from kvviz.analysis import Analysis
from kvviz.analysis import tokens as by_token
from kvviz.analysis.tokens import Shares
from kvviz.experiment import MIB, Experiment, Size
from kvviz.figures import angle as drawing
from kvviz.figures import tour as figures
from kvviz.prompts import PromptError
from ui import cards, jobs
from ui.frame import chart, is_dark
from ui.html import both, picture
from ui.switch import open_page

LEVELS = 16
STRONGEST = 62
"""Steps of shading, and percent of the policy's colour behind a token that all heads keep; as on the page Tokens."""

WHICH = {"large": "small loss, large error", "small": "small loss, small error"}


@dataclass(frozen=True, eq=False)
class Scene:
    """What the steps look at, and where they draw their control and their figure."""

    experiment: Experiment
    numbers: Analysis
    texts: Sequence[str]
    control: Any
    figure: Any

    @property
    def shape(self):
        """The model's shape."""
        return self.experiment.shape


@dataclass(frozen=True)
class Told:
    """What a step says, and what its page opens with: fields of the experiment, and the page's own parameters."""

    sentences: list[str]
    changes: dict[str, Any]
    own: dict[str, str] | None = None


def cache(scene: Scene) -> Told:
    """1: the cache grows."""
    n = len(scene.texts)
    with scene.control:
        read = st.slider(
            "Tokens read",
            1,
            n,
            n // 2,
            key="tour_read",
            persist_state="session",
            help="How far the model is in the text.",
        )
    found = tour.Growth(read, n, scene.shape)
    with scene.figure:
        chart(figures.growth(found, is_dark()), key="tour_growth", alt=figures.growth_alt(found))
        latest = "".join(scene.texts[max(0, read - 40) : read])
        st.html(
            STYLE + f'<div class="kv-small">The last words read</div><div class="kv-passage">{escape(latest)}</div>'
        )
    return Told(found.sentences(), {})


def budget(scene: Scene) -> Told:
    """2: what a budget takes away."""
    chosen = _budget(scene, "tour_budget", "Entries that each head keeps on average, of those of the whole text.")
    found = tour.Taken(by_token.kept_by(scene.numbers, tour.CAPKV, chosen), scene.shape)
    with scene.figure:
        _passage(scene, found.kept)
    return Told(found.sentences(), {"chosen": (tour.CAPKV, tour.MOMENTKV), "size": Size(chosen)})


def sinks(scene: Scene) -> Told:
    """3: sinks and recent tokens."""
    with scene.control:
        safe = st.toggle(
            f"Protect the first {tour.SINKS} and the last {tour.RECENT} tokens",
            key="tour_protect",
            persist_state="session",
            help="Protected entries are never evicted. They count as part of the budget.",
        )
    with scene.figure, st.spinner("Working out the error of every head"):
        found = tour.protection(scene.numbers)
        chart(figures.protection(found, safe, is_dark()), key="tour_protection", alt=figures.protection_alt(found))
        st.caption(
            f"Budget {tour.BUDGET} entries a head; mean over all layers and heads. The outline is the other setting."
        )
    policies = tuple(tour.policy(name) for name in found.policies.values())
    return Told(found.sentences(), {"chosen": policies, "equal": (tour.SINKS, tour.RECENT) if safe else None})


def needle(scene: Scene) -> Told:
    """4: why one method loses the needle that another keeps."""
    chosen = _budget(scene, "tour_needle", "Entries a head, for both methods. The answers below are written with it.")
    found = tour.needle(scene.numbers, scene.texts, chosen)
    made = tour.experiment(scene.experiment, size=Size(chosen), n_tokens=scene.experiment.n_tokens)
    with scene.figure:
        chart(figures.needle(found, is_dark()), key="tour_needle_bars", alt=figures.needle_alt(found))
        _answers(made)
    where = tour.location(scene.texts)[1].start
    return Told(found.sentences(), {"size": made.size}, {"token": str(where), "minus": "1"})


def _answers(made: Experiment) -> None:
    """Both answers from a run of this session, or the button that makes one."""
    runs = reversed(jobs.history(live=False))
    record = next((r for r in runs if not r.file and r.experiment.generate == made.generate), None)
    current = jobs.task()
    with st.container(key="tour_answers"):
        if record is not None:
            st.html(cards.cards(record.run.rows))
        elif current is not None and current.job.active:
            jobs.bar(current, key="tour_cancel")
        else:
            if current is not None and current.experiment == made:
                jobs.outcome(current)
            st.button(
                f"Let both answer with {min(made.budget, made.n_tokens):,} entries a head",
                key="tour_run",
                on_click=jobs.start,
                args=(made.generate, made),
                help=f"The full cache, SnapKV and KeyDiff each write {tour.NEW_TOKENS} tokens.",
            )


def angle(scene: Scene) -> Told:
    """5: attention lost, and error."""
    with scene.control:
        which = st.segmented_control(
            "Head",
            list(WHICH),
            format_func=WHICH.__getitem__,
            default="large",
            required=True,
            key="tour_head",
            persist_state="session",
            help="Two heads of this model that lose about the same share of attention, w_E, at this budget.",
        )
    with scene.figure:
        layer, head = getattr(tour.pair(scene.numbers), which)
        view = scene.numbers.head(tour.SNAPKV, tour.BUDGET, layer, head)
        st.html(picture(drawing.angle(view, is_dark()), drawing.angle_alt(view), height=300))
        st.caption(
            "f is the full output, f_R that of what is kept, f_E that of what is evicted; true to length and angle."
        )
    return Told(tour.angle_sentences(view), {"layer": layer, "head": head})


def tau(scene: Scene) -> Told:
    """6: CapKV's dial."""
    with scene.control:
        chosen = st.select_slider(
            "τ",
            tour.TAUS,
            5.0,
            key="tour_tau",
            format_func="{:g}".format,
            persist_state="session",
            help="CapKV's τ: how strongly the expected queries weigh an entry. The paper's value is 5.",
        )
    with scene.figure:
        bar = st.empty()
        follow = lambda share, text: bar.progress(share, f"Working out {text}")  # noqa: E731
        found = tour.tau_curve(scene.numbers, scene.texts, progress=follow)
        bar.empty()
        drawn = figures.taus(found.capacity, found.attention, chosen, is_dark())
        chart(drawn, key="tour_taus", alt=figures.taus_alt(found.capacity, found.attention))
        st.caption(f"Budget {tour.BUDGET} entries a head; mean over all layers and heads.")
    changed = tour.policy("capkv", tau=chosen)
    return Told(found.sentences(chosen), {"chosen": tuple(dict.fromkeys((tour.CAPKV, changed)))})


def correction(scene: Scene) -> Told:
    """7: the correction on and off."""
    with scene.control:
        on = st.toggle(
            "Correct with the statistics",
            key="tour_correct",
            persist_state="session",
            help="Adds the estimate of the evicted part, of order 1, to the output of every head.",
        )
    with scene.figure, st.spinner("Working out MomentKV's eviction, in rounds"):
        found = tour.correction(scene.numbers)
        chart(figures.correction(found, on, is_dark()), key="tour_correction", alt=figures.correction_alt(found))
        st.caption(f"MomentKV at {tour.BUDGET} entries a head; what is kept is the same in both.")
    plain = tour.policy("momentkv", correction=None)
    return Told(found.sentences(), {"chosen": (tour.MOMENTKV, plain)})


def price(scene: Scene) -> Told:
    """8: equal entries or equal bytes."""
    with scene.control:
        equal_bytes = (
            st.segmented_control(
                "Equal",
                ("entries", "bytes"),
                default="entries",
                required=True,
                key="tour_equal",
                persist_state="session",
                help="What both methods get the same of.",
            )
            == "bytes"
        )
    found = tour.price(scene.shape, len(scene.texts), equal_bytes)
    with scene.figure:
        chart(figures.price(found, is_dark()), key="tour_price", alt=figures.price_alt(found))
    size = Size(tour.BUDGET)
    if equal_bytes:
        size = Size.of(tour.BUDGET, MIB, len(scene.texts), scene.shape)
    return Told(found.sentences(), {"chosen": (tour.CAPKV, tour.MOMENTKV), "size": size, "max_new_tokens": 48})


DRAW: tuple[Callable[[Scene], Told], ...] = (cache, budget, sinks, needle, angle, tau, correction, price)
"""How each step is drawn, in the order of tour.STEPS."""


def _budget(scene: Scene, key: str, about: str) -> int:
    """A slider of budgets."""
    with scene.control:
        return st.select_slider(
            "Budget, entries a head",
            [b for b in tour.BUDGETS if b < len(scene.texts)],
            tour.BUDGET,
            key=key,
            format_func="{:,}".format,
            persist_state="session",
            help=about,
        )


def _passage(scene: Scene, kept: Shares) -> None:
    """A stretch of the text, every token shaded by the share of heads that keep it."""
    where = tour.passage(scene.texts)
    parts = []
    for index in where:
        share, count = float(kept.shares[index]), int(kept.counts[index])
        level, tag = int(np.ceil(LEVELS * share)), "span" if count else "del"
        paint = f"background:color-mix(in srgb, var(--kv-c) {round(STRONGEST * level / LEVELS)}%, transparent)"
        text = escape(scene.texts[index])
        space = ' class="kv-space"' if text.isspace() else ""
        parts.append(f'<{tag}{space} style="{paint}" title="{count} of {kept.heads} heads">{text}</{tag}>')
    st.html(
        f'{STYLE}<div class="kv-small">Tokens {where.start:,} to {where.stop:,} of {len(scene.texts):,}</div>'
        f'<div class="kv-passage" style="--kv-c:{both(kept.policy)}">{"".join(parts)}</div>'
    )


def why_the_needle(made: Experiment) -> None:
    """For pages that show the needle: the way to the step that tells who loses it, and why."""
    if made.preset == tour.PRESET and st.button(
        "Why does SnapKV lose the needle that KeyDiff keeps?",
        key="why_needle",
        type="tertiary",
        icon=":material/tour:",
        help=f"Step {tour.WHY} of the tour: who keeps the number token by token, and who asks for it when.",
    ):
        open_page("tour", own={"step": str(tour.WHY)})


def paragraphs(sentences: Sequence[str]) -> str:
    """A step's text; w_E, f_R and the like with their letter below the line."""
    lines = (re.sub(r"\b(w|f|Z)_([ER])\b", r"<i>\1</i><sub>\2</sub>", escape(line, quote=False)) for line in sentences)
    return STYLE + "".join(f'<p class="kv-told">{line}</p>' for line in lines)


def prepared(made: Experiment) -> Experiment:
    """The tour's experiment on the model of the sidebar, measured."""
    from ui.state import measured

    try:
        return measured(tour.experiment(made))
    except PromptError:
        return tour.experiment(made)


STYLE = """<style>
.kv-passage { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; font-size: .86rem;
  line-height: 1.8; white-space: pre-wrap; overflow-wrap: anywhere; padding: .7rem .9rem; border-radius: 8px;
  border: 1px solid color-mix(in srgb, currentColor 14%, transparent) }
.kv-passage > * { border-radius: 2px; padding: 1px 0 }
.kv-passage del { text-decoration: line-through; text-decoration-thickness: 1px; opacity: .62 }
.kv-passage del.kv-space { text-decoration: none }
.kv-told { margin: 0 0 .7rem; line-height: 1.55 }
.st-key-tour_way kbd { display: none }
@media (max-width: 640px) { .st-key-tour_way > :nth-child(2) { order: 3 } }
.st-key-tour_answers .kv-text { min-height: 2.6rem }
</style>"""
