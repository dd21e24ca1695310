"""The dashboard without a browser, on a tiny model: what the sidebar says, runs, links, and every kind of bad input."""

from __future__ import annotations

import importlib
import re
import threading
import time
from html import unescape
from pathlib import Path

import pytest
import streamlit as st
from streamlit.proto.WidgetStates_pb2 import WidgetStates
from streamlit.testing.v1 import AppTest

import ui
from kvviz import host as host_module
from kvviz.experiment import OWN
from kvviz.host import DONE, QUEUED
from ui import jobs

ui_host = importlib.import_module("ui.host")

APP = str(Path(__file__).parents[1] / "app.py")
TEXT = "The cat sat on the mat & said <b>nothing</b>. Then it left the house for good. " * 4


@pytest.fixture
def model(tiny_folder):
    """The host of the process, fresh, and a tiny model to ask it for."""
    st.cache_resource.clear()
    yield tiny_folder("llama")
    ui.host().close()
    st.cache_resource.clear()


def opened(model: str, text: str = TEXT, **query: str | list[str]) -> AppTest:
    """A session whose prompt is `text`, with the model loaded."""
    app = AppTest.from_file(APP, default_timeout=120)
    app.session_state["_own"] = text
    usual = {
        "model": model,
        "device": "cpu",
        "preset": OWN,
        "question": "What did it do?",
        "budget": "64",
        "tokens": "8",
    }
    for key, value in {**usual, **query}.items():
        app.query_params[key] = value
    app.run()
    return press(app, "load") if any(button.key == "load" for button in app.button) else settled(app)


def settled(app: AppTest) -> AppTest:
    """Wait for the session's jobs, and draw what they left."""
    for slot in ("_load", "_task"):
        if slot in app.session_state:
            assert app.session_state[slot].job.wait(60)
    app.run()
    assert not app.exception
    return app


def press(app: AppTest, key: str) -> AppTest:
    app.button(key=key).click().run()
    return settled(app)


def go_back(app: AppTest, **query: str | list[str]) -> AppTest:
    """What the browser's Back and Forward do: the address changes, and says so."""
    for key, value in query.items():
        app.query_params[key] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ui.state.went_back", lambda: True)
        return app.run()


def page(app: AppTest) -> str:
    """Everything that is written on it, the sidebar included."""
    kinds = (app.html, app.markdown, app.caption, app.warning, app.error, app.info)
    return unescape("\n".join(str(element.value) for kind in kinds for element in kind)).replace("\\", "")


def cards(app: AppTest) -> str:
    return next(element.value for element in app.html if "kv-cards" in element.value)


def run_of(app: AppTest):
    return app.session_state["_history"][-1].run


def test_a_load_that_began_with_the_server_is_followed_by_everybody(model, monkeypatch):
    """Two sessions watch the one load; the first to want another model does not stop it for the second."""
    monkeypatch.setenv("KVVIZ_MODELS", model)
    go, load = threading.Event(), host_module.load_model
    monkeypatch.setattr(host_module, "load_model", lambda *args, **more: go.wait(60) and load(*args, **more))
    job = ui_host.preload()
    while job.status == QUEUED:
        time.sleep(0.01)
    sessions = [AppTest.from_file(APP, default_timeout=120).run() for _ in range(2)]
    assert all(app.session_state["_load"].job is job for app in sessions)
    go_back(sessions[0], model="somebody/else").button(key="load").click().run()
    assert sessions[0].session_state["_load"].job is not job and job.active
    go.set()
    assert job.wait(60) and job.status == DONE
    assert sessions[0].session_state["_load"].job.wait(60)
    monkeypatch.setenv("KVVIZ_MODELS", "a name that is none,another")
    assert ui_host.preload().wait(60)  # refused by the worker, with a message, and nothing raised here
    monkeypatch.setenv("KVVIZ_MODELS", "/no/such/*.gguf")
    assert ui_host.preload() is None


def test_the_first_visit_loads_the_model(model):
    app = opened(model)
    assert "cpu, fp32" in page(app) and "1,024 positions" in page(app)
    assert "Run this experiment" in page(app)
    assert not app.error and not app.warning


