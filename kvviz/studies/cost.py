"""CapKV's figure 5 and MomentKV's tables 4, 5 and 6: what eviction and correction cost, in seconds and bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from kvviz.cache import RowCache
from kvviz.decode import decode
from kvviz.evict import evict
from kvviz.figures.studies import Chart, Panel
from kvviz.figures.style import number
from kvviz.memory import words as size_words
from kvviz.policies.policy import Policy
from kvviz.policies.spec import parse
from kvviz.prefill import prefill
from kvviz.state import PromptState
from kvviz.studies.bench import Bench, averages, by, evicted, mean, pairs
from kvviz.studies.capacity import SAMPLES
from kvviz.studies.study import AGREES, DIFFERS, OPEN, PARTLY, Row, Study
from kvviz.studies.words import listed, signed


def timed(bench: Bench, state: PromptState, chosen: Policy, entries: int, new: int) -> dict[str, float]:
    """Seconds to evict and to write `new` tokens alone, greedily."""
    began = time.perf_counter()
    kept = evict(state, chosen, entries)
    between = time.perf_counter()
    steps = decode(bench.engine.model, RowCache([kept], new), [], state.logits, max_new_tokens=new, eos=frozenset())
    for step, _ in enumerate(steps):
        bench.tell(step / new, chosen.title)
    return {"evict": between - began, "decode": time.perf_counter() - between}


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median, and the first and third quartile."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return {"median": float(middle), "low": float(low), "high": float(high)}


# CapKV figure 5


def time_rows(bench: Bench) -> list[Row]:
    """Total time by method, context length and share removed: medians over the repeats, after one that is thrown away."""
    rows: list[Row] = []
    repeats, new = bench["repeats"], bench["new_tokens"]
    for length in bench.parts(bench["lengths"]):
        (example,) = bench.examples(length)[:1]
        state = example.prompt().prefill(bench.engine, progress=lambda share, text: bench.tell(0.0, f"reading {text}"))
        reading = []
        for _ in bench.parts(range(repeats), high=0.3):
            began = time.perf_counter()
            prefill(
                bench.engine.model, list(state.ids), progress=lambda share, text: bench.tell(share, f"reading {text}")
            )
            reading.append(time.perf_counter() - began)
        shares = bench["shares"] if length == max(bench["lengths"]) else bench["shares"][:1]
        cells = [(parse("full"), 0.0)] + [(p, share) for p in bench.policies for share in shares]
        for chosen, share in bench.parts(cells, low=0.3):
            entries = max(1, round(state.n_tokens * (1 - share)))
            runs = [timed(bench, state, chosen, entries, new) for _ in bench.parts(range(repeats + 1))][1:]
            total = [a + run["evict"] + run["decode"] for a, run in zip(reading, runs, strict=True)]
            rows.append(
                {
                    "policy": chosen.name,
                    "label": chosen.label,
                    "length": state.n_tokens,
                    "removed": 100 * share,
                    "seconds": quartiles(total)["median"],
                    "seconds_low": quartiles(total)["low"],
                    "seconds_high": quartiles(total)["high"],
                    "prefill": quartiles(reading)["median"],
                    "evict": quartiles([run["evict"] for run in runs])["median"],
                    "decode": quartiles([run["decode"] for run in runs])["median"],
                    "at": "lengths" if share in (0.0, shares[0]) else "shares",
                    "repeats": repeats,
                    "new_tokens": new,
                }
            )
    return rows


def judge_time(rows: Sequence[Row]) -> str:
    """Linear in the length, and CapKV no slower than the others?"""
    others = [row for row in rows if row["policy"] not in ("full", "capkv")]
    mine = [row for row in rows if row["policy"] == "capkv"]
    lengths = sorted({row["length"] for row in rows})
    if not mine or not others or len(lengths) < 2:
        return f"{OPEN}: CapKV, another method and two lengths are needed."
    theirs = by(others, "length", "removed")
    ratio = mean(row["seconds"] / mean(r["seconds"] for r in theirs[row["length"], row["removed"]]) for row in mine)
    ends = averages([row for row in mine if row["at"] == "lengths"], "seconds", "length")
    growth = np.log(ends[lengths[-1]] / ends[lengths[0]]) / np.log(lengths[-1] / lengths[0])
    share = mean(row["evict"] / row["seconds"] for row in mine)
    near, linear = ratio <= 1.1, growth <= 1.2
    verdict = AGREES if near and linear else PARTLY if near or linear else DIFFERS
    return (
        f"{verdict}: CapKV takes {number(ratio, 3)} times as long in total as the mean of the other methods, "
        f"{number(100 * share)}% of it "
        f"to evict; from {lengths[0]:,} to {lengths[-1]:,} tokens its total grows with the power {number(growth)} of the length."
    )


TIME = Study(
    name="total_time",
    title="Total time against context length and share removed",
    group="cost",
    source="CapKV fig. 5",
    paper=(
        "Total time (8k to 64k tokens, 100 new ones) grows about linearly with the length, and CapKV's is in the "
        "others' range."
    ),
    settings={
        "task": "text",
        "lengths": (512, 1024, 2048),
        "shares": (0.5, 0.25, 0.75, 0.9),
        "repeats": 3,
        "new_tokens": 8,
        "samples": 1,
        "seed": 0,
        "policies": ("capkv", "expected_attention", "keydiff", "knorm", "snapkv", "sink"),
    },
    full="8k to 64k tokens, 100 new ones, five repeats, on an 8B model: an hour on a GPU.",
    measure=time_rows,
    chart=Chart(
        (
            Panel(
                "length",
                "seconds",
                "context (tokens)",
                "total (s), median",
                title="against length",
                where=("at", "lengths"),
            ),
            Panel(
                "length",
                "evict",
                "context (tokens)",
                "eviction alone (s), median",
                title="eviction alone",
                where=("at", "lengths"),
            ),
            Panel("removed", "seconds", "share removed (%)", "total (s), median", title="against share removed"),
        )
    ),
    judge=judge_time,
    doubt="The paper's axis starts at 8k tokens; a prefill's attention is quadratic in the length, whatever is evicted after it.",
    timings=True,
)


# MomentKV tables 4, 5 and 6

ORDERS = {"no correction": "none", "order 0": "0", "order 1": "1"}


def order_rows(bench: Bench) -> list[Row]:
    """Quality, bytes and milliseconds a token of no correction, order 0 and order 1, under SnapKV's rule and MomentKV's."""
    rows: list[Row] = []
    policies = {
        parse(f"{rule}:correction={order}"): (rule, words) for rule in bench["rules"] for words, order in ORDERS.items()
    }
    for reading in bench.readings():
        chosen = pairs(policies, bench["budgets"])
        for _ in bench.parts([0], high=0.5):
            found = evicted(bench.follow(reading, chosen))
        measured = reading.number == 0
        for row, (each, entries) in bench.parts(list(zip(found, chosen, strict=True)), low=0.5):
            rule, words = policies[each]
            ms = _milliseconds(bench, reading.state, each, entries) if measured else {}
            kv = row["bytes"] - row["moments_bytes"]
            rows.append(
                row
                | {"order": words, "rule": parse(rule).title, "label": f"{parse(rule).title}, {entries} entries"}
                | {"kv_bytes": kv, "added_percent": 100 * row["moments_bytes"] / kv}
                | ms
            )
    return rows


def _milliseconds(bench: Bench, state: PromptState, chosen: Policy, entries: int) -> dict[str, float]:
    """Milliseconds a token, after one run that is thrown away."""
    new = bench["timed_tokens"]
    runs = [timed(bench, state, chosen, entries, new)["decode"] for _ in range(bench["repeats"] + 1)][1:]
    made = quartiles([1000 * each / new for each in runs])
    return {"ms": made["median"], "ms_low": made["low"], "ms_high": made["high"]}


def judge_orders(rows: Sequence[Row]) -> str:
    """Does each order gain, and what does it cost?"""
    kl = averages(rows, "kl", "order")
    if not set(ORDERS) <= set(kl):
        return f"{OPEN}: no correction, order 0 and order 1 are needed."
    zero, one = (kl["no correction"] - kl[order] for order in ("order 0", "order 1"))
    ms = averages(rows, "ms", "order")
    corrected = [row for row in rows if row["order"] == "order 1"]
    share = {budget: mean(r["added_percent"] for r in group) for budget, group in by(corrected, "budget").items()}
    verdict = AGREES if one > zero > 0 else PARTLY if max(one, zero) > 0 else DIFFERS
    spread = mean(row["ms_high"] - row["ms_low"] for row in rows if "ms_low" in row)
    noise = ", less than the spread of the repeats" if abs(ms["order 1"] - ms["no correction"]) < spread else ""
    noise = ", which is noise" if ms["order 1"] < ms["no correction"] else noise
    shares = listed(f"{number(value)}% of what is kept at {budget}" for budget, value in share.items())
    added = f"{signed(ms['order 1'] - ms['no correction'])} ms a token (order 0: {signed(ms['order 0'] - ms['no correction'])})"
    return (
        f"{verdict}: the mean KL of {number(kl['no correction'])} falls by {signed(zero, 3)} with order 0 and "
        f"{signed(one, 3)} with order 1; "
        f"order 1 adds {size_words(corrected[0]['moments_bytes'])}, {shares}, and {added}{noise}."
    )


COST = Study(
    name="order_and_cost",
    title="Orders 0 and 1 of the correction: quality, bytes, milliseconds",
    group="cost",
    source="MomentKV table 4, table 5, table 6",
    paper=(
        "Order 0 gains 0.94 over SnapKV, order 1 more than three times as much, for 4.1 MB (6.4% of the cache) and "
        "1.6 ms a token."
    ),
    settings=SAMPLES | {"budgets": (128, 512), "rules": ("snapkv", "momentkv"), "repeats": 3, "timed_tokens": 16},
    full="LongBench on Llama-3.1-8B: some hours on a GPU; bytes and milliseconds alone take a minute.",
    measure=order_rows,
    chart=Chart(
        (
            Panel("order", "kl", "correction", "mean KL (nats a token)", "bars", "quality"),
            Panel("order", "moments_bytes", "correction", "added bytes, measured", "bars", "added bytes"),
            Panel("order", "ms", "correction", "milliseconds a token, median", "bars", "time"),
        )
    ),
    judge=judge_orders,
    doubt=(
        "d² + 2d + 1 numbers a head are 16,641 at d = 128: 65 KV pairs in 16 bits, not the 128 of table 5 (130 "
        "would be fp32). On "
        "Llama-3.1-8B that is 8.1 MiB, 51% of the 16 MiB kept at L = 128. The 4.1 MB of table 4 are half of it, "
        "and its 6.4% are 4.1 "
        "of 64 MiB, which is the cache at L = 512. kvviz keeps all four sums in fp32 whatever the order, so "
        "order 0 costs as many "
        "bytes here as order 1."
    ),
    timings=True,
)

STUDIES = (TIME, COST)
