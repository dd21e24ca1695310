"""The tour's numbers are those of the library, its steps open by a link, and it says what it claims on the default model."""

from __future__ import annotations

import re

import numpy as np
import pytest

import kvviz
from kvviz import analysis, tour
from kvviz.analysis import tokens as by_token
from kvviz.experiment import Experiment, Shape, from_query, to_query
from kvviz.figures import tour as figures
from tests.test_ui import model, opened, page, press, settled  # noqa: F401

STEPS = range(1, len(tour.STEPS) + 1)


@pytest.fixture(scope="module")
def scene(tiny_folder):
    """A tiny model that has read the needle and written a short answer: numbers, texts, shape, engine, state."""
    engine = kvviz.load(tiny_folder("llama"), device="cpu")
    lines = tour.PRESETS[tour.PRESET].context
    text = lines[: lines.index("The special")][-350:] + "The special magic number for Cairo is 60494." + lines[-300:]
    state = engine.prefill(text)
    list(engine.generate(state, " Which?", tour.RIVALS, budget=48, max_new_tokens=3, stop=False))
    state = engine.latest(state)
    texts = by_token.pieces(state.ids, engine.tokenizer.decode)
    return analysis.of(state), texts, Shape.of(engine.loaded), state


def test_the_needle_is_found(scene):
    _, texts, _, _ = scene
    sentence, digits = tour.location(texts)
    assert "The special magic number for Cairo is 60494." in "".join(texts[i] for i in sentence)
    assert "".join(texts[i] for i in digits).strip() == "60494"
    assert set(digits) < set(sentence) < set(tour.passage(texts)) | set(sentence)
    with pytest.raises(ValueError, match="no number"):
        tour.location(["nothing", " here"])


def test_growth_is_the_real_states_size(scene):
    _, texts, shape, state = scene
    assert tour.Growth(len(texts), len(texts), shape).mib(len(texts)) * tour.MIB == state.bytes


def test_the_needles_numbers(scene):
    numbers, texts, _, state = scene
    found = tour.needle(numbers, texts, 48)
    sentence, digits = tour.location(texts)
    for each in tour.RIVALS:
        kept = np.stack([numbers.kept(each, 48, layer) for layer in range(len(state.layers))])
        assert found.kept[each.label] == pytest.approx(kept.mean(axis=(0, 1))[list(sentence)])
        received = np.stack([by_token.received(numbers, layer) for layer in range(len(state.layers))])[
            ..., list(digits)
        ]
        groups = state.layers[0].groups
        here = kept.repeat(groups, axis=1)[..., list(digits)]
        assert found.held[each.label] == pytest.approx((received * here).sum() / received.sum(), abs=1e-5)
    assert found.strongest[0] == pytest.approx(received.sum(-1).max(), abs=1e-6)
    assert tour.needle(numbers, texts, len(texts)).held["SnapKV"] == pytest.approx(1)


def test_a_pair_loses_about_the_same(scene):
    numbers, _, _, _ = scene
    found, lost = tour.pair(numbers, budget=48), numbers.error_map(tour.SNAPKV, 48)
    large, small = ({key: lost[key][where] for key in ("w_E", "gamma")} for where in (found.large, found.small))
    assert found.large != found.small and large["w_E"] > 0 and small["w_E"] > 0


def test_equal_bytes_are_equal(scene):
    _, texts, shape, _ = scene
    entries, size = tour.price(shape, len(texts), False, 128), tour.price(shape, len(texts), True, 128)
    capkv, momentkv = (size.stored[label] + size.statistics[label] for label in ("CapKV", "MomentKV"))
    assert momentkv <= capkv and capkv - momentkv < shape.bytes(1) / tour.MIB
    assert entries.entries["MomentKV"] - size.entries["MomentKV"] == pytest.approx(entries.worth, abs=1)
    assert entries.statistics["CapKV"] == 0 and "more memory" in entries.sentences()[1]


