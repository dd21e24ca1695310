"""Studies: every one on a tiny model, its numbers against the library's, its findings on made-up rows, its files and its job."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

import kvviz
from kvviz import analysis, capacity, tasks
from kvviz.__main__ import main
from kvviz.evict import evict
from kvviz.exceptions import Cancelled
from kvviz.figures.studies import means
from kvviz.host import DONE, Host, ModelSpec
from kvviz.jobs import Prompt
from kvviz.policies.spec import parse
from kvviz.studies import (
    GROUPS,
    STUDIES,
    StudyError,
    StudyRequest,
    StudyResult,
    ablations,
    bench,
    correction,
    cost,
    error,
    live,
    method_map,
    report,
    scores,
    study,
)
from kvviz.studies import capacity as capacity_study
from kvviz.studies.study import AGREES, DIFFERS, HELP, OPEN, PARTLY, setting_text

TABLE = {
    "CapKV": "fig. 1, fig. 3, fig. 6, table 1, table 6, table 7, table 8, table 5, fig. 4, table 2, table 3, table 4, fig. 5",
    "MomentKV": "fig. 1b, fig. 2a, fig. 2b, fig. 2c, fig. 2d, fig. 2e, fig. 2f, fig. 3a, fig. 3b, fig. 3c, fig. 4, table 1, "
    "table 7, table 2, table 8, table 3, table 4, table 5, table 6",
}
"""What the issue asks for, by paper."""

SMALL = {
    "tokens": 160,
    "new_tokens": 8,
    "samples": 1,
    "lengths": (90, 160),
    "budgets": (24, 48),
    "budget": 32,
    "every": 4,
    "repeats": 1,
    "timed_tokens": 3,
    "taus": (0.0, 5.0, 20.0),
    "layer": 2,
    "head": 1,
}


def small(name: str) -> dict:
    """Settings that make a study short on the tiny model."""
    known = STUDIES[name].settings
    made = {key: value for key, value in SMALL.items() if key in known}
    if "tasks" in known:
        made |= {"tasks": ("niah_single_1",), "tokens": 700}
    return made


@pytest.fixture(scope="module")
def results(tiny_engine):
    """name -> the study's result on the tiny Llama, each run once."""
    made = {}

    def result(name: str) -> StudyResult:
        if name not in made:
            made[name] = STUDIES[name].run(tiny_engine("llama"), small(name))
        return made[name]

    return result


def numbers(rows) -> list[float]:
    return [value for row in rows for value in row.values() if isinstance(value, int | float)]


# The registry


def test_every_row_of_the_issue_is_a_study():
    for paper, items in TABLE.items():
        sources = ", ".join(each.source for each in STUDIES.values() if each.source.startswith(paper)).split(", ")
        covered = {item.removeprefix(f"{paper} ") for item in sources}
        assert set(items.split(", ")) == covered


def test_every_study_says_what_it_is():
    assert {each.group for each in STUDIES.values()} == set(GROUPS)
    for name, each in STUDIES.items():
        assert each.name == name and each.title and each.full and set(each.settings) <= set(HELP)
        assert each.paper.endswith((".", "all.", "part.")) and len(each.paper) < 160
        assert not each.doubt or each.doubt.endswith(".")
    with pytest.raises(StudyError, match="Did you mean tau"):
        study("taus")


# Every study, on a tiny model


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_runs_and_says_what_came_out(results, name):
    result, chosen = results(name), STUDIES[name]
    assert result.rows and all(map(math.isfinite, numbers(result.rows)))
    assert re.match(f"({AGREES}|{PARTLY}|{DIFFERS}|{OPEN}): ", chosen.finding(result))
    assert chosen.finding(result).endswith(".") and "nan" not in chosen.finding(result)
    config = result.config
    assert set(config) >= {"model", "revision", "device", "dtype", "versions", "seed", "settings", "command", "seconds"}
    assert set(config["settings"]) == set(chosen.settings)
    assert f"kvviz study {name}" in config["command"]