def test_a_run_shows_cards_and_what_it_cost(model):
    app = press(opened(model), "run")
    run = run_of(app)
    assert [row.policy for row in run.rows] == ["full", "capkv", "momentkv"]
    assert cards(app).count("<article") == 3
    for words in ("64 entries a head", "mean KL", "tokens/s"):
        assert words in cards(app)
    assert ("kv-first" in cards(app)) == any(row.first_difference is not None for row in run.rows)
    assert "What was kept, what it cost" in [each.value for each in app.subheader]
    assert any("kv-costs" in element.value for element in app.html)
    assert not app.error and not app.warning


def test_the_page_says_what_the_library_says(model):
    import kvviz
    from kvviz.events import Finished

    app = press(opened(model), "run")
    experiment = app.session_state["_history"][-1].experiment
    engine = kvviz.load(model, device="cpu")
    events = experiment.generate.run(engine, lambda share, text: None)
    here = next(event.run for event in events if isinstance(event, Finished))
    assert [row.token_ids for row in here.rows] == [row.token_ids for row in run_of(app).rows]
    assert here.rows[1].kl == pytest.approx(run_of(app).rows[1].kl, abs=1e-4)


def test_output_is_never_html(model):
    from kvviz.runs import Row
    from ui.cards import cards as draw

    evil = "<script>alert(1)</script>"
    rows = [
        Row("full", "Full cache", 1, pieces=[evil], token_ids=[1]),
        Row("capkv", evil, 1, pieces=[evil, evil], token_ids=[2, 3]),
    ]
    assert "<script" not in draw(rows) and "&lt;script" in draw(rows)


def test_a_link_opens_the_same_view(model):
    app = opened(
        model, policies=["sink", "capkv:tau=2", "capkv:variant=paper"], protect="2,8", temperature="0.5", layer="1"
    )
    app.text_area(key="question").set_value("And then?").run()
    link = {key: app.query_params[key] for key in app.query_params}
    assert link["question"] == "And then?" and link["protect"] == "2,8"
    other = AppTest.from_file(APP, default_timeout=120)
    other.session_state["_own"] = TEXT
    for key, value in link.items():
        other.query_params[key] = value
    settled(other.run())
    ours, theirs = press(app, "run"), press(other, "run")
    assert ours.session_state["_history"][-1].experiment == theirs.session_state["_history"][-1].experiment
    assert [row.token_ids for row in run_of(ours).rows] == [row.token_ids for row in run_of(theirs).rows]


def test_nonsense_in_a_link_is_noted_and_ignored(model):
    app = opened(model, budget="-3", policies="capkv:tau=-1", tokens="many", layer="x", seen="2")
    assert len(app.warning) == 1
    for key in ("budget=-3", "policies=capkv:tau=-1", "tokens=many", "layer=x", "seen=2"):
        assert key in page(app)
    app.text_area(key="question").set_value("Else?").run()
    assert not app.warning


def controls(app: AppTest) -> dict:
    """Key -> control, of all kinds that hold a value."""
    kinds = (
        "number_input",
        "select_slider",
        "selectbox",
        "slider",
        "text_area",
        "text_input",
        "toggle",
        "segmented_control",
        "pills",
    )
    return {each.key: each for kind in kinds for each in app.get(kind) if each.key}


PAGES = sorted(path.name for path in (Path(APP).parent / "pages").glob("*.py"))
MOVES = {"budget": "32", "layer": 1, "head": 1, "policy": 1, "measure": "w_E", "minus": 1, "capkv:tau": 4.5, "seed": 7}
MOVES |= {"snapkv:alpha": 0.3, "every": 3, "step": 2, "token": 5, "partition": 0.5, "temperature": 0.5}


@pytest.mark.parametrize("name", PAGES)
def test_no_control_is_told_what_it_said(model, name):
    """Between a person's move and the answer there may be another move: the answer must not undo it."""
    app = opened(model, policies=["capkv", "momentkv", "snapkv:allocation=adaptive"])
    app.switch_page(f"pages/{name}").run()
    if any(button.key == "read" for button in app.button):
        press(app, "read")
    for slot in app.session_state["chosen"]:
        app.session_state[f"options_{slot}"] = True
    settled(app)
    settled(app)
    told = lambda: [key for key, each in controls(app).items() if each.proto.set_value]  # noqa: E731
    assert told() == []
    for key, value in MOVES.items():
        if key in controls(app):
            controls(app)[key].set_value(value)
            settled(app)
            assert controls(app)[key].value == value and key not in told()


