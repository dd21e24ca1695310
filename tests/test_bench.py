"""The benchmark's arithmetic, and every measurement that needs no peer, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvviz.__main__ import main
from kvviz.bench import growth, measures, operations, report
from kvviz.bench.targets import TARGETS
from kvviz.bench.timing import Times, ratio

CONTEXT = Path(__file__).parent / "texts" / "gpl-3.txt"


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_exponents(power):
    rows = [{"tokens": n, "s": 0.3 * n**power} for n in (512, 1024, 4096)]
    assert growth.exponent(rows, "tokens", "s") == pytest.approx(power)


def test_ratios_are_of_the_same_round():
    middle, spread = ratio(Times((2.0, 8.0, 30.0)), Times((1.0, 2.0, 10.0)))
    assert middle == 3 and spread == pytest.approx(1 / 3)


def test_the_table_says_what_was_reached_and_what_was_missed():
    most = next(t for t in TARGETS if not t.more)
    least = next(t for t in TARGETS if t.more)
    table = report.table({most.key: (most.must * 1.01, 0.1, {}), least.key: (least.must, 0.0, {})})
    assert table.count("**missed**") == 1 and table.count("| reached |") == 1 and "(± 10%)" in table


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("mkldnn::_linear_pointwise", "linear layers"),
        ("aten::bmm", "attention"),
        ("aten::copy_", "copies and layout"),
        ("aten::mul", "element-wise, norms, rotation"),
        ("aten::view", operations.REST),
    ],
)
def test_kinds_of_operations(operation, kind):
    assert operations.kind(operation) == kind


@pytest.mark.parametrize("only", [f.__name__ for f in measures.ALL if f.__name__ not in ("peer_runs", "memory")])
def test_measurements_run(tiny_folder, tmp_path, capsys, only):
    options = f"--device cpu --context {CONTEXT} --tokens 300 --repeats 1 --only {only}".split()
    assert main(["bench", "--model", tiny_folder(), *options, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert results and all(r["value"] > 0 or name == "capture" for name, r in results.items())
    assert (tmp_path / "table.md").read_text().strip() == capsys.readouterr().out.strip()


def test_growth_and_profiles(engine, monkeypatch):
    ids = engine.tokenizer(CONTEXT.read_text(), add_special_tokens=False)["input_ids"][:2048]
    monkeypatch.setattr(growth, "bandwidth", lambda: 1e9)
    monkeypatch.setattr(growth, "matmul_rate", lambda: 1e9)
    lengths, rows = growth.by_length(engine, ids[:700], (64, 640), 1), growth.by_rows(engine, ids[:600], (1, 2), 1)
    assert [r["tokens"] for r in lengths] == [64, 640] and [r["rows"] for r in rows] == [1, 2]
    found = operations.profiles(engine, ids[:400])
    assert all(sum(shares.values()) == pytest.approx(1) for shares in found.values())
    assert "of its floor" in report.growth_tables(lengths, rows) and "linear layers" in report.profile_table(found)