@pytest.mark.parametrize("name", STUDIES)
def test_a_figure_holds_the_rows(results, name):
    result, chosen = results(name), STUDIES[name]
    figure = chosen.figure(result, dark=True)
    for panel in chosen.chart.panels:
        drawn = [trace for trace in figure.data if panel.y_title in trace.hovertemplate]
        labels = list(dict.fromkeys(row["label"] for row in panel.rows(result.rows)))
        for label in labels:
            mine = [(row[panel.x], row[panel.y]) for row in panel.rows(result.rows) if row["label"] == label]
            wanted = mine if panel.kind == "points" else means(mine)
            assert any(list(zip(trace.x, trace.y, strict=True)) == wanted for trace in drawn)
    for number, panel in enumerate(chosen.chart.panels):
        alone = chosen.figure(result, panel=number)
        assert {t.name for t in alone.data} == {str(row["label"]) for row in panel.rows(result.rows)}
    shown = [trace.name for trace in figure.data if trace.showlegend]
    assert len(shown) == len(set(shown))


@pytest.mark.parametrize("name", STUDIES)
def test_files_hold_everything(results, name):
    result = results(name)
    again = StudyResult.from_json(result.to_json())
    assert STUDIES[name].finding(again) == STUDIES[name].finding(result)
    lines = result.to_csv().splitlines()
    assert set(lines[0].split(",")) == {key for row in result.rows for key in row}
    assert len(json.loads(result.to_json())["rows"]) == len(result.rows)


