"""CapKV's figure 1 with measured axes: structural diversity against query relevance of what every method keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvviz.capacity import effective_rank
from kvviz.figures.studies import Chart, Panel
from kvviz.policies import METHODS
from kvviz.policies.policy import Policy
from kvviz.studies.bench import Bench, Reading, averages, by, mean, shares_of
from kvviz.studies.capacity import CAPKV_METHODS, SAMPLES, capacities
from kvviz.studies.study import AGREES, DIFFERS, OPEN, PARTLY, Row, Study
from kvviz.studies.words import listed


def map_rows(bench: Bench) -> list[Row]:
    """One row a method and share removed."""
    rows: list[Row] = []
    for reading in bench.readings(policies=bench.policies):
        budgets = shares_of(reading.state, bench["shares"])
        for chosen in bench.parts(bench.policies):
            bench.tell(0.0, chosen.title)
            for share, entries in budgets.items():
                rows.append(_place(reading, chosen, share, entries))
    return rows


def _place(reading: Reading, chosen: Policy, share: float, entries: int) -> Row:
    ranks, relevance = {"keys": [], "values": []}, []
    for layer in reading.layers:
        own, mask = reading.state.layers[layer], reading.numbers.mask(chosen, entries, layer)
        for name, entry in (("keys", own.keys), ("values", own.values)):
            ratio = effective_rank(entry * mask[..., None]) / effective_rank(entry)
            ranks[name].append(100 * float(ratio.mean()))
    relevance = 100 * (1 - np.nanmean(reading.numbers.error_map(chosen, entries)["w_E"]))
    return {
        "sample": reading.number,
        "policy": chosen.name,
        "label": chosen.label,
        "removed": 100 * share,
        "rank_keys": mean(ranks["keys"]),
        "rank_values": mean(ranks["values"]),
        "relevance": float(relevance),
        **capacities(reading, chosen, entries),
    }


def judge_map(rows: Sequence[Row]) -> str:
    """Is CapKV the method that no other surpasses in both, and are KeyDiff and SnapKV at the two ends?"""
    found = [
        (averages(group, "KU", "policy"), averages(group, "relevance", "policy"))
        for group in by([r for r in rows if r["policy"] not in ("oracle", "random")], "removed").values()
    ]
    better = [
        [p for p in diverse if p != "capkv" and diverse[p] > diverse["capkv"] and relevant[p] > relevant["capkv"]]
        for diverse, relevant in found
        if "capkv" in diverse
    ]
    if not better:
        return f"{OPEN}: CapKV is not among the methods."
    free = sum(not names for names in better)
    surpassed = sorted({name for names in better for name in names})
    words = (
        f"at {free} of {len(better)} shares removed no method keeps both more KU capacity and more future attention "
        "than CapKV"
    )
    if surpassed:
        words += f" ({listed(surpassed)} did)"
    ends = [METHODS[max(values, key=values.get)].title for values in found[-1]]
    words += f"; with most removed {ends[0]} is the most diverse and {ends[1]} the most relevant"
    return f"{AGREES if free == len(better) else PARTLY if free else DIFFERS}: {words}."


METHOD_MAP = Study(
    name="method_map",
    title="A map of the methods: diversity against relevance",
    group="capacity",
    source="CapKV fig. 1",
    paper="Methods are either diverse (KeyDiff, Knorm) or relevant to future queries (SnapKV, EA); CapKV is meant to be both.",
    settings=SAMPLES
    | {
        "samples": 1,
        "shares": (0.5, 0.75, 0.9),
        "policies": (
            *CAPKV_METHODS,
            "h2o",
            "tova",
            "adakv",
            "momentkv",
            "random",
            "oracle",
        ),
    },
    full="The paper's figure is a sketch without numbers; on an 8B model at 8k tokens this takes a few minutes on a GPU.",
    measure=map_rows,
    chart=Chart(
        tuple(
            Panel(
                x,
                "relevance",
                f"{title} (% of the full cache)",
                "future attention that is kept (%)",
                kind="points",
                title=title,
            )
            for x, title in (
                ("KU", "KU capacity"),
                ("rank_keys", "effective rank, keys"),
                ("rank_values", "effective rank, values"),
            )
        )
    ),
    judge=judge_map,
    doubt="Figure 1 is drawn, not measured: the paper gives no numbers for either axis.",
)

STUDIES = (METHOD_MAP,)
