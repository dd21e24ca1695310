"""What the browser is told of figures at a slider's other positions: the numbers that change, and nothing else."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import numpy as np
import pytest

import kvviz
from kvviz import analysis
from kvviz.analysis import tokens
from kvviz.experiment import Experiment, Size
from kvviz.figures import capacity, heads, style, values
from kvviz.figures import tokens as token_figures
from tests.test_decode import state_of
from ui import scrub

BUDGETS = (12, 20, 33)


@pytest.fixture(scope="module")
def numbers(tiny_engine):
    state = state_of(tiny_engine("llama"))
    found = analysis.Analysis(state)
    found.keep = state  # an Analysis does not hold its state
    return found


def positions(budgets=BUDGETS) -> scrub.Positions:
    return {"budget": {str(b): replace(Experiment(), size=Size(b)) for b in budgets}}


def read(figure: dict, position: str, slider: str = "budget") -> dict:
    """(kind, index, field) -> numbers or words, as the browser takes them apart."""
    packed, found = np.frombuffer(base64.b64decode(figure["sets"][slider][position]), dtype=np.float32), {}
    at = 0
    for (kind, index), field, many, words in figure["parts"]:
        own = packed[at : at + many]
        found[kind, index, field] = own if words is None else [words[int(i)] for i in own]
        at += many
    assert at == len(packed)
    return found


DRAWN = {
    "map": lambda numbers, b: scrub._numbers(heads.head_map(numbers.error_map(kvviz.policy("capkv"), b))),
    "arrows": lambda numbers, b: scrub._fields(*values.arrows(numbers.head(kvviz.policy("capkv"), b, 1, 1))),
    "profile": lambda numbers, b: scrub._fields(
        token_figures.lines([tokens.kept_by(numbers, kvviz.policy("capkv"), b)])
    ),
    "heads of a token": lambda numbers, b: scrub._fields(
        token_figures.kv_heads(tokens.why(numbers, kvviz.policy("capkv"), b, 20))
    ),
    "capacity": lambda numbers, b: scrub._numbers(
        capacity.curve(numbers.capacity([kvviz.policy("capkv", tau=b / 4)]), "KU", 0.5)
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_the_browser_gets_each_number_that_changes_and_no_other(numbers, name):
    drawn = {b: DRAWN[name](numbers, b) for b in BUDGETS}
    figure = scrub._figure(positions(), lambda each: drawn[each.budget])
    assert figure["parts"]
    for budget, own in drawn.items():
        told = read(figure, str(budget))
        for part, there in own.items():
            if part in told:
                assert np.array_equal(told[part], there, equal_nan=there.dtype.kind == "f"), part
            else:
                assert all(there.tobytes() == other[part].tobytes() for other in drawn.values()), part
        assert told.keys() <= own.keys()


def test_numbers_are_those_that_the_page_draws(numbers):
    """The browser knows a figure that it may change by its numbers."""
    figure = heads.head_map(numbers.error_map(kvviz.policy("keydiff"), 20))
    found = scrub._numbers(figure)
    drawn = json.loads(style.bake(figure).to_json())["data"]
    for (kind, index, field), own in found.items():
        if kind == "data":
            there = np.array(drawn[index][field], dtype=np.float64).ravel()  # null is no number
            assert np.array_equal(there.astype(np.float32), own, equal_nan=True)
    assert {("data", 0, "z"), ("data", 4, "x")} <= found.keys()


def test_what_is_not_known_or_of_another_make_is_left_out():
    drawn = {1: {("data", 0, "x"): np.float32([1, 2])}, 3: {("data", 0, "x"): np.float32([3, 4])}}
    drawn[4] = {("data", 0, "x"): np.float32([3, 4, 5])}
    drawn[5] = drawn[1] | {("data", 1, "x"): np.float32([1])}
    figure = scrub._figure(positions((1, 2, 3, 4, 5)), lambda each: drawn.get(each.budget))
    assert list(figure["sets"]["budget"]) == ["1", "3"]
    assert read(figure, "3") == {("data", 0, "x"): pytest.approx([3, 4])}
    nothing = scrub._figure(positions(), lambda each: None)
    assert nothing == {"parts": [], "sets": {"budget": {}}}
    same = scrub._figure(positions(), lambda each: drawn[1])
    assert same == {"parts": [], "sets": {"budget": {}}}, "nothing depends on the slider"


def test_looks_of_markers_are_places_in_a_list_of_words():
    field = ("data", 0, "symbol")
    looks = {1: np.array(["circle", "cross", "circle"]), 2: np.array(["cross", "star", "circle"])}
    figure = scrub._figure(positions((1, 2)), lambda each: {field: looks[each.budget]})
    assert figure["parts"] == [[("data", 0), "symbol", 3, ["circle", "cross", "star"]]]
    assert read(figure, "2") == {field: ["cross", "star", "circle"]}
