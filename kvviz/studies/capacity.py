"""CapKV's figures 3 and 6: the capacity that every method keeps, and whether it tells quality."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import isfinite

from scipy import stats

from kvviz.analysis import CAPACITIES
from kvviz.figures.studies import Chart, Panel
from kvviz.figures.style import number
from kvviz.policies.policy import Policy
from kvviz.policies.spec import parse
from kvviz.studies.bench import Bench, Reading, averages, by, evicted, mean, shares_of
from kvviz.studies.study import AGREES, DIFFERS, OPEN, PARTLY, Row, Study
from kvviz.studies.words import listed

CAPKV_METHODS = ("capkv", "expected_attention", "keydiff", "knorm", "snapkv", "sink")
"""What CapKV is compared with, and it."""

SAMPLES = {"task": "text", "tokens": 1024, "new_tokens": 64, "samples": 2, "seed": 0}
"""What is read: samples of a task from consecutive seeds."""


def capacities(reading: Reading, chosen: Policy, entries: int) -> dict[str, float]:
    """K, U and KU of what is kept, in percent of the full cache's, mean over layers and KV heads."""
    kept = reading.numbers.capacity_at(chosen, entries)
    return {name: 100 * float(value) for name, value in zip(CAPACITIES, kept, strict=True)}


# Figures 3 and 6, upper rows


def kept_rows(bench: Bench) -> list[Row]:
    """Capacities by method and share removed."""
    rows: list[Row] = []
    for reading in bench.readings(policies=bench.policies):
        for chosen in bench.parts(bench.policies):
            curves = reading.numbers.capacity([chosen], bench["shares"], progress=bench.tell)
            means, about = 100 * curves.mean(chosen.label), {"policy": chosen.name, "label": chosen.label}
            rows += [
                {"sample": reading.number, **about, "removed": 100 * float(curves.removed[i])}
                | {c: float(means[k, i]) if isfinite(means[k, i]) else None for k, c in enumerate(CAPACITIES)}
                for i in range(len(curves.removed))
            ]
    return rows


def judge_kept(rows: Sequence[Row]) -> str:
    """Do all curves fall, and is CapKV's the highest?"""
    falls = first = cells = 0
    rising, winners = 0, []
    for which in CAPACITIES:
        curves = averages(rows, which, "label", "removed")
        labels = list(dict.fromkeys(label for label, _ in curves))
        for label in labels:
            values = [curves[label, x] for x in sorted(x for one, x in curves if one == label)]
            fine = all(b <= a + 1e-9 for a, b in itertools.pairwise(values))
            falls, rising = falls + fine, rising + (not fine)
        for x in {x for _, x in curves if x > 0}:
            best = max((label for label in labels if (label, x) in curves), key=lambda label, x=x: curves[label, x])
            cells, first = cells + 1, first + best.startswith("CapKV")
            winners.append(best)
    if not cells:
        return f"{OPEN}: nothing was removed."
    usual = max(set(winners), key=winners.count)
    words = (
        f"{falls} of {falls + rising} curves fall monotonically, and CapKV keeps the most capacity at {first} of "
        f"{cells} points"
    )
    words += "" if usual.startswith("CapKV") else f" ({usual} most often)"
    return f"{AGREES if not rising and first > cells / 2 else PARTLY if not rising else DIFFERS}: {words}."


CAPACITY_KEPT = Study(
    name="capacity_kept",
    title="Capacity that is kept against the share removed",
    group="capacity",
    source="CapKV fig. 3, fig. 6",
    paper=(
        "All methods lose capacity monotonically; CapKV keeps clearly more than the others under high compression, "
        "by all three."
    ),
    settings=SAMPLES | {"samples": 1, "shares": (0.0, 0.25, 0.5, 0.75, 0.9), "policies": CAPKV_METHODS},
    full="Four data sets of 200 prompts each on Qwen3-8B: some hours on a GPU.",
    measure=kept_rows,
    chart=Chart(
        tuple(
            Panel("removed", which, "share removed (%)", "of the full cache's capacity (%)", title=f"{which} capacity")
            for which in CAPACITIES
        )
    ),
    judge=judge_kept,
)


# Figures 3 and 6, lower rows


def quality_rows(bench: Bench) -> list[Row]:
    """Capacity and fidelity of every method and share on every sample."""
    rows: list[Row] = []
    for reading in bench.readings(policies=bench.policies):
        budgets = shares_of(reading.state, bench["shares"])
        chosen = [(each, entries) for each in bench.policies for entries in budgets.values()]
        for _ in bench.parts([0], high=0.6):
            found = evicted(bench.follow(reading, chosen))
        back = {entries: 100 * share for share, entries in budgets.items()}
        for row, (each, entries) in bench.parts(list(zip(found, chosen, strict=True)), low=0.6):
            bench.tell(0.0, f"capacity, {each.title}")
            rows.append(row | {"removed": back[entries]} | capacities(reading, each, entries))
    return rows


