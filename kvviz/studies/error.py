"""MomentKV's figures 1b, 2 and 3: the directional gap, the error by layer, budget and length, and what the "
"correction recovers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from kvviz.errors import Decomposition
from kvviz.figures.studies import Chart, Panel
from kvviz.figures.style import number
from kvviz.policies.policy import Policy
from kvviz.policies.spec import parse
from kvviz.studies.bench import Bench, Reading, averages, mean
from kvviz.studies.capacity import SAMPLES
from kvviz.studies.study import AGREES, DIFFERS, OPEN, PARTLY, Row, Study
from kvviz.studies.words import listed, percent

FULL_SIZE = "The paper's N = 4,096 on an 8B model: a minute a sample on a GPU, ten on two CPU cores."


def parts_row(parts: Decomposition, head: int | slice = slice(None)) -> Row:
    """Means over the probes, and over all heads or of one."""
    means = {
        name: float(parts[name][head].mean()) for name in ("w_E", "cos", "gamma", "relative_error", "corrected_error")
    }
    means["cos_estimate"] = float(parts.cos_estimate[head].mean())
    means["one_minus_cos"] = 1 - means["cos"]
    means["angle"] = float(parts.cos[head].clamp(-1, 1).arccos().rad2deg().mean())
    return means


def layer_rows(bench: Bench, reading: Reading, policies: Sequence[Policy], budget: int) -> list[Row]:
    """One row a layer and policy, means over heads and probes."""
    rows = []
    for chosen in bench.parts(policies):
        for layer in reading.layers:
            bench.tell(layer / len(reading.state.layers), f"errors of {chosen.title}")
            found = parts_row(reading.errors(chosen, budget, layer))
            found["reduction"] = 100 * (1 - found["corrected_error"] / max(found["relative_error"], 1e-12))
            rows.append(
                {"sample": reading.number, "policy": chosen.name, "label": chosen.label, "layer": layer} | found
            )
    return rows


# Figure 1b


def gap_rows(bench: Bench) -> list[Row]:
    """The values of one head on their PCA plane, and the parts of its error in every row."""
    chosen = parse(bench["policy"])
    for reading in bench.readings(policies=[chosen]):
        layer = min(bench["layer"], len(reading.state.layers) - 1)
        layer = layer if layer in reading.layers else reading.layers[-1]
        head = min(bench["head"], reading.state.layers[layer].queries.shape[0] - 1)
        view = reading.numbers.head(chosen, bench["budget"], layer, head)
        bench.tell(0.3, "all heads")
        everywhere = [reading.errors(chosen, bench["budget"], each).cos for each in reading.layers]
        facts = {
            "policy": chosen.name,
            "layer": layer,
            "head": head,
            "angle": view.angle,
            "cos": view.cos,
            "w_E": view.w_E,
            "relative_error": view.relative_error,
            "mean_cos": float(torch.stack(everywhere).mean()),
        }
        return [
            facts
            | {"label": "kept" if kept else "evicted", "policy": chosen.name if kept else "full", "position": int(at)}
            | {"x": float(x), "y": float(y)}
            for (x, y), kept, at in zip(view.points, view.kept, view.positions, strict=True)
        ]
    return []


def judge_gap(rows: Sequence[Row]) -> str:
    """Nearly at right angles?"""
    if not rows:
        return f"{OPEN}: nothing was measured."
    one = rows[0]
    near = abs(one["cos"]) <= 0.2
    words = (
        f"layer {one['layer']}, head {one['head']}: {one['angle']:.0f}° between f_R and f_E (cos {number(one['cos'])}); the mean "
        f"cosine over all layers and heads is {number(one['mean_cos'])}"
    )
    return f"{AGREES if near and abs(one['mean_cos']) <= 0.2 else PARTLY if near else DIFFERS}: {words}."


GAP = Study(
    name="directional_gap",
    title="One head's values, kept and evicted",
    group="error",
    source="MomentKV fig. 1b",
    paper=(
        "In one head (H2O, N = 4,096, L = 128) the kept and the evicted part of the output are nearly orthogonal: "
        "cos 0.10, 84°."
    ),
    settings=SAMPLES | {"samples": 1, "policy": "h2o", "budget": 128, "layer": 15, "head": 4},
    full=FULL_SIZE,
    measure=gap_rows,
    chart=Chart(
        (Panel("x", "y", "first principal component", "second principal component", kind="points"),), height=460
    ),
    judge=judge_gap,
)


# Figure 2, a to d


def by_layer_rows(bench: Bench) -> list[Row]:
    """The parts of the error by layer."""
    return [
        row
        for reading in bench.readings(policies=bench.policies)
        for row in layer_rows(bench, reading, bench.policies, bench["budget"])
    ]


def judge_by_layer(rows: Sequence[Row]) -> str:
    """H2O: little lost, nearly orthogonal, and yet a large error?"""
    mine = [row for row in rows if row["policy"] == "h2o"] or list(rows)
    if not mine:
        return f"{OPEN}: nothing was measured."
    lost, cos, error = (mean(row[key] for row in mine) for key in ("w_E", "cos", "relative_error"))
    peak = max(mine, key=lambda row: row["relative_error"])
    checks = {
        f"w_E is {number(lost)} (below 0.08 in the paper)": lost < 0.08,
        f"the cosine {number(cos)} (about 0)": abs(cos) <= 0.2,
        f"the error {percent(error)} (above 20%)": error > 0.2,
    }
    verdict = AGREES if all(checks.values()) else PARTLY if any(checks.values()) else DIFFERS
    where = f"the largest error, {percent(peak['relative_error'])}, is in layer {peak['layer']}"
    return f"{verdict}: for {mine[0]['label']}, mean over layers, {listed(checks)}; {where}."


LAYER = "layer"
BY_LAYER = Study(
    name="error_by_layer",
    title="Attention lost, direction and error by layer",
    group="error",
    source="MomentKV fig. 2a, fig. 2b, fig. 2c, fig. 2d",
    paper=(
        "With H2O at L = 128 w_E is small (mean below 0.08), f_E is orthogonal to f_R in all layers, and the error "
        "is above 20%."
    ),
    settings=SAMPLES | {"samples": 1, "budget": 128, "policies": ("h2o", "snapkv", "momentkv")},
    full=FULL_SIZE,
    measure=by_layer_rows,
    chart=Chart(
        tuple(
            Panel(LAYER, y, LAYER, title, title=title, reference=reference)
            for y, title, reference in (
                ("w_E", "w_E", (0.08, "paper's mean, at most")),
                ("cos", "cos(f_E, f_R)", (0.0, "orthogonal")),
                ("one_minus_cos", "1 − cos(f_E, f_R)", (1.0, "orthogonal")),
                ("relative_error", "relative error", (0.2, "paper's mean, at least")),
            )
        ),
        height=320,
    ),
    judge=judge_by_layer,
    doubt=(
        "Means of w_E below 0.08 and of the error above 0.2 ask for γ near 2.5, while section 3 says that γ is of "
        "the order of 1."
    ),
)


# Figure 2, e and f


def by_budget_rows(bench: Bench) -> list[Row]:
    """w_E and error against the budget, for contexts of several lengths."""
    rows: list[Row] = []
    chosen = parse(bench["policy"])
    for length in bench.parts(bench["lengths"]):
        for reading in bench.readings(length, policies=[chosen]):
            n = reading.state.n_tokens
            for budget in bench.parts([b for b in bench["budgets"] if b < n]):
                bench.tell(0.0, f"budget {budget} of {n}")
                found = [parts_row(reading.errors(chosen, budget, layer)) for layer in reading.layers]
                means = {key: mean(row[key] for row in found) for key in found[0]}
                means["worst_layer"] = max(row["relative_error"] for row in found)
                label = f"N = {length:,}"
                rows.append(
                    {
                        "sample": reading.number,
                        "policy": chosen.name,
                        "label": label,
                        "length": length,
                        "budget": budget,
                    }
                    | means
                )
    return rows


def judge_by_budget(rows: Sequence[Row]) -> str:
    """Do both fall with the budget, and rise with the length?"""
    falls, rises = [], []
    for key in ("w_E", "relative_error"):
        found = averages(rows, key, "length", "budget")
        lengths, budgets = sorted({n for n, _ in found}), sorted({b for _, b in found})
        for n in lengths:
            values = [found[n, b] for b in budgets if (n, b) in found]
            falls += [b <= a for a, b in itertools.pairwise(values)]
        for budget in budgets:
            values = [found[n, budget] for n in lengths if (n, budget) in found]
            rises += [b >= a for a, b in itertools.pairwise(values)]
    if not falls or not rises:
        return f"{OPEN}: several budgets and lengths are needed."
    verdict = AGREES if all(falls) and all(rises) else DIFFERS if not any(falls) else PARTLY
    last = max(rows, key=lambda row: (row["length"], row["budget"]))
    return (
        f"{verdict}: w_E and error fall from one budget to the next in {sum(falls)} of {len(falls)} steps, and rise from one "
        f"length to the next in {sum(rises)} of {len(rises)}; with {last['budget']:,} of {last['length']:,} entries the worst "
        f"layer's error is still {percent(last['worst_layer'])}."
    )


BY_BUDGET = Study(
    name="error_by_budget",
    title="Attention lost and error against budget and context length",
    group="error",
    source="MomentKV fig. 2e, fig. 2f",
    paper=(
        "w_E falls with the budget and with a shorter context, and the error stays above 10% in shallow layers even "
        "at L = 1,024."
    ),
    settings=SAMPLES
    | {"samples": 1, "lengths": (512, 1024, 1536), "budgets": (64, 128, 256, 512, 1024), "policy": "h2o"},
    full=FULL_SIZE,
    measure=by_budget_rows,
    chart=Chart(
        (
            Panel("budget", "w_E", "budget (entries a head)", "w_E", title="attention lost", log_x=True),
            Panel(
                "budget",
                "relative_error",
                "budget (entries a head)",
                "relative error",
                title="relative error",
                log_x=True,
            ),
        )
    ),
    judge=judge_by_budget,
)


STUDIES = (GAP, BY_LAYER, BY_BUDGET)
