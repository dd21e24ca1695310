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
    """Is CapKV among the first half of the methods in diversity, and in relevance, at every share removed?"""
    methods = [row for row in rows if row["policy"] not in ("oracle", "random")]
    shares = by(methods, "removed")
    found = [(averages(group, "KU", "policy"), averages(group, "relevance", "policy")) for group in shares.values()]
    if not found or "capkv" not in found[0][0] or len(found[0][0]) < 2:
        return f"{OPEN}: CapKV and another method are needed."
    places = [[sorted(values, key=values.get, reverse=True).index("capkv") + 1 for values in pair] for pair in found]
    count = len(found[0][0])
    half = [all(place[axis] <= (count + 1) // 2 for place in places) for axis in (0, 1)]
    free = sum(
        not any(diverse[p] > diverse["capkv"] and relevant[p] > relevant["capkv"] for p in diverse)
        for diverse, relevant in found
    )
    ranks = [listed(str(place[axis]) for place in places) for axis in (0, 1)]
    ends = [METHODS[max(values, key=values.get)].title for values in found[-1]]
    return (
        f"{AGREES if all(half) else PARTLY if any(half) else DIFFERS}: of {count} methods CapKV is number "
        f"{ranks[0]} in KU capacity and "
        f"number {ranks[1]} in the future attention that it keeps, at {listed(f'{share:g}%' for share in shares)} "
        "removed; no other is "
        f"ahead in both at {free} of {len(found)}. With most removed {ends[0]} is the most diverse and {ends[1]} "
        "the most relevant."
    )


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