def correlations(rows: Sequence[Row], quality: str = "kl", sign: int = -1) -> dict[str, dict[str, float]]:
    """Capacity -> Spearman's rho with the quality (sign -1: less is better), its p, and the mean rho within one share removed."""
    found = {}
    for which in CAPACITIES:
        mine = [row for row in rows if row.get(quality) is not None and row.get(which) is not None]
        rho, p = _spearman(mine, which, quality, sign)
        inside = [_spearman(group, which, quality, sign)[0] for group in by(mine, "removed").values()]
        found[which] = {"rho": rho, "p": p, "within": mean(r for r in inside if isfinite(r)), "n": len(mine)}
    return found


def _spearman(rows: Sequence[Row], which: str, quality: str, sign: int) -> tuple[float, float]:
    x, y = [row[which] for row in rows], [sign * row[quality] for row in rows]
    if len(rows) < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        return float("nan"), float("nan")
    made = stats.spearmanr(x, y)
    return float(made.statistic), float(made.pvalue)


def judge_quality(rows: Sequence[Row]) -> str:
    """Spearman's rho as in the paper, and whether it holds within one share removed, where the budget is the same for all."""
    return _judge(correlations(rows), "low KL")


def judge_score(rows: Sequence[Row]) -> str:
    """The same with task scores."""
    return _judge(correlations(rows, "score", 1), "task scores")


def _judge(found: dict[str, dict[str, float]], what: str) -> str:
    known = {which: each for which, each in found.items() if isfinite(each["rho"])}
    if not known:
        return f"{OPEN}: all values are equal, or there are too few."
    n = next(iter(known.values()))["n"]
    words = listed(
        f"ρ = {number(each['rho'])} (p = {number(each['p'], 1)}) for {which}" for which, each in known.items()
    )
    for each in known.values():
        each["within"] = float("nan") if each["within"] is None else each["within"]
    inside = listed(number(each["within"]) for each in known.values())
    strong = all(each["rho"] >= 0.7 and each["p"] < 0.05 and each["within"] >= 0.3 for each in known.values())
    some = any(each["rho"] > 0 and each["p"] < 0.05 for each in known.values())
    return (
        f"{AGREES if strong else PARTLY if some else DIFFERS}: capacity goes with {what}, {words} over {n} "
        "points; with the share "
        f"removed held fixed, where it cannot come from the budget alone, ρ is {inside}."
    )


QUALITY_PANELS = tuple(
    Panel(
        which,
        "kl",
        f"{which} capacity (% of the full cache)",
        "mean KL (nats a token)",
        "points",
        f"{which} capacity",
        log_y=True,
    )
    for which in CAPACITIES
)

CAPACITY_QUALITY = Study(
    name="capacity_quality",
    title="Does capacity tell quality? Against the divergence",
    group="capacity",
    source="CapKV fig. 3, fig. 6",
    paper="Capacity and task score go together: Spearman's ρ from 0.73 to 0.87, significant, for K, U and KU.",
    settings=SAMPLES | {"shares": (0.25, 0.5, 0.75, 0.9), "policies": CAPKV_METHODS},
    full="Four data sets of 200 prompts each on Qwen3-8B: some hours on a GPU.",
    measure=quality_rows,
    chart=Chart(QUALITY_PANELS),
    judge=judge_quality,
    doubt="The paper's ρ pools four shares removed: a smaller budget lowers capacity and score alike, whatever the method.",
)


def score_rows(bench: Bench) -> list[Row]:
    """Capacity and task score of every method and share."""
    rows: list[Row] = []
    length, seeds = bench["tokens"], tuple(range(bench["seed"], bench["seed"] + bench["samples"]))
    for name in bench.parts(bench["tasks"]):
        for _ in bench.parts([0], high=0.7):
            found = bench.sweep([name], length, bench.policies, shares_removed=bench["shares"], seeds=seeds)
        for row in bench.parts(evicted(found), low=0.7):
            chosen = parse(row["spec"])
            state = bench.task_state(name, length, row["seed"], "attention_mass" in chosen.scorer.needs)
            bench.tell(0.0, f"capacity, {chosen.title}")
            rows.append(row | capacities(Reading(row["seed"], state, [], 0, False), chosen, row["budget"]))
    return rows


CAPACITY_SCORE = Study(
    name="capacity_score",
    title="Does capacity tell quality? Against task scores",
    group="capacity",
    source="CapKV fig. 3, fig. 6",
    paper="Capacity and task score go together: Spearman's ρ from 0.73 to 0.87, significant, for K, U and KU.",
    settings={
        "tasks": ("single_doc_qa", "multi_doc_qa", "passage_retrieval"),
        "tokens": 640,
        "samples": 1,
        "seed": 0,
        "shares": (0.25, 0.5, 0.75, 0.9),
        "policies": CAPKV_METHODS,
    },
    full="Four data sets of 200 prompts each on Qwen3-8B: some hours on a GPU.",
    measure=score_rows,
    chart=Chart(
        tuple(
            Panel(
                which,
                "score",
                f"{which} capacity (% of the full cache)",
                "score (0 to 100)",
                "points",
                f"{which} capacity",
            )
            for which in CAPACITIES
        )
    ),
    judge=judge_score,
    doubt="Scores average over inputs in the paper; here every point is one answer, so that its score is mostly 0 or 100.",
    on_prompt=False,
)

STUDIES = (CAPACITY_KEPT, CAPACITY_QUALITY, CAPACITY_SCORE)
