"""MomentKV's figure 3: what the correction recovers, by sample and by layer, and where its estimate points."""

from __future__ import annotations

from collections.abc import Sequence

from kvviz.figures.studies import Chart, Panel
from kvviz.figures.style import number
from kvviz.studies.bench import Bench, averages, by, evicted, mean, pairs
from kvviz.studies.capacity import SAMPLES
from kvviz.studies.error import FULL_SIZE, LAYER, by_layer_rows
from kvviz.studies.study import AGREES, DIFFERS, OPEN, PARTLY, Row, Study
from kvviz.studies.words import listed, percent, signed


def loss_rows(bench: Bench) -> list[Row]:
    """Loss of every sample under H2O and MomentKV, each with and without the correction, beyond the full cache's."""
    rows: list[Row] = []
    for reading in bench.readings(policies=bench.policies):
        found = bench.follow(reading, pairs(bench.policies, [bench["budget"]]))
        base = found[0]["loss"]
        for row in evicted(found):
            extra = None if base is None else row["loss"] - base
            rows.append(row | {"sample": reading.number + 1, "full_loss": base, "extra_loss": extra})
    return rows


def judge_loss(rows: Sequence[Row]) -> str:
    """In how many samples does MomentKV lose less than H2O, and the correction help each?"""
    value = "extra_loss" if all(row["extra_loss"] is not None for row in rows) else "kl"
    found = averages(rows, value, "sample", "label")
    samples = sorted({sample for sample, _ in found})
    labels = list(dict.fromkeys(label for _, label in found))
    if not {"H2O", "MomentKV"} <= set(labels):
        return f"{OPEN}: H2O and MomentKV are needed."
    wins = sum(found[s, "MomentKV"] < found[s, "H2O"] for s in samples)
    means = listed(f"{signed(mean(found[s, label] for s in samples), 3)} {label}" for label in labels)
    verdict = AGREES if wins == len(samples) else PARTLY if wins > len(samples) / 2 else DIFFERS
    what = "loss beyond the full cache's" if value == "extra_loss" else "KL"
    return f"{verdict}: MomentKV loses less than H2O in {wins} of {len(samples)} samples; mean {what}, nats a token: {means}."


LOSS = Study(
    name="loss_by_sample",
    title="Loss with and without the correction, sample by sample",
    group="error",
    source="MomentKV fig. 3a",
    paper="On every Qasper sample (L = 128) MomentKV's eviction loss is clearly below H2O's.",
    settings=SAMPLES
    | {
        "samples": 6,
        "tokens": 640,
        "budget": 128,
        "policies": ("h2o", "h2o:correction=1", "momentkv:correction=none", "momentkv"),
    },
    full="200 samples of Qasper on an 8B model: an hour on a GPU.",
    measure=loss_rows,
    chart=Chart(
        (
            Panel(
                "sample",
                "extra_loss",
                "sample",
                "loss beyond the full cache's (nats a token)",
                "bars",
                "loss on the text",
            ),
            Panel("sample", "kl", "sample", "mean KL (nats a token)", "bars", "divergence"),
        )
    ),
    judge=judge_loss,
)


def judge_correction(rows: Sequence[Row]) -> str:
    """Does MomentKV reduce the error in every layer, and does its estimate point where f_E points?"""
    mine = [row for row in rows if row["policy"] == "momentkv"] or list(rows)
    if not mine:
        return f"{OPEN}: nothing was measured."
    layers = by(mine, "layer")
    less = sum(
        mean(r["corrected_error"] for r in group) < mean(r["relative_error"] for r in group)
        for group in layers.values()
    )
    before, after, cos = (
        mean(row[key] for row in mine) for key in ("relative_error", "corrected_error", "cos_estimate")
    )
    lowest = min(mean(row["cos_estimate"] for row in group) for group in layers.values())
    others = [row for row in rows if row["policy"] == "h2o"]
    beside = f"; H2O's error is {percent(mean(r['relative_error'] for r in others))}" if others else ""
    verdict = AGREES if less == len(layers) and lowest > 0.5 else PARTLY if less > len(layers) / 2 else DIFFERS
    return (
        f"{verdict}: the correction lowers the error in {less} of {len(layers)} layers, from {percent(before)} to "
        f"{percent(after)} on "
        f"average{beside}; cos(f_E, estimate) is {number(cos)} on average and {number(lowest)} in the worst layer."
    )


CORRECTION = Study(
    name="correction_by_layer",
    title="Error before and after the correction by layer, and where the estimate points",
    group="error",
    source="MomentKV fig. 3b, fig. 3c",
    paper="MomentKV reduces the error in every layer, and its estimate of f_E has a high cosine with f_E in all of them.",
    settings=SAMPLES | {"budget": 128, "policies": ("h2o", "momentkv")},
    full=FULL_SIZE,
    measure=by_layer_rows,
    chart=Chart(
        (
            Panel(LAYER, "relative_error", LAYER, "relative error", title="before"),
            Panel(LAYER, "corrected_error", LAYER, "relative error after correction", title="after"),
            Panel(LAYER, "reduction", LAYER, "reduction (%)", title="reduction"),
            Panel(LAYER, "cos_estimate", LAYER, "cos(f_E, estimate)", title="where the estimate points"),
        ),
        height=320,
    ),
    judge=judge_correction,
)

STUDIES = (LOSS, CORRECTION)
