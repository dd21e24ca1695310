"""The command line writes the same run that the library gives."""

import json

import pytest

import kvviz
from kvviz.__main__ import main
from kvviz.policies.spec import parse, spec
from tests.reference import EVERY, run
from tests.test_decode import QUESTION, TEXT


@pytest.fixture
def context(tmp_path):
    file = tmp_path / "context.txt"
    file.write_text(TEXT)
    return file


def test_generate_writes_the_run(tiny_folder, tmp_path, context, engine, capsys):
    out = tmp_path / "out.json"
    arguments = ["generate", "--model", tiny_folder(), "--device", "cpu", "--plain", "--context", str(context)]
    arguments += ["--question", QUESTION, "--policy", "full", "--policy", "capkv", "--policy", "momentkv:window=4"]
    arguments += ["--budget", "16", "--tau", "2", "--max-new-tokens", "7", "--json", str(out)]
    assert main(arguments) == 0
    data = json.loads(out.read_text())
    policies = [kvviz.policy("capkv", tau=2.0), kvviz.policy("momentkv", window=4)]
    expected = run(engine, engine.prefill(TEXT), QUESTION, policies, 16, max_new_tokens=7)
    assert data["version"] == 1 and data["config"]["budget"] == 16
    assert [r["policy"] for r in data["rows"]] == ["full", "capkv", "momentkv"]
    for row, own in zip(data["rows"], expected.rows, strict=True):
        assert (row["text"], row["token_ids"], row["first_difference"]) == (
            own.text,
            own.token_ids,
            own.first_difference,
        )
        assert row["kl"] == pytest.approx(own.kl, abs=1e-6)
        assert (row["entries"], row["bytes"], row["settings"]) == (own.entries, own.bytes, own.settings)
        assert set(row["seconds"]) == {"prefill", "evict", "decode"}
    assert "CapKV (tau 2)" in capsys.readouterr().out


def test_budgets_as_share_and_bytes(tiny_folder, tmp_path, context):
    base = ["generate", "--model", tiny_folder(), "--device", "cpu", "--plain", "--context", str(context), "--quiet"]
    base += ["--policy", "sink", "--policy", "snapkv:window=4,correction=1", "--max-new-tokens", "2"]
    out = tmp_path / "out.json"
    assert main([*base, "--share-removed", "0.75", "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert {r["entries"] for r in data["rows"][1:]} == {data["config"]["prompt_tokens"] // 4}
    assert main([*base, "--mib", "0.04", "--json", str(out)]) == 0
    sink, corrected = json.loads(out.read_text())["rows"][1:]
    assert corrected["entries"] < sink["entries"]
    per_entry = 2 * 4 * 2 * 16 * 4
    for row in (sink, corrected):
        assert 0.04 * 2**20 - per_entry < row["bytes"] <= 0.04 * 2**20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--policy", "kapkv"], "capkv"),
        (["--policy", "capkv:tau"], "option=value"),
        (["--policy", "capkv:tau=-1"], "tau"),
        (["--budget", "0"], "budget"),
        (["--share-removed", "1"], "share"),
        (["--context", "/no/such/file"], "/no/such/file"),
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--max-new-tokens", "2000"], "positions"),
        (["--max-new-tokens", "0"], "token"),
    ],
)
def test_bad_input_is_one_line_on_stderr(tiny_folder, context, capsys, change, message):
    base = [
        "generate",
        "--model",
        tiny_folder(),
        "--device",
        "cpu",
        "--context",
        str(context),
        "--policy",
        "sink",
        "--quiet",
    ]
    assert main([*base, *change]) == 2
    errors = capsys.readouterr().err.strip()
    assert message in errors and "Traceback" not in errors and "\n" not in errors


def test_a_binary_file_as_context(tiny_folder, tmp_path, capsys):
    file = tmp_path / "x.bin"
    file.write_bytes(bytes(range(256)))
    assert main(["generate", "--model", tiny_folder(), "--context", str(file), "--policy", "sink"]) == 2
    assert "UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["full", *EVERY])
def test_a_policy_survives_its_short_form(name):
    for more in ({}, {"sinks": 7, "recent": 0.25, "allocation": "pyramid", "correction": 0, "partition": 0.5}):
        policy = kvviz.policy(name, **more)
        assert parse(spec(policy)) == policy
    assert spec(kvviz.policy(name)) == name


def test_models_lists_what_can_be_loaded(capsys):
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert "smollm2-135m-instruct" in printed and "qwen3" in printed
