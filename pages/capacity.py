"""Capacity: how much of the full cache's query-to-output channel every policy keeps, and whether that tells its divergence."""

import streamlit as st

import kvviz
import ui
from kvviz import analysis
from kvviz.analysis import CAPACITIES, SHARES, CapacityCurves
from kvviz.figures import capacity, style
from ui import scrub


def charts(curves: CapacityCurves, key: str, head: tuple[int, int] | None = None) -> None:
    """K, U and KU side by side; one below the other on a phone."""
    for which, column in zip(CAPACITIES, st.columns(3), strict=True):
        with column:
            figure = capacity.curve(curves, which, removed, ui.is_dark(), head)
            ui.chart(figure, key=f"{key}_{which}", alt=capacity.curve_alt(curves, which, head=head))


def all_heads() -> CapacityCurves:
    """The mean curves; a bar while a policy's are worked out for the first time."""
    bar = st.empty()
    curves = numbers.capacity(
        experiment.policies, progress=lambda share, label: bar.progress(share, text=f"Working out {label}, all layers")
    )
    bar.empty()
    return curves


def points() -> list[dict]:
    """A point for every row of this session's runs of this very prompt."""
    found = []
    for record in ui.history(live=False):
        if record.file or record.experiment.prompt != experiment.prompt or record.experiment.model != experiment.model:
            continue
        for row in record.run.rows:
            if row.policy != "full" and row.mean_kl:
                try:
                    kept = numbers.capacity_at(kvviz.policy(row.policy, **row.settings), row.budget)
                except ValueError:  # what this method needs was read then, and not now
                    continue
                facts = {"policy": row.policy, "label": row.label, "budget": row.budget, "kl": row.mean_kl}
                found.append(facts | {"capacity": dict(zip(CAPACITIES, kept, strict=True))})
    return found


def against_kl() -> None:
    """Capacity kept against the divergence of the outputs, with Spearman's rho."""
    st.html('<h2 class="kv-h2">Capacity against divergence</h2>')
    found = points()
    if not found:
        st.markdown(
            "Run this prompt on the Compare page: every output becomes a point here, its KL against its capacity."
        )
        return
    which = st.segmented_control(
        "Capacity",
        list(CAPACITIES),
        default="KU",
        key="capacity",
        required=True,
        persist_state="session",
        help="Which capacity stands on the axis. " + " ".join(f"{c.title}: {c.help}" for c in CAPACITIES.values()),
    )
    here = [p | {"capacity": float(p["capacity"][which])} for p in found]
    rho = analysis.spearman([p["capacity"] for p in here], [p["kl"] for p in here])
    figure = capacity.against_divergence(here, which, ui.is_dark())
    ui.chart(figure, key="divergence", alt=capacity.divergence_alt(here, which, rho))
    few = "three or more outputs are needed for" if len(here) < 3 else f"over {len(here)} outputs,"
    value = "" if len(here) < 3 else f" = {style.number(rho)}"
    st.caption(
        f"Every point is one output of this session's runs of this prompt; {few} Spearman's ρ{value}. −1 would mean that "
        "more capacity always comes with less divergence."
    )


experiment = ui.experiment()
ui.header(experiment)
state = ui.prompt_state(experiment, probes=any("probes" in policy.scorer.needs for policy in experiment.policies))
numbers = analysis.of(state)
removed = 1 - min(experiment.budget, state.n_tokens) / state.n_tokens
st.html(style.legend({policy.label: policy.name for policy in experiment.policies} | {"full cache": "full"}))
mean = st.container()
layer, head = ui.head_picker(len(state.layers), state.layers[0].queries.shape[0])
kv_head = head // state.layers[layer].groups
try:
    own = numbers.head_capacity(experiment.policies, SHARES, layer, kv_head)
    if state.layers[layer].sliding:
        st.info(f"Layer {layer} has a sliding window: it is never evicted.")
    else:
        charts(own, "one", (layer, kv_head))
    st.caption(f"Layer {layer}, KV head {kv_head}, which query head {head} reads.")
    with mean:
        charts(all_heads(), "all")
        st.caption(
            "Mean over all layers and KV heads that can be evicted; bands from 10% to 90% of them. The vertical line is the "
            "current budget: drag it by its handle. Keys after RoPE; u is the value vector."
        )
except ValueError as error:  # a method needs what this prompt was not read with
    st.warning(str(error))
    st.stop()
against_kl()
scrub.curves(numbers, ui.experiment(), (layer, kv_head))  # last: it is needed only with the next move
