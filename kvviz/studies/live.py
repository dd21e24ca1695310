"""CapKV's figure 4: eviction every n decoding steps, back to a reserved size, where errors cannot be taken back."""

from __future__ import annotations

from collections.abc import Sequence

from kvviz.figures.studies import Chart, Panel
from kvviz.figures.style import number
from kvviz.studies.bench import Bench, averages, mean
from kvviz.studies.study import AGREES, DIFFERS, OPEN, PARTLY, Row, Study

RESERVED = "reserved size (entries a head)"


def live_rows(bench: Bench) -> list[Row]:
    """Fidelity of every method at every reserved size, measured while writing."""
    rows: list[Row] = []
    for sample, example in enumerate(bench.parts(bench.examples())):
        state, question, answer = bench.read(example, bench.policies, share=0.1)
        for budget in bench.parts(bench["budgets"], low=0.1):
            run = bench.finish(
                bench.engine.generate(
                    state,
                    question,
                    bench.policies,
                    budget,
                    bench["new_tokens"],
                    answer=answer,
                    stop=False,
                    evict_every=bench["every"],
                )
            )
            full = run.reference
            for row in run.rows[1:]:
                same = [a == b for a, b in zip(row.token_ids, full.token_ids, strict=False)]
                rows.append(
                    {
                        "sample": sample,
                        "policy": row.policy,
                        "label": row.label,
                        "budget": budget,
                        "every": bench["every"],
                        "kl": row.mean_kl,
                        "same_tokens": 100 * mean(float(each) for each in same),
                        "first_difference": row.first_difference,
                        "largest_entries": max(row.entries_by_step),
                        "largest_bytes": max(row.bytes_by_step),
                        "full_bytes": max(full.bytes_by_step),
                    }
                )
    return rows


def judge_live(rows: Sequence[Row]) -> str:
    """Is CapKV best at the small sizes, and does it lose least from the largest to the smallest?"""
    found = averages(rows, "kl", "label", "budget")
    labels, budgets = list(dict.fromkeys(row["label"] for row in rows)), sorted({row["budget"] for row in rows})
    if "CapKV" not in labels or len(labels) < 2 or len(budgets) < 2:
        return f"{OPEN}: CapKV, another method and two sizes are needed."
    best = {budget: min(labels, key=lambda label, b=budget: found[label, b]) for budget in budgets}
    won = sum(label == "CapKV" for label in best.values())
    loss = {label: found[label, budgets[0]] - found[label, budgets[-1]] for label in labels}
    calmest = min(loss, key=loss.get)
    verdict = AGREES if won == len(budgets) and calmest == "CapKV" else PARTLY if won or calmest == "CapKV" else DIFFERS
    return (
        f"{verdict}: CapKV has the lowest KL at {won} of {len(budgets)} sizes (at {budgets[0]} entries {best[budgets[0]]} with "
        f"{number(found[best[budgets[0]], budgets[0]])}, CapKV {number(found['CapKV', budgets[0]])}); from "
        f"{budgets[-1]} to {budgets[0]} "
        f"entries {calmest} loses least ({number(loss[calmest])} nats; CapKV {number(loss['CapKV'])})."
    )


LIVE = Study(
    name="while_decoding",
    title="Eviction while decoding against the reserved size",
    group="budget",
    source="CapKV fig. 4",
    paper=(
        "Evicting every 512 steps on AIME25, CapKV degrades most gracefully as the reserved size shrinks; SnapKV "
        "cannot take part."
    ),
    settings={
        "task": "text",
        "tokens": 192,
        "new_tokens": 160,
        "samples": 1,
        "seed": 0,
        "every": 32,
        "budgets": (48, 96, 160),
        "policies": ("capkv", "expected_attention", "keydiff", "knorm", "sink", "momentkv"),
    },
    full="AIME25 with a 7B reasoning model, up to 32k tokens an answer, every 512 steps: many hours on a GPU.",
    measure=live_rows,
    chart=Chart(
        (
            Panel("budget", "kl", RESERVED, "mean KL (nats a token)", title="divergence", log_x=True, log_y=True),
            Panel(
                "budget", "same_tokens", RESERVED, "same token as the full cache (%)", title="same tokens", log_x=True
            ),
        )
    ),
    judge=judge_live,
    doubt=(
        "As published CapKV, EA, KeyDiff and Knorm protect no recent entries, so that they can drop the words that were just "
        "written, while Sink and MomentKV cannot: give all the same, such as capkv:recent=32, to compare the scores alone."
    ),
)


STUDIES = (LIVE,)
