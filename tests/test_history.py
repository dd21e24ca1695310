"""Histories: runs stay at hand, one is pinned and compared, a file comes back checked, and nothing in it is executed."""

from __future__ import annotations

import json

import pytest

from kvviz import report
from tests.test_ui import go_back, model, opened, page, press, run_of  # noqa: F401
from ui import jobs

EVIL = "<img src=x onerror=alert(1)>[a](javascript:alert(1)) **b**"


def upload(app, content: str | bytes, name: str = "run.json"):
    data = content.encode() if isinstance(content, str) else content
    app.file_uploader(key="run_file").upload(name, data).run()
    assert not app.exception
    return app


def exported(app) -> str:
    record = app.session_state["_history"][-1]
    return report.to_json(record.run, record.experiment)


def changed(text: str, change) -> str:
    plain = json.loads(text)
    change(plain)
    return json.dumps(plain)


def test_the_list_names_runs_in_words(model):  # noqa: F811
    app = press(opened(model, policies=["sink", "keydiff"]), "run")
    (line,) = app.selectbox(key="show").options
    assert line.startswith("1: A text of your own, 64 entries a head, Sink, KeyDiff, ") and line[-3] == ":"
    assert app.selectbox(key="pin").options == ["none", line]


def test_a_pinned_run_is_compared_with_the_next(model):  # noqa: F811
    app = press(opened(model, policies=["sink", "keydiff"], budget="64"), "run")
    app.selectbox(key="pin").set_value(1).run()
    assert "kv-pinned" not in page(app)
    app = press(go_back(app, budget="32", policies=["sink", "knorm"]), "run")
    table = page(app).partition('data-testid="kv-pinned"')[2].partition("</table>")[0]
    first, second = (record.run for record in app.session_state["_history"])
    for label in ("Sink", "KeyDiff", "Knorm", "Full cache"):
        assert f">{label}</th>" in table
    assert "<td>64</td><td>32</td>" in table
    assert table.count("<tr>") == 2 + 4
    assert app.selectbox(key="pin_text").options == ["Full cache", "Sink"]
    assert first.rows[1].entries == 64 and second.rows[1].entries == 32
    app.selectbox(key="pin_text").set_value("Sink").run()
    assert "run 1</b>" in page(app) and "run 2</b>" in page(app)


def test_a_file_is_marked_and_stays_out_of_other_pages(model):  # noqa: F811
    app = press(opened(model), "run")
    other = upload(opened(model), exported(app), "mine *1*.json")
    record = other.session_state["_history"][-1]
    assert record.file == "mine *1*.json" and record.run.rows == run_of(app).rows
    captions = " ".join(caption.value for caption in other.caption)
    assert r"opened from the file mine \*1\*.json" in captions
    assert other.selectbox(key="show").options[0].endswith("mine *1*.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain["rows"][1].update(label=EVIL, text=EVIL, policy=EVIL, pieces=[EVIL], token_ids=[1], kl=[1.0], top=[]),
        lambda plain: plain["rows"][0].update(pieces=[EVIL], token_ids=[1]),
        lambda plain: plain["rows"][1].update(settings={EVIL: EVIL}, policy="capkv"),
        lambda plain: plain["config"].update(link={"preset": EVIL, EVIL: [EVIL], "policies": ["capkv:tau=__import__('os')"]}),
        lambda plain: plain["config"].update(link={}, model=EVIL, question=EVIL),
        lambda plain: plain["config"].pop("link"),
        lambda plain: [row.update(head_counts=[], seconds={}, top=[]) for row in plain["rows"]],
    ],
)  # fmt: skip
def test_what_a_file_says_is_shown_as_text(model, change):  # noqa: F811
    app = press(opened(model), "run")
    spoilt = json.loads(changed(exported(app), change))
    for row in spoilt["rows"]:
        shortest = min(len(each["pieces"]) for each in spoilt["rows"] if each["policy"] == "full")
        row.update(kl=row["kl"][:shortest], top=row.get("top", [])[:shortest], first_difference=None)
    other = upload(opened(model), json.dumps(spoilt))
    assert len(other.session_state["_history"]) == 1, other.error
    assert "<img src=x" not in "".join(element.value for element in other.html)
    other.selectbox(key="pin").set_value(1).run()
    other = press(other, "run")
    assert not other.exception


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain["rows"][1].update(pieces=["a"]),
        lambda plain: plain["rows"][1].update(kl=[1.0] * 500),
        lambda plain: plain["rows"][1].update(first_difference=500),
        lambda plain: plain["rows"][1].update(finish="<b>"),
        lambda plain: plain["rows"][1].update(head_counts=[[]]),
        lambda plain: plain["rows"][1].update(raster=[[0.1], [0.1, 0.2]], raster_steps=[1, 2]),
        lambda plain: plain["config"].update(link=[1]),
        lambda plain: plain["config"].update(evict_every="x"),
        lambda plain: plain["config"].update(extra={"a": {"b": 1}}),
        lambda plain: plain.update(version="1"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(model, change):  # noqa: F811
    app = press(opened(model), "run")
    text = changed(exported(app), change)
    with pytest.raises(report.ReportError):
        report.from_json(text)
    other = upload(opened(model), text)
    assert "_history" not in other.session_state and len(other.error) == 1
    assert not press(other, "run").exception


def test_the_last_ten_stay(model):  # noqa: F811
    app = press(opened(model, tokens="2"), "run")
    text = exported(app)
    for _ in range(jobs.HISTORY + 1):
        app = upload(app, text)
    numbers = [record.number for record in app.session_state["_history"]]
    assert len(numbers) == jobs.HISTORY == 10 and numbers[-1] == jobs.HISTORY + 2
