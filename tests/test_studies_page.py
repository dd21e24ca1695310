"""The page Studies without a browser, on a tiny model: a study runs, is kept, is refused where a setting is wrong."""

from __future__ import annotations

import pytest

from kvviz.studies import GROUPS, STUDIES
from tests.test_ui import model, opened, page  # noqa: F401

SETTINGS = {"tokens": "150", "new_tokens": "8", "samples": "1"}


@pytest.fixture
def studies(model):  # noqa: F811
    """The page, with the model loaded."""
    app = opened(model)
    app.switch_page("pages/studies.py").run()
    assert not app.exception
    return app


def run(app, name: str):
    """Run a study with small settings and wait for it."""
    for key, value in SETTINGS.items():
        if key in STUDIES[name].settings:
            app.text_input(key=f"{name}_{key}").set_value(value)
    app.run()
    app.button(key=f"run_{name}").click().run()
    assert app.session_state["_study"].job.wait(60)
    app.run()
    assert not app.exception
    return app


def test_every_group_shows_its_studies(studies):
    for group in GROUPS:
        studies.segmented_control(key="group").set_value(group).run()
        assert not studies.exception
        mine = [name for name, each in STUDIES.items() if each.group == group]
        assert [each.key for each in studies.button if (each.key or "").startswith("run_")] == [
            f"run_{n}" for n in mine
        ]
        assert all(STUDIES[name].paper in page(studies) for name in mine)


def test_a_study_runs_and_its_result_stays(studies):
    app = run(studies, "capacity_kept")
    result = app.session_state["_studies"]["capacity_kept"]
    assert STUDIES["capacity_kept"].finding(result) in page(app)
    assert len(app.get("plotly_chart")) == 3 and len(app.get("download_button")) == 2
    assert any(result.config["command"] == each.value for each in app.code)
    assert "--set tokens=150" in result.config["command"]
    app = run(app, "capacity_quality")
    assert set(app.session_state["_studies"]) == {"capacity_kept", "capacity_quality"}


@pytest.mark.parametrize("name", ["capacity_kept", "long_contexts"])
@pytest.mark.parametrize("spec", ["text:{}", "text:file={}", "longbench:{}", "niah_single_2 longbench:source={}"])
def test_no_file_of_the_server_can_be_named(studies, name, spec, tmp_path):
    (tmp_path / "secret.txt").write_text("A secret of the server. " * 300)
    study = STUDIES[name]
    studies.segmented_control(key="group").set_value(study.group).run()
    key = "task" if "task" in study.settings else "tasks"
    studies.text_input(key=f"{name}_{key}").set_value(spec.format(tmp_path / "secret.txt")).run()
    assert studies.button(key=f"run_{name}").disabled and studies.error and not studies.exception
    studies.text_input(key=f"{name}_{key}").set_value("text").run()
    assert not studies.button(key=f"run_{name}").disabled and not studies.error


def test_a_study_runs_on_the_prompt_of_the_sidebar(studies):
    studies.segmented_control(key="measured_on").set_value("this prompt").run()
    app = run(studies, "capacity_kept")
    assert app.session_state["_studies"]["capacity_kept"].config["context_sha256"]


def test_a_wrong_setting_says_what_it_takes(studies):
    studies.text_input(key="capacity_kept_tokens").set_value("many").run()
    assert "takes a whole number" in page(studies)
    assert studies.button(key="run_capacity_kept").disabled


def test_a_study_that_cannot_run_says_why(studies):
    app = studies
    app.text_input(key="capacity_kept_policies").set_value("nonsense").run()
    app.button(key="run_capacity_kept").click().run()
    assert app.session_state["_study"].job.wait(60)
    app.run()
    assert "There is no method" in page(app)