@pytest.mark.parametrize("name", PAGES)
def test_a_new_control_has_its_value_from_the_start(model, name):
    """Told a moment later, the browser would send the control's default with a move that comes in between."""
    app = opened(model, policies=["capkv", "momentkv", "snapkv:allocation=adaptive"])
    app.switch_page(f"pages/{name}").run()
    if any(button.key == "read" for button in app.button):
        app.button(key="read").click().run()
        settled(app)
    for slot in app.session_state["chosen"]:
        app.session_state[f"options_{slot}"] = True
    app.run()  # the options are new
    new = [each for key, each in controls(app).items() if key in app.session_state["_turns"]]
    assert len(new) > 12 and [each.key for each in new if each.proto.set_value] == []


def test_a_late_address_undoes_nothing(model):
    """The browser sends its address with every move: with a quick one, that of before the last answer."""
    app = opened(model)
    address = {key: app.query_params[key] for key in app.query_params}
    app.session_state["options_capkv"] = True
    app.run()
    for tau in (4.5, 4.0, 3.5):
        app.slider(key="capkv:tau").set_value(tau)
        for key in list(app.query_params):
            del app.query_params[key]
        for key, value in address.items():
            app.query_params[key] = value
        app.run()
        assert app.slider(key="capkv:tau").value == tau
        assert app.query_params["policies"] == [f"capkv:tau={tau:g}", "momentkv"]
    app.slider(key="capkv:tau").set_value(5.0)
    for key, value in address.items():
        app.query_params[key] = value
    app.run()
    assert "policies" not in app.query_params
    go_back(app, budget="32", policies="sink")
    assert app.session_state["chosen"] == ["sink"] and shown(app, "budget").value == "32"


def shown(app: AppTest, name: str):
    """A control by its name, however often something else has moved it (ui.controls)."""
    (found,) = [each for key, each in controls(app).items() if re.fullmatch(rf"{name}(_\d+)?", key)]
    return found


def quickly(app: AppTest, *moves) -> AppTest:
    """Moves, each made before the browser has the answer to the one before: what it says of all else is old."""
    said = {each.id: each for each in app._tree.get_widget_states().widgets}
    for move in moves:
        control = move()
        now = said | {control.id: control._widget_state}
        app._run(WidgetStates(widgets=now.values()))
        said = now if control.type != "button" else said
        assert not app.exception
    return app


def at(model, name: str, **query) -> AppTest:
    """A page with the prompt read and the options of CapKV open."""
    app = opened(model, **query)
    app.switch_page(f"pages/{name}.py").run()
    if any(button.key == "read" for button in app.button):
        press(app, "read")
    app.session_state["options_capkv"] = True
    return settled(app)


@pytest.mark.parametrize("name", ["compare", "values", "tokens"])
def test_quick_moves_of_the_budget(model, name):
    app = at(model, name)  # from 64, which is also a stop
    quickly(app, *(lambda to=to: shown(app, "budget").set_value(to) for to in ("54", "45", "38")))
    assert shown(app, "budget").value == "38" and shown(app, "stop").value is None
    quickly(app, *(lambda to=to: shown(app, "stop").set_value(to) for to in (128, 256, 64)))
    assert shown(app, "budget").value == "64" and shown(app, "stop").value == 64 and "64 entries" in page(app)
    quickly(
        app, lambda: shown(app, "unit").set_value("share removed"), lambda: app.slider(key="capkv:tau").set_value(1.0)
    )
    assert shown(app, "budget").value.endswith("%") and app.slider(key="capkv:tau").value == 1


def test_quick_steps(model):
    app = at(model, "values", layer="0", head="0")
    layers, heads = len(shown(app, "layer").options), len(shown(app, "head").options)
    for key, name, count in (("step_down", "layer", layers), ("step_right", "head", heads)):
        quickly(app, *[lambda key=key: app.button(key=key).click()] * 2)
        assert shown(app, name).value == 2 % count
    app = at(model, "tokens", token="20")
    quickly(app, *[lambda: app.button(key="token_right").click()] * 3)
    assert shown(app, "token").value == 23 and app.query_params["token"] == "23"
    app = at(model, "tour")
    quickly(app, *[lambda: app.button(key="tour_next").click()] * 2)
    assert shown(app, "step").value == 3 and app.query_params["step"] == "3"


