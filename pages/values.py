"""Values: one head's values on a plane, what is kept and what is evicted, and the error between them as arrows and an angle."""

import streamlit as st

import ui
from kvviz import analysis
from kvviz.analysis import HeadView
from kvviz.experiment import Size
from kvviz.figures import style, values
from kvviz.figures.angle import angle, angle_alt
from kvviz.figures.style import number
from ui import scrub
from ui.html import on_phones, picture
from ui.state import set_size

ROW = '<tr><td>{}</td><td class="kv-symbol">{}</td><td class="kv-number">{}</td></tr>'

PHONE = 366  # pixels that a figure has on a narrow screen

STEPS = {"Up": ("layer", -1), "Down": ("layer", 1), "Left": ("head", -1), "Right": ("head", 1)}


def step(which: str, by: int, count: int) -> None:
    """Go to the next layer or head."""
    st.session_state[f"_{which}"] = (min(st.session_state[f"_{which}"], count - 1) + by) % count


def pickers(layers: int, heads: int) -> tuple:
    """Policy, layer, head, and four small buttons that the arrow keys press."""
    left, *middle, right = st.columns([2, 1, 1, 1], vertical_alignment="bottom")
    with left:
        policy = ui.policy_picker(experiment)
    layer, head = ui.head_picker(layers, heads, middle)
    with right.container(horizontal=True, gap="small", key="steps"):
        for key, (which, by) in STEPS.items():
            count = layers if which == "layer" else heads
            name = f"{'Next' if by > 0 else 'Previous'} {which}"
            st.button(
                name,
                icon=f":material/keyboard_arrow_{key.lower()}:",
                key=f"step_{key.lower()}",
                on_click=step,
                args=(which, by, count),
                shortcut=f"Shift+{key}",
                help=f"{name} (Shift and the arrow key)",
            )
    return policy, layer, head


def pick_budget() -> None:
    """A click on a point of the strip makes its budget the current one."""
    points = st.session_state.strip.selection.points
    if points:
        made = ui.experiment()
        set_size(Size.of(int(points[0]["x"]), made.unit, made.n_tokens, made.shape))


def facts(view: HeadView) -> str:
    """The parts of the error, each with its symbol."""
    if view.n_kept == view.n_tokens:
        why = "The layer has a sliding window" if view.sliding else "The budget covers all entries"
        return f'<p class="kv-small">{why}: nothing is evicted, f_R is f, and there is no error.</p>'
    order = f"order {view.order}" + (f", p = {view.partition:g}" if view.partition else "")
    rows = [
        ("angle between f<sub>R</sub> and f<sub>E</sub>", "∠", f"{view.angle:.0f}°"),
        ("attention lost", "w<sub>E</sub>", f"{number(100 * view.w_E)}%"),
        ("gap", "γ", number(view.gamma)),
        ("error", "w<sub>E</sub> γ", f"{number(100 * view.relative_error)}%"),
        (f"after correction, {order}", "‖f − f̂‖ / ‖f‖", f"{number(100 * view.corrected_error)}%"),
        ("lost mass beyond estimate", "log Z<sub>E</sub> − log Ẑ<sub>E</sub>", f"{number(view.log_z_gap)} nats"),
    ]
    table = f'<table class="kv-facts" data-testid="kv-facts">{"".join(ROW.format(*row) for row in rows)}</table>'
    return picture(angle(view, ui.is_dark()), angle_alt(view), height=260) + table


def averaged(view: HeadView) -> str:
    """What the numbers average over, and whose estimate is shown."""
    over = f"{view.probes:,} queries of the question and of the full cache's answer" if view.probes > 1 else "one query"
    who = "which this policy applies" if view.corrects else "which this policy does not apply"
    return (
        f"Means over {over}; query head {view.head} reads KV head {view.kv_head}. The estimate is MomentKV's of order "
        f"{view.order}, {who}. The plane is fitted on all {view.n_tokens:,} values of the head."
    )


experiment = ui.experiment()
ui.header(experiment)
state = ui.prompt_state(experiment, probes=True)
numbers = analysis.of(state)
policy, layer, head = pickers(len(state.layers), state.layers[0].queries.shape[0])
budget = experiment.budget_of(policy)
try:
    view = numbers.head(policy, budget, layer, head)
except ValueError as error:  # the method needs what this prompt was not read with
    st.warning(str(error))
    st.stop()
left, right = st.columns([2, 1], gap="medium")
with left:
    texts = numbers.texts(ui.engine_for(experiment.model).tokenizer.decode)
    ui.chart(values.plane(view, texts, ui.is_dark()), key="plane", alt=values.plane_alt(view))
with right:
    st.html(on_phones("plane", min(values.plane_height(view), values.plane_height(view, PHONE))))
    st.container(key="facts").html(facts(view))
    st.caption(averaged(view))
curves = numbers.error_by_budget(experiment.policies, None, layer, head)
title = f'<h2 class="kv-h2">Error of layer {layer}, head {head} against the budget</h2>'
st.html(title + style.legend(curves.policies))
strip = values.strip(curves, budget, ui.is_dark(), view.label)
ui.chart(strip, key="strip", alt=values.strip_alt(curves), on_select=pick_budget)
st.caption(
    "Relative error, mean over the same queries, log scales"
    + (f"; dotted and thin: {view.label} with the estimate above" if view.label in curves.corrected else "")
    + ". The vertical line is the current budget: drag it by its handle, or click on a point."
)
scrub.plane(numbers, view, ui.experiment(), ui.is_dark(), facts)  # last: it is needed only with the next move
