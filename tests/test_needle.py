"""The needle table: the same answers as single runs, right ones marked, put between the markers and nowhere else."""

import pytest

import kvviz
from kvviz.__main__ import main
from kvviz.commands import needle
from kvviz.policies.spec import parse
from kvviz.presets import PRESETS, Preset
from tests.reference import run

SENTENCE = "The special magic number for Cairo is 60494.\n"
TEXT = "Nothing of note stands here.\n" * 6 + SENTENCE + "Nor does it here.\n" * 4
PAGE = f"before\n{needle.BEGIN}\nold\n{needle.END}\nafter\n"


class Small(Preset):
    """A prompt that fits into the tiny model."""

    @property
    def context(self) -> str:
        return TEXT


@pytest.fixture(autouse=True)
def small_preset(monkeypatch):
    small = Small("needle", "", "", question="Which number is it?", answer="It is")
    monkeypatch.setattr(needle, "PRESETS", {"needle": small})


def columns(line: str) -> list[str]:
    return [each.strip() for each in line.strip().strip("|").split(" | ")]


def test_the_table_holds_what_each_method_answers(tiny_folder, tiny_engine, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    arguments = ["needle", "--model", tiny_folder(), "--device", "cpu", "--quiet", "--max-new-tokens", "6"]
    arguments += ["--budget", "24", "--budget", "48", "--policy", "full", "--policy", "capkv:tau=2", "--policy", "h2o"]
    assert main([*arguments, "--update", str(page)]) == 0
    printed = capsys.readouterr().out.strip()
    lines = printed.splitlines()
    assert columns(lines[0]) == ["method", "24, asked after", "24, seen", "48, asked after", "48, seen"]
    assert [columns(line)[0] for line in lines[2:5]] == ["Full cache", "CapKV (tau 2)", "H2O"]
    assert page.read_text() == f"before\n{needle.BEGIN}\n{printed}\n{needle.END}\nafter\n"
    assert f"Model {tiny_folder()}, float32 on cpu" in lines[-1]
    assert "--budget 24 --budget 48 --policy full --policy capkv:tau=2 --policy h2o" in lines[-1]

    engine, policies = tiny_engine(), [parse("capkv:tau=2"), kvviz.policy("h2o")]
    for number, line in enumerate(lines[3:5]):
        expected = []
        for budget in (24, 48):
            for seen in (False, True):
                question = "Which number is it?"
                about = {"question": question, "answer": "It is"} if seen else {}
                state = engine.prefill([{"role": "user", "content": TEXT}], attention_mass=True, **about)
                more = {"max_new_tokens": 6, "answer": "" if seen else "It is"}
                result = run(engine, state, "" if seen else question, [policies[number]], budget, **more)
                expected.append(needle.cell(result.rows[1].text, "60494"))
        assert columns(line)[1:] == expected


def test_every_method_is_asked_by_default(tiny_folder, capsys):
    base = ["needle", "--model", tiny_folder(), "--device", "cpu", "--quiet"]
    assert main([*base, "--budget", "64", "--max-new-tokens", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [columns(line)[0] for line in lines[2:] if line.startswith("|")]
    assert titles == [kvviz.policy(name).title for name in kvviz.policies.names()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 60494.", "**60494 (right)**"),
        ("It is 60494", "**60494 (right)**"),
        (" 604945.", "604945."),
        (" 160494", "160494"),
        ("a | b *c*\n\nd", "a \\| b \\*c\\* d"),
        ("The Copyright of it", "The Copyrigh..."),
        ("  \n", "(nothing)"),
    ],
)
def test_cell(text, expected):
    assert needle.cell(text, "60494") == expected


@pytest.mark.parametrize("page", ["no markers", needle.BEGIN, needle.END + needle.BEGIN])
def test_a_file_without_a_place_for_the_table_fails_before_the_run(tmp_path, capsys, page):
    file = tmp_path / "page.md"
    file.write_text(page)
    assert main(["needle", "--model", "/no/such/model", "--update", str(file)]) == 2
    assert "put <!-- needle:begin -->" in capsys.readouterr().err
    assert file.read_text() == page


def test_the_preset_hides_a_number():
    assert needle.needle(PRESETS["needle"].context) == "60494"
    with pytest.raises(ValueError, match="hides no number"):
        needle.needle("nothing")


@pytest.mark.model
def test_the_full_cache_finds_the_needle(default_engine, monkeypatch, capsys):
    monkeypatch.setattr(needle, "PRESETS", PRESETS)
    monkeypatch.setattr(needle, "load", lambda *_: default_engine)
    assert main(["needle", "--budget", "128", "--policy", "full", "--policy", "sink", "--quiet"]) == 0
    full, sink = (columns(line) for line in capsys.readouterr().out.splitlines()[2:4])
    assert full == ["Full cache", *["**60494 (right)**"] * 2]
    assert "right" not in " ".join(sink)
