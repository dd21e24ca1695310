"""The page Long generation: bounded entries, rasters that fit what is held, and policies that cannot take part."""

from __future__ import annotations

import numpy as np
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

import kvviz
import ui
from kvviz.engine import Finished
from kvviz.figures import long as figures
from tests.test_decode import QUESTION, state_of
from tests.test_ui import opened, page
from ui import long

STEPS, EVERY, BUDGET = 40, 8, 24


@pytest.fixture(scope="module")
def run(tiny_engine):
    engine = tiny_engine("llama")
    policies = [kvviz.policy("capkv"), kvviz.policy("momentkv"), kvviz.policy("sink")]
    events = engine.generate(
        state_of(engine), QUESTION, policies, BUDGET, max_new_tokens=STEPS, stop=False, evict_every=EVERY
    )
    return next(event.run for event in events if isinstance(event, Finished))


def test_figures_draw_what_the_run_holds(run):
    rows = run.rows
    lines = figures.memory(rows, STEPS).data
    full, capkv = lines[0], lines[2]
    assert full.name == "Full cache" and len(full.y) == STEPS
    assert (np.diff(full.y) == 1).all()
    assert max(capkv.y) <= BUDGET + EVERY + len(QUESTION) and capkv.y[-1] <= BUDGET + EVERY
    momentkv = next(line for line in lines if line.name == rows[2].label and line.showlegend is False)
    np.testing.assert_allclose(momentkv.y * 2**20, np.array(rows[2].bytes_by_step) + rows[2].moments_bytes, rtol=1e-4)
    for dark in (False, True):
        for figure in (figures.memory(rows, STEPS, dark), figures.divergence(rows, STEPS, dark)):
            assert figure.to_json()


def test_the_raster_adds_up_to_the_entries(run):
    prompt = run.config["prompt_tokens"]
    question = round(run.rows[0].entries_by_step[0]) - prompt
    assert question == len(QUESTION)
    figure = figures.raster(run.rows, prompt, question, STEPS)
    assert len(figure.data) == 3
    for row, map_ in zip(run.rows[1:], figure.data, strict=True):
        z = np.asarray(map_.z)
        total = prompt + question + STEPS
        assert z.shape == (min(300, total), len(row.raster_steps))
        held = np.nansum(z, axis=0) / 100 * total / z.shape[0]
        np.testing.assert_allclose(held, np.array(row.entries_by_step)[row.raster_steps], atol=1.5)
        assert np.isnan(z[-1, 0]) and np.isfinite(z[0]).all()


def test_figures_of_a_run_that_has_just_begun():
    rows = [kvviz.runs.Row("full", "Full cache", 9), kvviz.runs.Row("capkv", "CapKV", 9)]
    for figure in (figures.memory(rows, 9), figures.divergence(rows, 9), figures.raster(rows, 4, 0, 9)):
        assert figure.to_json()
    assert "none yet" in figures.divergence_alt(rows) and figures.memory_alt(rows)


def test_the_running_mean_is_geometric():
    values = np.array([1.0, 100.0, 1e-4, 1.0])
    np.testing.assert_allclose(figures.running_mean(values, 2), [1, 10, 0.1, 0.01], rtol=1e-5)


def test_facts_have_a_value_for_every_row(run):
    facts = figures.facts(run.rows)
    assert all(len(values) == 4 and unit for _, unit, values in facts)
    assert dict((name, values) for name, _, values in facts)["written"] == [str(STEPS)] * 4


def test_who_cannot_is_told_why():
    assert "cannot evict while decoding" in long.refusal(kvviz.policy("oracle"), 8)
    assert not any(long.refusal(kvviz.policy(name), 1) for name in ("capkv", "momentkv", "h2o", "snapkv"))


@pytest.fixture
def model(tiny_folder):
    """The host of the process, fresh, and a tiny model to ask it for."""
    st.cache_resource.clear()
    yield tiny_folder("llama")
    ui.host().close()
    st.cache_resource.clear()


def visit(model: str, **query) -> AppTest:
    app = opened(model, **query)
    app.switch_page("pages/long.py").run()
    assert not app.exception
    return app


def written(app: AppTest) -> AppTest:
    app.button(key="run").click().run()
    assert app.session_state["_task"].job.wait(120)
    app.run()
    assert not app.exception
    return app


def test_a_long_run(model):
    app = visit(model, length="20", every="4", policies=["capkv", "momentkv", "oracle"])
    assert "After every 4 tokens" in page(app) and "Oracle is left out" in page(app)
    assert "CapKV is cut back to 64 a head, always with 4 sinks" in page(app)
    assert "far past the budget" in page(app)
    app = written(app)
    request, run = app.session_state["_task"].job.request, app.session_state["_history"][-1].run
    assert (request.evict_every, request.max_new_tokens, request.stop) == (4, 20, False)
    assert [row.policy for row in run.rows] == ["full", "capkv", "momentkv"]
    assert all(len(row.token_ids) == 20 for row in run.rows)
    html = "".join(each.value for each in app.html)
    assert html.count("kv-tail") >= 3 and "kv-long" in html
    assert len(app.get("plotly_chart")) == 3


def test_compare_and_long_generation_keep_their_own_runs(model):
    app = written(visit(model, length="6", every="2"))
    app.switch_page("pages/compare.py").run()
    assert "Run this experiment to see what each policy writes" in page(app) and not app.exception


def test_the_papers_settings_and_the_model_s_end(model):
    app = visit(model)
    app.button_group(key="every_of").set_value(1).run()
    assert app.number_input(key="every").value == 1 and "After every token entries" in page(app)
    assert app.query_params["every"] == "1"
    most = app.number_input(key="length").max
    assert 0 < most < 1024
    app.number_input(key="every").set_value(512).run()
    assert "After every 512 tokens" in page(app) and not app.exception


def test_nobody_can(model):
    app = visit(model, policies=["oracle"])
    assert app.button(key="run").disabled and "Oracle is left out" in page(app)