@pytest.mark.parametrize("name", ["values", "heads", "tokens"])
def test_a_list_may_send_the_old_name_of_a_choice(model, name):
    """An option has changed, and with it a policy's name; the browser has not heard of that when it sends its next move."""
    app = at(model, name, policies=["sink", "capkv", "keydiff"], policy="1")
    if name != "values":
        shown(app, "minus").set_value(2).run()
    quickly(app, *(lambda to=to: app.slider(key="capkv:tau").set_value(to) for to in (4.5, 4.0)))
    assert app.slider(key="capkv:tau").value == 4 and shown(app, "policy").value == 1
    assert "CapKV (tau 4)" in shown(app, "policy").options
    assert name == "values" or shown(app, "minus").value == 2


def test_units(model):
    app = opened(model)
    n = len(ui.host().engine.encode([{"role": "user", "content": TEXT}])[0])
    assert f"64 entries a head = {100 * (1 - 64 / n):.2g}% removed" in page(app)
    app.segmented_control(key="unit").set_value("share removed").run()
    assert app.query_params["budget"].endswith("%")
    app.segmented_control(key="unit").set_value("MiB").run()
    assert app.query_params["budget"].endswith("MiB")
    run = run_of(press(app, "run"))
    capkv, momentkv = run.rows[1:]
    assert momentkv.entries < capkv.entries <= 66
    assert abs(momentkv.bytes - capkv.bytes) < 0.05 * capkv.bytes


def test_budget_above_the_prompt(model):
    app = opened(model, budget="5000")
    assert "nothing is evicted" in page(app)
    rows = run_of(press(app, "run")).rows
    assert all(row.token_ids == rows[0].token_ids for row in rows)
    assert "same tokens" in cards(app)


def test_options_follow_the_scorers(model):
    app = opened(model)
    app.session_state["options_capkv"] = True
    app.run()
    app.slider(key="capkv:tau").set_value(1.5).run()
    assert app.query_params["policies"] == ["capkv:tau=1.5", "momentkv"]
    app.button(key="capkv:tau:undo").click().run()
    assert "policies" not in app.query_params
    app.button(key="capkv:twice").click().run()
    app.session_state["options_capkv-2"] = True
    app.run()
    app.selectbox(key="capkv-2:variant").set_value("paper").run()
    assert app.query_params["policies"] == ["capkv", "capkv:variant=paper", "momentkv"]
    assert not app.exception


@pytest.mark.parametrize("text", ["", "   \n"])
def test_an_empty_prompt(model, text):
    app = opened(model, text)
    assert "The prompt is empty" in page(app)
    assert app.button(key="run").disabled


def test_an_empty_question(model):
    app = opened(model, question="")
    assert "The question is empty" in page(app)
    assert app.button(key="run").disabled


def test_a_prompt_that_is_too_long(model):
    app = opened(model, "word " * 400)
    assert "at most 1,016 fit" in page(app) and "2,0" in page(app)
    assert app.button(key="run").disabled


def test_an_unknown_model_leaves_others_alone(model):
    app = opened(model)
    lost = opened("/nowhere/at/all")
    assert "there is no folder /nowhere/at/all" in page(lost)
    lost = press(lost, "run")
    assert "there is no folder" in page(lost)
    assert len(run_of(press(app, "run")).rows) == 3


def test_the_worker_raises(model, monkeypatch):
    app = opened(model)
    with monkeypatch.context() as patch:
        patch.setattr(ui.host().engine, "generate", lambda *args, **kwargs: 1 / 0)
        app = press(app, "run")
    assert "The worker met an error" in page(app) and "ZeroDivisionError" in page(app)
    app = press(app, "run")
    assert not app.error and len(run_of(app).rows) == 3