def test_every_step_says_something_plain(scene):
    numbers, texts, shape, _ = scene
    said = [
        tour.Growth(9, len(texts), shape).sentences(),
        tour.Taken(by_token.kept_by(numbers, tour.CAPKV, 48), shape).sentences(),
        tour.protection(numbers).sentences(),
        tour.needle(numbers, texts, 48).sentences(),
        tour.angle_sentences(numbers.head(tour.SNAPKV, 48, *tour.pair(numbers, budget=48).large)),
        tour.tau_curve(numbers, texts, 48).sentences(5.0),
        tour.correction(numbers, 48).sentences(),
        tour.price(shape, len(texts), True).sentences(),
    ]
    assert len(said) == len(tour.STEPS)
    for sentences in said:
        text = " ".join(sentences)
        assert 2 <= len(sentences) <= 4 and "!" not in text and "nan" not in text and "no value" not in text


def test_figures_are_valid(scene):
    import plotly.graph_objects as go

    numbers, texts, shape, _ = scene
    found = tour.tau_curve(numbers, texts, 48)
    for dark in (False, True):
        for figure in (
            figures.growth(tour.Growth(9, len(texts), shape), dark),
            figures.needle(tour.needle(numbers, texts, 48), dark),
            figures.protection(tour.protection(numbers), True, dark),
            figures.taus(found.capacity, found.attention, 5.0, dark),
            figures.correction(tour.correction(numbers, 48), True, dark),
            figures.price(tour.price(shape, len(texts), True), dark),
        ):
            go.Figure(figure.to_plotly_json())


def test_the_tours_experiment_is_a_link():
    made = tour.experiment(Experiment())
    link = {key: value if isinstance(value, list) else [value] for key, value in to_query(made).items()}
    assert from_query(link, Experiment())[0] == made


@pytest.mark.parametrize("step", STEPS)
def test_a_step_opens_by_a_link(model, step):  # noqa: F811
    from pathlib import Path

    from streamlit.testing.v1 import AppTest

    app = AppTest.from_file(str(Path(tour.__file__).parents[1] / "pages" / "tour.py"), default_timeout=120)
    for key, value in {"model": model, "device": "cpu", "preset": "story", "step": str(step)}.items():
        app.query_params[key] = value
    app = app.run()
    if any(button.key == "load" for button in app.button):
        app = press(app, "load")
    app = settled(app)
    assert f"{step}. {tour.STEPS[step - 1].title}" in page(app)
    assert app.button(key="tour_back").disabled == (step == 1) and app.button(key="tour_next").disabled == (step == 8)


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_tells_the_story():
    engine = kvviz.load()
    made = tour.experiment(Experiment())
    *_, last = made.generate.run(engine, lambda share, text: None)
    full, snapkv, keydiff = (row.text for row in last.run.rows)
    assert "60494" in full and "60494" in keydiff and "60494" not in snapkv
    state = engine.latest(made.prompt.prefill(engine))
    texts = by_token.pieces(state.ids, engine.tokenizer.decode)
    numbers = analysis.of(state)
    found = tour.needle(numbers, texts, tour.BUDGET)
    digits = list(found.digits)
    assert found.kept["SnapKV"][digits].max() == 0 and found.kept["KeyDiff"][digits].min() > 0.15
    assert found.held["SnapKV"] == 0 and found.held["KeyDiff"] > 0.5
    assert found.window < found.typical / 10 and found.strongest[0] > 0.1
    assert "none of the 90 heads keeps a digit" in found.sentences()[0]
    pair = tour.pair(numbers)
    large, small = (numbers.head(tour.SNAPKV, tour.BUDGET, *where) for where in (pair.large, pair.small))
    assert large.w_E < 0.13 and large.relative_error > 2 * small.relative_error
    assert re.search(r"97°|9\d°|1\d\d°", tour.angle_sentences(large)[1])
