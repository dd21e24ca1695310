"""Runs as files: JSON there and back, what is refused, CSV, the table, the command line."""

from __future__ import annotations

import csv
import io
import json
import shlex
from dataclasses import replace

import pytest

import kvviz
from kvviz import report
from kvviz.__main__ import main
from kvviz.events import Finished
from kvviz.experiment import MIB, SHARE, Experiment, Size, from_query
from kvviz.host import ModelSpec
from kvviz.jobs import Prompt

POLICIES = (kvviz.policy("capkv", tau=2.0), kvviz.policy("momentkv", order_of_eviction="one batch"))
TEXT = "It was a bright cold day in April, and the clocks were striking <b>thirteen</b>. " * 3


@pytest.fixture(scope="module")
def run(tiny_folder):
    engine = kvviz.load(tiny_folder("llama"), device="cpu")
    state = engine.prefill(TEXT)
    events = list(engine.generate(state, " Why?", POLICIES, budget=48, max_new_tokens=8, stop=False))
    return next(event.run for event in events if isinstance(event, Finished))


def test_json_there_and_back(run):
    assert report.from_json(report.to_json(run)) == run
    plain = json.loads(report.to_json(run))
    assert list(plain) == ["version", "config", "rows"] and plain["version"] == 1
    for row in plain["rows"]:
        assert {"policy", "label", "text", "token_ids", "first_difference", "kl", "entries", "bytes", "seconds"} <= set(
            row
        )
        assert {"prefill", "evict", "decode"} == set(row["seconds"])


def test_json_names_its_prompt(run):
    experiment = replace(Experiment(), size=Size(64))
    config = json.loads(report.to_json(run, experiment))["config"]
    link = {key: value if isinstance(value, list) else [value] for key, value in config["link"].items()}
    assert from_query(link, Experiment())[0] == experiment
    assert len(config["context_sha256"]) == 64 and config["command"].startswith("python -m kvviz generate")
    assert report.from_json(report.to_json(run, experiment)).rows == run.rows


def broken(run, change) -> str:
    plain = json.loads(report.to_json(run))
    change(plain)
    return json.dumps(plain)


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain.update(version=2),
        lambda plain: plain.update(rows=[]),
        lambda plain: plain.update(rows="x"),
        lambda plain: plain.update(config=None),
        lambda plain: plain["rows"].pop(0),
        lambda plain: plain["rows"][1].update(kl=[float("nan")]),
        lambda plain: plain["rows"][1].update(kl="x"),
        lambda plain: plain["rows"][1].update(kl=[-1]),
        lambda plain: plain["rows"][1].update(token_ids=[1.5]),
        lambda plain: plain["rows"][1].update(pieces=[1]),
        lambda plain: plain["rows"][1].update(__class__="x"),
        lambda plain: plain["rows"][1].update(top=[[["a"]]]),
        lambda plain: plain["rows"][1].update(head_counts=[["a"]]),
        lambda plain: plain["rows"][1].pop("pieces"),
        lambda plain: plain["rows"][1]["pieces"].pop(),
        lambda plain: plain["rows"][1].update(head_counts=[[]]),
        lambda plain: plain.update(rows=plain["rows"] * 40),
    ],
)
def test_a_file_that_is_no_run_is_refused(run, change):
    with pytest.raises(report.ReportError):
        report.from_json(broken(run, change))


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "null", '"x"', b"\xff\xfe\x00", "{}"])
def test_what_is_not_json_is_refused(text):
    with pytest.raises(report.ReportError):
        report.from_json(text)


def test_too_large():
    with pytest.raises(report.ReportError, match="larger"):
        report.from_json(" " * (report.MAX_BYTES + 1))


def test_csv_has_a_line_for_each_policy_and_step(run):
    lines = list(csv.DictReader(io.StringIO(report.to_csv(run))))
    assert len(lines) == 3 * 8
    assert lines[8]["policy"] == run.rows[1].label and float(lines[8]["KL, nats"]) == pytest.approx(run.rows[1].kl[0])
    assert lines[8]["full cache wrote"] == run.reference.pieces[0]


def test_the_table_says_what_was_kept(run):
    full, capkv, momentkv = report.table(run)
    assert full["entries a head"] == run.config["prompt_tokens"] and full["mean KL, nats"] is None
    assert capkv["entries a head"] == 48 and capkv["of it moments, MiB"] == 0 < momentkv["of it moments, MiB"]


SETTINGS = [
    {},
    {"size": Size(75, SHARE), "equal": (2, 8)},
    {"size": Size(0.3, MIB), "temperature": 0.8, "seed": 3},
    {"prompt": Prompt(TEXT, "Why 'so'?", seen=True, chat=True, answer="Because")},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(settings) or "usual")
def test_the_command_repeats_the_run(settings, tiny_folder, tmp_path, monkeypatch):
    folder = tiny_folder("llama")
    usual = Experiment(
        ModelSpec(folder, "cpu"), Prompt(TEXT, "Why?", chat=False), "own", POLICIES, Size(48), max_new_tokens=6
    )
    experiment = replace(usual, **settings)
    (tmp_path / "prompt.txt").write_text(experiment.prompt.context)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(report.command(experiment))
    assert words[:3] == ["python", "-m", "kvviz"]
    assert main(words[3:]) == 0
    written = report.from_json((tmp_path / "OUT.json").read_text())
    engine = kvviz.load(folder, device="cpu")
    ids, _ = experiment.prompt.encode(engine)
    request = replace(experiment, n_tokens=len(ids), shape=kvviz_shape(engine)).generate
    here = next(event.run for event in request.run(engine, lambda share, text: None) if isinstance(event, Finished))
    assert [(r.label, r.budget, r.token_ids) for r in written.rows] == [
        (r.label, r.budget, r.token_ids) for r in here.rows
    ]


def kvviz_shape(engine):
    from kvviz.experiment import Shape

    return Shape.of(engine.loaded)