def test_progress_goes_forward_to_the_end(engine):
    for name in ("capacity_quality", "while_decoding", "order_and_cost"):
        told = []
        STUDIES[name].run(engine, small(name), lambda share, text, told=told: told.append(share))
        assert told == sorted(told) and told[-1] == 1.0 and told[len(told) // 2] < 1.0


# Numbers against direct calls of the library


def example_state(engine, name: str, mass: bool = False):
    settings = STUDIES[name].chosen(small(name))
    example = tasks.parse(settings["task"]).make(0, settings["tokens"], engine.tokenizer)
    return example.prompt().prefill(engine, mass)


def test_capacities_are_those_of_what_is_evicted(engine, results):
    state = example_state(engine, "capacity_kept")
    row = next(r for r in results("capacity_kept").rows if r["label"] == "KeyDiff" and 70 < r["removed"] < 80)
    kept = evict(state, kvviz.policy("keydiff"), round(state.n_tokens * (1 - row["removed"] / 100)))
    found = []
    for whole, layer in zip(state.layers, kept.layers, strict=True):
        for head, (keys, _, _) in enumerate(layer.heads()):
            found.append(float(capacity.key_capacity(keys) / capacity.key_capacity(whole.keys[head])))
    assert row["K"] == pytest.approx(100 * sum(found) / len(found), rel=1e-6)


def test_errors_are_those_of_the_analysis(engine, results):
    task_bench = bench.Bench(
        engine, STUDIES["error_by_layer"].chosen(small("error_by_layer")), lambda share, text: None
    )
    (reading,) = task_bench.readings(policies=task_bench.policies)
    numbers_ = analysis.of(reading.state).error_map(kvviz.policy("snapkv"), SMALL["budget"])
    rows = [row for row in results("error_by_layer").rows if row["policy"] == "snapkv"]
    for row in rows:
        assert row["w_E"] == pytest.approx(float(numbers_["w_E"][row["layer"]].mean()), abs=1e-5)
        assert row["relative_error"] == pytest.approx(float(numbers_["relative_error"][row["layer"]].mean()), abs=1e-5)
        assert row["relative_error"] <= row["w_E"] * row["gamma"] * 3 and row["one_minus_cos"] == pytest.approx(
            1 - row["cos"]
        )


def test_relevance_is_the_attention_that_is_kept(engine, results):
    rows = results("method_map").rows
    oracle = [row for row in rows if row["policy"] == "oracle"]
    for row in oracle:
        beside = [r["relevance"] for r in rows if r["removed"] == row["removed"]]
        assert row["relevance"] == pytest.approx(max(beside), abs=3) and min(beside) >= 0


def test_bytes_of_the_moments_are_measured(engine, results):
    rows = results("order_and_cost").rows
    heads, _, d = engine.prefill("abc").layers[0].keys.shape
    for row in rows:
        wanted = (
            0 if row["order"] == "no correction" else 4 * len(engine.model.model.layers) * heads * (d * d + 2 * d + 1)
        )
        assert row["moments_bytes"] == wanted


@pytest.mark.parametrize("name", [name for name, each in STUDIES.items() if "samples" in each.settings])
def test_several_samples_have_a_finding(engine, name):
    made = STUDIES[name].run(engine, small(name) | {"samples": 2})
    assert STUDIES[name].finding(made) and STUDIES[name].figure(made).data


def test_a_budget_of_everything_has_no_divergence(engine):
    made = STUDIES["components"].run(engine, small("components") | {"budgets": (4096,)})
    assert max(row["kl"] for row in made.rows) == pytest.approx(0, abs=1e-5)


def test_live_rows_stay_within_their_size(results):
    for row in results("while_decoding").rows:
        assert row["largest_entries"] <= row["budget"] + SMALL["every"] + 1 and row["largest_bytes"] < row["full_bytes"]


# One's own prompt


def test_a_text_of_ones_own_is_read_on(engine):
    text = "The cat sat on the mat and said nothing. " * 20
    made = STUDIES["loss_by_sample"].run(
        engine, small("loss_by_sample") | {"samples": 3}, prompt=Prompt(text, chat=False)
    )
    assert {row["sample"] for row in made.rows} == {1, 2, 3} and all(row["loss"] is not None for row in made.rows)
    assert made.config["context_sha256"] and "--context prompt.txt --plain" in made.config["command"]


def test_a_question_of_ones_own_is_measured_along_the_answer(engine):
    prompt = Prompt("The cat sat on the mat and said nothing. " * 4, "What did it say?", answer="It said")
    made = STUDIES["tau"].run(engine, small("tau"), prompt=prompt)
    assert all(row["loss"] is None and row["kl"] >= 0 for row in made.rows)
    seen = STUDIES["tau"].run(engine, small("tau"), prompt=replace(prompt, seen=True))
    assert "--seen" in seen.config["command"] and [r["kl"] for r in seen.rows] != [r["kl"] for r in made.rows]


def test_a_short_text_is_refused(engine):
    with pytest.raises(StudyError, match="needs at least"):
        STUDIES["tau"].run(engine, small("tau"), prompt=Prompt("Hello", chat=False))


# Settings


def test_settings_are_read_from_text_and_checked():
    chosen = STUDIES["tau"].chosen({"taus": "0, 2.5 9", "tokens": "300"})
    assert chosen["taus"] == (0.0, 2.5, 9.0) and chosen["tokens"] == 300
    assert STUDIES["method_map"].chosen({"policies": "capkv:tau=2 h2o"})["policies"] == ("capkv:tau=2", "h2o")
    for bad in ({"nonsense": 1}, {"tokens": "many"}, {"tokens": "1.5"}, {"shares": ""}, {"taus": "a"}):
        with pytest.raises(StudyError):
            (STUDIES["tau"] if "taus" in bad or "tokens" in bad else STUDIES["capacity_kept"]).chosen(bad)


@pytest.mark.parametrize("name", STUDIES)
def test_defaults_survive_their_own_text(name):
    usual = STUDIES[name].settings
    assert STUDIES[name].chosen({key: setting_text(value) for key, value in usual.items()}) == usual


# Jobs and the command line


def test_a_job_can_be_cancelled_and_finishes(tiny_folder):
    host = Host()
    model = ModelSpec(tiny_folder("llama"), "cpu")
    request = StudyRequest(model, "tau", tuple(small("tau").items()))
    job = host.submit(request)
    assert job.wait(120) and job.status == DONE and job.result.study == "tau"
    assert job.result.config["command"] == request.command() and "--device cpu" in request.command()

    def stop(share: float, text: str) -> None:
        if share > 0.3:
            raise Cancelled("Cancelled.")

    with pytest.raises(Cancelled):
        list(request.run(host.engine, stop))
    host.close()


def test_the_command_writes_results_and_a_report(tiny_folder, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["study", "components", "--model", tiny_folder("llama"), "--device", "cpu", "--out", str(out), "--quiet"]
    words += ["--set", "tokens=160", "--set", "new_tokens=6", "--set", "samples=1", "--set", "budgets=24,48"]
    assert main([*words, "--report", str(tmp_path / "results.md")]) == 0
    assert "components: " in capsys.readouterr().out
    saved = StudyResult.from_json((out / "components.json").read_text(encoding="utf-8"))
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert STUDIES["components"].finding(saved) in page and "Once more" not in page and saved.config["command"] in page
    assert "--set budgets=24,48" in saved.config["command"]
    assert main([*words, "--label", "again", "--set", "seed=3", "--report", str(tmp_path / "results.md")]) == 0
    both = (tmp_path / "results.md").read_text(encoding="utf-8")
    again = StudyResult.from_json((out / "components-again.json").read_text(encoding="utf-8"))
    assert again.config["seed"] == 3 and StudyResult.from_json((out / "components.json").read_text()) == saved
    assert both.index(saved.config["command"]) < both.index("Once more") < both.index(again.config["command"])
    assert "1 studies" not in both and both.count("### ") == 1
    assert main(["study", "--list"]) == 0
    assert main(["study", "nonsense"]) == 2 and "There is no study" in capsys.readouterr().err


def test_a_report_has_a_table_for_every_study(results):
    page = report.report([results(name) for name in STUDIES])
    for name, each in STUDIES.items():
        assert f"### {each.title}" in page and each.finding(results(name)) in page
    assert page.count("```bash") == len(STUDIES) and page.count("| --- |") > len(STUDIES)


def test_a_file_that_is_none_is_refused():
    for text in ("", "[]", '{"study": "tau"}', '{"study": 1, "config": {}, "rows": [], "version": 99}'):
        with pytest.raises(StudyError):
            StudyResult.from_json(text)


# Findings on rows that are made up


def kl_rows(values: dict, **more) -> list[dict]:
    """label -> KL, as rows."""
    return [
        {"label": label, "policy": label.lower(), "kl": kl, "evict_ms": 1.0, **more} for label, kl in values.items()
    ]


def test_finding_on_tau():
    def rows(best):
        return [{"tau": t, "kl": 0.1 + abs(t - best), "removed": 50} for t in (0.0, 1.0, 5.0, 10.0, 20.0)]

    assert ablations.judge_tau(rows(5.0)).startswith(AGREES)
    assert ablations.judge_tau(rows(10.0)).startswith(PARTLY)
    assert ablations.judge_tau(rows(20.0)).startswith(DIFFERS)
    assert ablations.judge_tau(rows(5.0)[:1]).startswith(OPEN)


def test_finding_on_components():
    def rows(*kl):
        return [{"label": part, "kl": each, "budget": 64} for part, each in zip(ablations.PARTS, kl, strict=True)]

    assert ablations.judge_components(rows(1.0, 0.9, 0.6, 0.4)).startswith(AGREES)
    assert "+0.100 nats are left over" in ablations.judge_components(rows(1.0, 0.9, 0.6, 0.4))
    assert ablations.judge_components(rows(1.0, 0.9, 0.6, 0.7)).startswith(PARTLY)
    assert ablations.judge_components(rows(1.0, 0.9, 1.2, 1.2)).startswith(DIFFERS)


def test_finding_on_variants_and_bits():
    exact, covariance = "CapKV (output exact)", "CapKV (gating covariance)"
    assert ablations.judge_variants(kl_rows({"CapKV": 1.0, exact: 1.01, covariance: 1.2})).startswith(AGREES)
    assert ablations.judge_variants(kl_rows({"CapKV": 1.0, exact: 1.5, covariance: 0.8})).startswith(DIFFERS)
    four = [
        row | {"policy": name} for name, kl in (("capkv", 0.1), ("snapkv", 0.2)) for row in kl_rows({"x (4 bits)": kl})
    ]
    assert ablations.judge_bits(four).startswith(AGREES)
    assert ablations.judge_bits([row | {"kl": 1 - row["kl"]} for row in four]).startswith(PARTLY)


def test_finding_on_correlations():
    up = [{"K": i, "U": i, "KU": i, "kl": -i, "score": i, "removed": i % 2} for i in range(12)]
    assert capacity_study.judge_quality(up).startswith(AGREES) and capacity_study.judge_score(up).startswith(AGREES)
    assert capacity_study.judge_quality([row | {"kl": row["K"]} for row in up]).startswith(DIFFERS)
    budgets = [row | {"removed": i // 3, "kl": -(i // 3) * 10 + i % 3} for i, row in enumerate(up)]
    assert capacity_study.judge_quality(budgets).startswith(PARTLY), "the budget alone makes this correlation"
    assert capacity_study.judge_quality([row | {"kl": 1.0} for row in up]).startswith(OPEN)
    assert capacity_study.correlations(up)["K"]["p"] < 1e-6


def test_finding_on_kept_capacity_and_the_map():
    rows = [
        {"label": label, "removed": x, "K": top - x, "U": top - x, "KU": top - x}
        for label, top in (("CapKV", 101), ("Sink", 100))
        for x in (0, 50, 90)
    ]
    assert capacity_study.judge_kept(rows).startswith(AGREES)
    other = [row | {"label": {"CapKV": "Sink", "Sink": "CapKV"}[row["label"]]} for row in rows]
    assert capacity_study.judge_kept(other).startswith(PARTLY)

    def place(*capkv):
        others = (("sink", 10, 1), ("h2o", 5, 8), ("tova", 4, 7))
        return [{"policy": p, "KU": ku, "relevance": r, "removed": 50} for p, ku, r in (("capkv", *capkv), *others)]

    assert method_map.judge_map(place(9, 9)).startswith(AGREES)
    assert method_map.judge_map(place(11, 0)).startswith(PARTLY) and "number 4 in the future" in method_map.judge_map(
        place(11, 0)
    )
    assert method_map.judge_map(place(1, 0)).startswith(DIFFERS)


def test_finding_on_errors():
    one = {"policy": "h2o", "label": "H2O", "w_E": 0.05, "cos": 0.01, "relative_error": 0.25, "layer": 0}
    assert error.judge_by_layer([one]).startswith(AGREES)
    assert error.judge_by_layer([one | {"w_E": 0.5}]).startswith(PARTLY)
    assert error.judge_by_layer([one | {"w_E": 0.5, "cos": 0.9, "relative_error": 0.1}]).startswith(DIFFERS)
    grid = [
        {"length": n, "budget": b, "w_E": n / b, "relative_error": n / b, "worst_layer": n / b}
        for n in (100, 200)
        for b in (10, 20)
    ]
    assert error.judge_by_budget(grid).startswith(AGREES)
    assert error.judge_by_budget(
        [row | {"w_E": row["budget"], "relative_error": row["budget"]} for row in grid]
    ).startswith(DIFFERS)
    head = {"layer": 1, "head": 2, "angle": 84, "cos": 0.1, "mean_cos": 0.05}
    assert error.judge_gap([head]).startswith(AGREES) and error.judge_gap([head | {"cos": 0.8}]).startswith(DIFFERS)


def test_finding_on_corrections():
    row = {"policy": "momentkv", "layer": 0, "relative_error": 0.3, "corrected_error": 0.1, "cos_estimate": 0.9}
    assert correction.judge_correction([row]).startswith(AGREES)
    assert correction.judge_correction([row | {"corrected_error": 0.4}]).startswith(DIFFERS)
    loss = [
        {"sample": 1, "label": "H2O", "extra_loss": 0.5, "kl": 1},
        {"sample": 1, "label": "MomentKV", "extra_loss": 0.1, "kl": 1},
    ]
    assert correction.judge_loss(loss).startswith(AGREES)
    assert correction.judge_loss([row | {"extra_loss": -row["extra_loss"]} for row in loss]).startswith(DIFFERS)


def score_rows(values: dict, **more) -> list[dict]:
    """policy -> score, as rows of one example, and the full cache's."""
    rows = [{"policy": "full", "label": "Full cache", "score": 60.0}]
    rows += [{"policy": name, "label": {"capkv": "CapKV"}.get(name, name), "score": s} for name, s in values.items()]
    return [{"task": "t", "seed": 0, "kind": "needle", "removed": 50.0, "budget": 128} | row | more for row in rows]


def test_finding_on_scores():
    assert scores.judge_shares(score_rows({"capkv": 50, "sink": 40})).startswith(AGREES)
    assert scores.judge_shares(score_rows({"capkv": 30, "sink": 40})).startswith(DIFFERS)
    assert scores.judge_shares(score_rows({"capkv": 30, "sink": 30})).startswith(OPEN)
    assert scores.judge_kinds(score_rows({"momentkv": 50, "adakv": 40})).startswith(AGREES)
    assert "+10.0 needle" in scores.judge_kinds(score_rows({"momentkv": 50, "adakv": 40}))
    assert scores.judge_kinds(score_rows({"momentkv": 30, "adakv": 40})).startswith(DIFFERS)


def test_the_gap_that_is_recovered():
    rows = score_rows({"momentkv": 50, "adakv": 40}) + score_rows({"momentkv": 55, "adakv": 50}, budget=256)[1:]
    made = scores.recoveries(rows)
    assert made[128] == {"gain": 10, "gap": 20, "recovered": 0.5} and made[256]["recovered"] == 0.5
    assert scores.judge_budgets(rows).startswith(AGREES)
    assert scores.judge_budgets(score_rows({"momentkv": 30, "adakv": 40})).startswith(DIFFERS)


def test_finding_on_costs():
    def rows(capkv, power):
        return [
            {"policy": p, "length": n, "removed": 50, "seconds": s * n**power, "evict": 0.1, "at": "lengths"}
            for p, s in (("capkv", capkv), ("sink", 1.0))
            for n in (100, 200)
        ]

    assert cost.judge_time(rows(1.0, 1.0)).startswith(AGREES)
    assert cost.judge_time(rows(1.0, 2.0)).startswith(PARTLY)
    assert cost.judge_time(rows(2.0, 2.0)).startswith(DIFFERS)
    orders = [
        {
            "order": order,
            "kl": kl,
            "ms": ms,
            "budget": 128,
            "added_percent": 50.0,
            "moments_bytes": 2**20,
            "ms_low": ms - 0.1,
            "ms_high": ms + 0.1,
        }
        for order, kl, ms in (("no correction", 0.3, 10.0), ("order 0", 0.2, 11.0), ("order 1", 0.1, 12.0))
    ]
    assert cost.judge_orders(orders).startswith(AGREES) and "+2.00 ms" in cost.judge_orders(orders)


def test_finding_while_decoding():
    rows = [
        {"label": label, "budget": b, "kl": kl}
        for label, values in (("CapKV", (0.3, 0.1)), ("Sink", (0.9, 0.2)))
        for b, kl in zip((64, 128), values, strict=True)
    ]
    assert live.judge_live(rows).startswith(AGREES)
    assert live.judge_live([row | {"kl": 1 - row["kl"]} for row in rows]).startswith(DIFFERS)


def test_policies_of_every_default_can_be_made():
    for each in STUDIES.values():
        for text in each.settings.get("policies", ()):
            parse(text)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_on_the_default_model(default_engine, name):
    less = {
        "tokens": 320,
        "new_tokens": 16,
        "samples": 1,
        "lengths": (160, 320),
        "shares": (0.5, 0.9),
        "taus": (0.0, 5.0, 20.0),
    }
    less |= {"budgets": (32, 96), "budget": 64, "repeats": 1, "every": 8, "timed_tokens": 4}
    known = STUDIES[name].settings
    settings = {key: value for key, value in less.items() if key in known}
    if "tasks" in known:
        settings |= {"tasks": ("niah_single_2", "single_doc_qa"), "tokens": 640}
    result = STUDIES[name].run(default_engine, settings)
    assert result.rows and all(map(math.isfinite, numbers(result.rows)))
    assert STUDIES[name].finding(result)