def test_out_of_memory_gives_advice(model, monkeypatch):
    app = opened(model)

    def full(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("kvviz.generate.evict", full)
        app = press(app, "run")
    assert "Use a shorter prompt" in page(app)
    assert len(run_of(press(app, "run")).rows) == 3


@pytest.mark.parametrize("stage", ["reading", "writing"])
def test_cancel(model, monkeypatch, stage):
    app = opened(model, tokens="256")
    slow_down(monkeypatch, stage)
    app.button(key="run").click().run()
    job = app.session_state["_task"].job
    until(lambda: "layer" in job.doing.text if stage == "reading" else "Writing token" in job.doing.text)
    app.run()
    assert app.button(key="run").disabled
    app.button(key="cancel").click().run()
    settled(app)
    assert job.status == "cancelled" and "Cancelled" in page(app)
    assert not app.button(key="run").disabled
    if stage == "writing":
        assert "kv-cards" in page(app)


def slow_down(monkeypatch, stage: str) -> None:
    """Give a tiny model the pace of a large one."""
    import kvviz.engine as engine
    import kvviz.generate as generate

    plain_prefill, plain_decode = engine.prefill, generate.decode

    def prefill(*args, progress=None, **kwargs):
        def slowly(share, text):
            time.sleep(0.3)
            progress(share, text)

        return plain_prefill(*args, progress=slowly if stage == "reading" else progress, **kwargs)

    def decode(*args, **kwargs):
        for step in plain_decode(*args, **kwargs):
            time.sleep(0.05 if stage == "writing" else 0)
            yield step

    monkeypatch.setattr(engine, "prefill", prefill)
    monkeypatch.setattr(generate, "decode", decode)


def until(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_closed_tab_frees_its_job(model, monkeypatch):
    app = opened(model, tokens="256")
    slow_down(monkeypatch, "writing")
    app.button(key="run").click().run()
    job = app.session_state["_task"].job
    until(lambda: "Writing token" in job.doing.text)
    job.alive = lambda: False
    assert job.wait(10) and job.status == "cancelled"
    assert ui.host().queue_length == 0


def test_two_sessions_keep_to_themselves(model):
    one, two = opened(model, policies="sink", budget="32"), opened(model, policies=["keydiff", "snapkv"], budget="96")
    one.button(key="run").click().run()
    two.button(key="run").click().run()
    one, two = settled(one), settled(two)
    assert [row.policy for row in run_of(one).rows] == ["full", "sink"]
    assert [row.policy for row in run_of(two).rows] == ["full", "keydiff", "snapkv"]
    assert {row.entries for row in run_of(one).rows[1:]} == {32} and {row.entries for row in run_of(two).rows[1:]} == {
        96
    }


def test_settings_that_changed_since_the_run_are_named(model):
    app = press(opened(model), "run")
    assert "has changed since" not in page(app)
    app.text_area(key="question").set_value("Else?").run()
    assert "has changed since" in page(app)
    assert cards(app).count("<article") == 3


def test_histories_are_bounded(model):
    app = opened(model, tokens="8")
    for _ in range(jobs.HISTORY + 2):
        app = press(app, "run")
    assert len(app.session_state["_history"]) == jobs.HISTORY
    assert app.session_state["_history"][-1].number == jobs.HISTORY + 2


def test_earlier_runs_stay_at_hand(model):
    app = press(opened(model), "run")
    app.text_area(key="question").set_value("Else?").run()
    press(app, "run")
    shown(app, "show").set_value(1).run()
    shown(app, "pin").set_value(2).run()
    assert "run 1</th>" in page(app) and "run 2</th>" in page(app)  # side by side, policy by policy
    app.button(key="take").click().run()
    assert app.session_state["question"] == "What did it do?"
    for _ in range(jobs.HISTORY):
        press(app, "run")
    assert app.session_state["_history"][0].number == 2
    assert "run 2</th>" in page(app)


def test_a_run_file_comes_back(model):
    from kvviz import report

    app = press(opened(model), "run")
    record = app.session_state["_history"][-1]
    other = opened(model)
    other.file_uploader(key="run_file").upload("run.json", report.to_json(record.run, record.experiment).encode()).run()
    assert run_of(other).rows == record.run.rows
    assert cards(other) == cards(app)
    other.file_uploader(key="run_file").upload("evil.json", b'{"version": 1, "rows": [{"policy": "<script>"}]}').run()
    assert "no configuration" in page(other) and not other.exception


def test_the_model_is_loaded_once(model, monkeypatch):
    loads = []
    import kvviz.host as module

    plain = module.load_model
    monkeypatch.setattr(module, "load_model", lambda *args, **kwargs: loads.append(args) or plain(*args, **kwargs))
    app = opened(model)
    for _ in range(3):
        app.run()
    press(app, "run")
    opened(model)
    assert len(loads) == 1
