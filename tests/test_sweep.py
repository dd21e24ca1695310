"""Sweeps: the same rows as single runs, saved as they come, kept when cancelled, resumed where they stopped."""

import argparse
import json
import time

import pytest
import torch

import kvviz
from kvviz import tasks
from kvviz.__main__ import main
from kvviz.commands import sweep as command
from kvviz.events import Doing, Finished
from kvviz.exceptions import OutOfMemory
from kvviz.host import Host, ModelSpec
from kvviz.metrics import token_loss
from kvviz.sweep import Result, Scored, Sweep, SweepError, Sweeping, SweepRow, load
from kvviz.sweep import batches as batching
from kvviz.sweep.pace import Pace, in_words
from tests.reference import masked_logits, run

NEEDLE, QA, TEXT = tasks.task("niah_single_2"), tasks.task("qa_1"), tasks.task("text", words=12)
POLICIES = tuple(kvviz.policy(name) for name in ("sink", "capkv", "momentkv"))


@pytest.fixture
def spec(tiny_folder):
    return ModelSpec(tiny_folder(), device="cpu")


def request(spec, **changes) -> Sweep:
    """A small sweep."""
    small = {
        "tasks": (NEEDLE,),
        "lengths": (700,),
        "policies": POLICIES,
        "budgets": (24, 60),
        "max_new_tokens": 6,
        "compare": True,
    }
    return Sweep(spec, **(small | changes))


def silent(share, text):
    pass


def results(sweep, engine) -> Result:
    """Of a sweep that is run to its end."""
    *_, last = sweep.run(engine, silent)
    assert isinstance(last, Finished)
    return last.run


def same(rows, others) -> bool:
    """Whether two sweeps gave the same rows, in any order, but for how long they took."""
    by_key = lambda row: row.key  # noqa: E731
    return list(map(_lasting, sorted(rows, key=by_key))) == [
        {k: pytest.approx(v, abs=1e-5) if k in ("kl", "mean_kl", "loss") else v for k, v in _lasting(row).items()}
        for row in sorted(others, key=by_key)
    ]


def _lasting(row) -> dict:
    data = json.loads(row.to_json())
    return {k: v for k, v in data.items() if not k.endswith("_seconds") and k != "batch_rows"}


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_equal_single_runs(tiny_engine, tiny_folder, family, seen):
    engine = tiny_engine(family)
    sweep = request(ModelSpec(tiny_folder(family), device="cpu"), tasks=(NEEDLE, QA), scenarios=(seen,))
    rows = results(sweep, engine).rows
    assert len(rows) == sweep.n_rows == 2 * (1 + 3 * 2)
    for row in rows:
        task = tasks.parse(row.task)
        example = task.make(row.seed, row.length, engine.tokenizer)
        state = example.prompt(seen).prefill(engine)
        policies = [] if row.policy == "full" else [kvviz.policies.spec.parse(row.spec)]
        answer = "" if seen else example.answer_prefix
        question = "" if seen else example.question
        single = run(engine, state, question, policies, row.budget, answer=answer, max_new_tokens=6).rows[-1]
        assert (list(row.token_ids), row.text, row.finish) == (single.token_ids, single.text, single.finish)
        assert row.kl == pytest.approx(single.kl, abs=1e-5) and row.first_difference == single.first_difference
        assert (row.entries, row.bytes, row.moments_bytes) == (single.entries, single.bytes, single.moments_bytes)
        assert row.score == example.score(single.text) and row.metric == task.metric
        assert row.prompt_tokens == state.n_tokens and row.seen is seen
        assert row.share_removed == pytest.approx(1 - row.entries / state.n_tokens)


def test_agreement_is_measured_along_the_full_caches_output(engine, spec):
    for row in results(request(spec, policies=(*POLICIES, kvviz.policy("random")), budgets=(8,)), engine).rows:
        example = NEEDLE.make(row.seed, row.length, engine.tokenizer)
        state = example.prompt().prefill(engine)
        follow = kvviz.prompts.encode_question(engine.tokenizer, example.question, state.tail, example.answer_prefix)
        full = run(engine, state, example.question, [], 8, answer=example.answer_prefix, max_new_tokens=6).reference
        chosen = kvviz.policies.spec.parse(row.spec)
        ids = [*state.ids, *follow, *full.token_ids]
        kept = engine.evict(state, chosen, row.budget)
        if chosen.correction is None:
            logits = masked_logits(engine.model, ids, kept)[-len(full.token_ids) - 1 : -1]
            same = (logits.argmax(-1) == torch.tensor(full.token_ids)).float().mean()
            assert row.agreement == pytest.approx(same.item())
        assert row.along == "output" and (row.agreement == 1 or row.policy != "full")


def test_the_full_cache_is_written_once_a_prompt_however_small_the_batches(engine, spec, monkeypatch):
    together = results(request(spec), engine)
    assert {row.batch_rows for row in together.rows} == {7}
    written = []
    real = kvviz.generate.decode
    monkeypatch.setattr(
        kvviz.generate,
        "decode",
        lambda model, cache, *a, **k: written.append(cache.layers[0].n_rows) or real(model, cache, *a, **k),
    )
    monkeypatch.setattr(batching, "MAX_ROWS", 3)
    apart = results(request(spec), engine)
    assert written == [3, 3, 1] and same(apart.rows, together.rows)


def test_batches_fit_into_memory(engine):
    state = NEEDLE.make(0, 700, engine.tokenizer).prompt().prefill(engine)
    need = [batching.row_bytes(engine, state, n, 50) for n in (20, 40, 700)]
    assert need == sorted(need) and need[2] > 2 * state.bytes
    assert batching.split(engine, state, [20] * 5, 50, limit=2 * need[0]) == [2, 2, 1]
    assert batching.split(engine, state, [700, 20], 50, limit=1) == [1, 1]
    assert batching.split(engine, state, [20] * 130, 50) == [64, 64, 2]


def test_a_full_memory_makes_batches_smaller(engine, spec, monkeypatch):
    whole = results(request(spec), engine)
    real, sizes = type(engine).generate, []

    def generate(self, state, question, policies, *a, **k):
        sizes.append(len(policies))
        if len(policies) > 2:
            raise OutOfMemory("full")
        return real(self, state, question, policies, *a, **k)

    monkeypatch.setattr(type(engine), "generate", generate)
    assert same(results(request(spec), engine).rows, whole.rows)
    assert sizes == [6, 2, 4, 2, 2]
    monkeypatch.setattr(type(engine), "generate", lambda *a, **k: (_ for _ in ()).throw(OutOfMemory("no room")))
    with pytest.raises(OutOfMemory, match="no room"):
        results(request(spec), engine)


def test_without_comparison_there_is_one_reading_less(engine, spec, monkeypatch):
    monkeypatch.setattr(kvviz.generate, "teacher_force", None)
    rows = results(request(spec, compare=False), engine).rows
    assert all(row.kl == () and row.mean_kl is None and row.agreement is None and row.along == "" for row in rows)
    assert rows[0].first_difference is None and any(row.first_difference is not None for row in rows)


def test_the_loss_on_the_text_itself(engine, spec):
    names = ("sink", "keydiff", "h2o", "oracle", "random")
    policies = tuple(kvviz.policy(name) for name in names)
    rows = results(
        request(spec, tasks=(TEXT,), lengths=(400,), policies=policies, scenarios=(False, True)), engine
    ).rows
    assert len(rows) == 1 + 5 * 2
    example = TEXT.make(0, 400, engine.tokenizer)
    state = example.prompt().prefill(engine, attention_mass=True)
    follow = engine.tokenizer(example.continuation)["input_ids"]
    full = masked_logits(engine.model, [*state.ids, *follow])[len(state.ids) - 1 : -1]
    for row in rows:
        logits = full
        if row.policy not in ("full", "oracle"):
            kept = engine.evict(state, kvviz.policies.spec.parse(row.spec), row.budget)
            logits = masked_logits(engine.model, [*state.ids, *follow], kept)[len(state.ids) - 1 : -1]
            logits[0] = full[0]  # the first word is foretold by the prompt's last token, before anything is evicted
        if row.policy != "oracle":
            assert row.loss == pytest.approx(token_loss(logits, torch.tensor(follow)).mean().item(), abs=1e-4)
            same = (logits.argmax(-1) == full.argmax(-1)).tolist()
            assert row.agreement == pytest.approx(sum(same) / len(same))
            assert row.first_difference == (same.index(False) if False in same else None)
        assert len(row.kl) == len(follow) and (row.metric, row.along, row.score) == ("loss", "text", None)
        assert row.text == "" and row.token_ids == ()


def test_text_can_be_continued_instead(engine, spec):
    task = tasks.task("text", follow="output")
    rows = results(request(spec, tasks=(task,), lengths=(400,)), engine).rows
    assert all(len(row.token_ids) == 6 and row.loss is None and row.along == "output" for row in rows)


def test_shares_scenarios_and_taus(engine, spec):
    sweep = request(
        spec,
        policies=(kvviz.policy("full"), *POLICIES),
        budgets=(),
        shares_removed=(0.5, 0.75),
        taus=(0.0, 2.0),
        scenarios=(False, True),
        compare=False,
    )
    rows = results(sweep, engine).rows
    assert len(rows) == sweep.n_rows == 2 * (1 + (1 + 2 + 1) * 2)
    assert {(row.policy, row.tau) for row in rows} >= {
        ("capkv", 0.0),
        ("capkv", 2.0),
        ("sink", None),
        ("momentkv", None),
    }
    for row in rows:
        if row.policy != "full":
            share = {"50% removed": 0.5, "75% removed": 0.75}[row.asked]
            assert row.budget == int(row.prompt_tokens * (1 - share)) == row.entries
    assert {row.prompt_tokens for row in rows if row.seen} != {row.prompt_tokens for row in rows if not row.seen}


def test_evicting_while_writing(engine, spec):
    policies = (kvviz.policy("sink"), kvviz.policy("capkv"))
    for compare in (False, True):
        sweep = request(spec, policies=policies, evict_every=2, compare=compare, max_new_tokens=8)
        for row in results(sweep, engine).rows:
            example = NEEDLE.make(0, 700, engine.tokenizer)
            state = example.prompt().prefill(engine)
            chosen = [] if row.policy == "full" else [kvviz.policies.spec.parse(row.spec)]
            more = {"answer": example.answer_prefix, "max_new_tokens": 8, "evict_every": 2}
            single = run(engine, state, example.question, chosen, row.budget, **more).rows[-1]
            assert list(row.token_ids) == single.token_ids
            assert row.kl == pytest.approx(single.kl, abs=1e-5) if compare else row.kl == ()
    with pytest.raises(ValueError, match="cannot evict while decoding"):
        request(spec, policies=(kvviz.policy("oracle"),), evict_every=2)


def test_policies_that_need_more_of_a_prompt(engine, spec, monkeypatch):
    monkeypatch.setattr(batching, "MAX_ROWS", 2)
    policies = tuple(kvviz.policy(name) for name in ("h2o", "oracle", "observed_attention"))
    rows = results(request(spec, policies=policies, compare=False), engine).rows
    assert [row.policy for row in rows] == ["full", *("h2o",) * 2, *("oracle",) * 2, *("observed_attention",) * 2]


def test_a_prompt_is_read_once(engine, spec, monkeypatch):
    reads = []
    real = kvviz.engine.prefill
    monkeypatch.setattr(kvviz.engine, "prefill", lambda *a, **k: reads.append(a) or real(*a, **k))
    results(request(spec, seeds=(11, 12), lengths=(600, 700)), engine)
    assert len(reads) == 4


def test_rows_are_saved_as_they_come(engine, spec, tmp_path):
    folder = tmp_path / "out"
    sweep = request(spec, seeds=(0, 1), folder=str(folder))
    seen = 0
    for event in sweep.run(engine, silent):
        if isinstance(event, Scored):
            seen += 1
            assert event.row in load(folder).rows
    result = load(folder)
    assert len(result.rows) == seen == sweep.n_rows and result.config["rows"] == seen
    frame = result.frame()
    assert len(frame) == seen and set(frame.policy) == {"full", "sink", "capkv", "momentkv"}
    assert frame.kl.map(len).eq(6).all() and frame.score.notna().all()
    for line in (folder / "rows.jsonl").read_text().splitlines():
        assert json.loads(line)["version"] == 1
    assert result.config["model"] == spec.name and "--budget=24,60" in result.config["command"]


def test_a_sweep_resumes_where_it_stopped(engine, spec, tmp_path, monkeypatch):
    folder = str(tmp_path / "out")
    whole = results(request(spec, seeds=(0, 1)), engine)
    results(request(spec, seeds=(0,), budgets=(24,), folder=folder), engine)
    reads = []
    real = type(engine).prefill
    monkeypatch.setattr(type(engine), "prefill", lambda self, *a, **k: reads.append(a) or real(self, *a, **k))
    result = results(request(spec, seeds=(0, 1), folder=folder, resume=True), engine)
    assert len(reads) == 2 and load(folder) == result
    assert same(result.rows, whole.rows)
    again = results(request(spec, seeds=(0, 1), folder=folder, resume=True), engine)
    assert len(reads) == 2 and again.rows == result.rows


def test_a_half_written_line_runs_again(engine, spec, tmp_path):
    folder = tmp_path / "out"
    whole = results(request(spec, folder=str(folder)), engine)
    file = folder / "rows.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    assert len(load(folder).rows) == 6
    result = results(request(spec, folder=str(folder), resume=True), engine)
    assert same(result.rows, whole.rows) and load(folder).rows == result.rows


def test_faults_of_folders(engine, spec, tmp_path):
    folder = tmp_path / "out"
    done = request(spec, policies=(), folder=str(folder))
    results(done, engine)
    rows = (folder / "rows.jsonl").read_text()

    def fails(sweep, message):
        with pytest.raises(SweepError, match=message):
            results(sweep, engine)

    fails(done, "already. Resume it")
    resumed = request(spec, policies=(), folder=str(folder), resume=True)
    fails(request(spec, folder=str(folder), resume=True, max_new_tokens=7), "max new tokens 6, and this one has 7")
    for line, message in (
        ("{]", "line 2: it is not JSON"),
        ("[]", "line 2: it is not a JSON object"),
        ('{"version": 9}', "line 2: it is of version 9"),
        ('{"version": 1, "task": "x"}', "line 2: it lacks length"),
        ("\ufffd\x00", "line 2"),
    ):
        (folder / "rows.jsonl").write_text(rows + line + "\n" + rows)
        fails(resumed, message)
        with pytest.raises(SweepError, match=message):
            load(folder)
    (folder / "config.json").write_text("{")
    fails(resumed, "not JSON")
    (folder / "config.json").write_text('{"version": 0}')
    fails(resumed, "version")
    with pytest.raises(SweepError, match="holds no sweep"):
        load(tmp_path)


def test_rows_survive_json():
    row = SweepRow(
        "a", 1, 2, True, "capkv", "128", kl=(0.5, float("inf")), mean_kl=float("nan"), answers=("ä\n",), tau=2.0
    )
    again = SweepRow.from_json(row.to_json())
    assert again.key == row.key and again.answers == row.answers and again.tau == 2.0
    assert again.kl == (0.5, None) and again.mean_kl is None
    assert "\n" not in row.to_json()


def test_cancelling_keeps_what_is_done(spec, tmp_path, tiny_folder):
    host = Host()
    try:
        sweep = request(spec, seeds=tuple(range(40)), folder=str(tmp_path / "out"))
        job = host.submit(sweep, "a")
        while not any(isinstance(e, Scored) for e in job.events):
            assert job.active, job.error
            time.sleep(0.005)
        job.cancel()
        assert job.wait(60) and job.status == "cancelled"
        kept = [event.row for event in job.events if isinstance(event, Scored)]
        saved = load(tmp_path / "out").rows
        assert 0 < len(kept) <= len(saved) < sweep.n_rows and saved[: len(kept)] == tuple(kept)
        short = request(spec, seeds=(0, 1), folder=str(tmp_path / "out"), resume=True)
        after = host.submit(short, "a")
        assert after.wait(60) and after.status == "done" and len(after.result.rows) >= 14
    finally:
        host.close()


def test_progress_and_the_time_left(engine, spec):
    told = []
    sweep = request(spec, seeds=(20, 21, 22))
    events = [e for e in sweep.run(engine, lambda share, text: told.append(share)) if isinstance(e, Doing)]
    assert all(isinstance(e, Sweeping) and e.total == sweep.n_rows for e in events)
    shares = [e.share for e in events]
    assert shares == sorted(shares) and shares[0] < 0.2 and shares[-1] == pytest.approx(1, abs=0.02) and told
    assert events[0].seconds_left is None and 0 <= events[-1].seconds_left < 60
    assert len({e.text[:12] for e in events}) == 1  # one stage for the host
    assert "niah_single_2, 700 tokens, seed 21" in " ".join(e.text for e in events)


def test_pace():
    pace = Pace(100, 300)
    assert pace.share == 0 and pace.seconds_left is None
    pace.begin("read", 50)
    pace.at(0.5)
    assert pace.share == pytest.approx(25 / 1000)
    pace.end(2.0)
    pace.begin("write", 100)
    pace.end(10.0)
    assert pace.seconds_left == pytest.approx(50 * 0.04 + 200 * 0.1)
    assert pace.share == pytest.approx(12 / 34)
    pace.begin("write", 100)
    pace.at(0.5)
    pace.at(0.2)
    assert pace.seconds_left == pytest.approx(2 + 15)
    assert [in_words(x) for x in (4.4, 100, 8000)] == ["4 s", "2 min", "2 h 13 min"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ()}, "needs tasks"),
        ({"lengths": (0,)}, "at least 1"),
        ({"budgets": ()}, "needs budgets"),
        ({"budgets": (0,)}, "at least 1"),
        ({"budgets": (2.5,)}, "whole number"),
        ({"shares_removed": (1.0,)}, "below 1"),
        ({"max_new_tokens": -1}, "at least 1"),
        ({"resume": True}, "folder"),
        ({"taus": (-1.0,)}, "tau"),
    ],
)
def test_bad_sweeps_are_refused(spec, changes, message):
    with pytest.raises(ValueError, match=message):
        request(spec, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (700, 5000)}, "1,024 positions"),
        ({"lengths": (700, 100)}, "at least"),
        ({"tasks": (NEEDLE, tasks.parse("longbench:nothing"))}, "nothing"),
    ],
)
def test_what_cannot_work_fails_before_the_first_prompt(engine, spec, tmp_path, changes, message):
    with pytest.raises((ValueError, kvviz.KvvizError), match=message):
        results(request(spec, folder=str(tmp_path / "out"), **changes), engine)
    assert not (tmp_path / "out").exists()


def test_the_table_has_means_over_seeds(engine, spec):
    result = results(request(spec, tasks=(NEEDLE, TEXT), seeds=(0, 1), lengths=(500, 700)), engine)
    table = result.table()
    assert table.shape == (1 + 3 * 2, 2 * 2 + 2)
    assert list(table.index[0]) == ["Full cache", "all"] and table.loc[("Full cache", "all"), "KL, nats"] < 1e-6
    frame = result.frame()
    own = frame[(frame.policy == "capkv") & (frame.asked == "24") & (frame.task == TEXT.spec) & (frame.length == 500)]
    assert table.loc[(own.label.iloc[0], "24"), f"{TEXT.spec}, loss, 500"] == pytest.approx(own.loss.mean())
    assert Result({}, ()).table().empty


def arguments(words) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_line_makes_the_same_sweep(spec):
    for changes in (
        {},
        {"tasks": (tasks.parse("niah_multikey_1:depth=0.5,keys=3"), TEXT), "lengths": (512, 1024), "seeds": (0, 3, 4)},
        {"budgets": (), "shares_removed": (0.5, 0.9), "taus": (0.0, 2.5), "scenarios": (False, True)},
        {"scenarios": (True,), "compare": False, "evict_every": 8, "max_new_tokens": None, "folder": "a b"},
        {"policies": (kvviz.policy("capkv", tau=2.0, allocation="adaptive", correction=1),)},
    ):
        sweep = request(spec, **changes)
        words = kvviz.sweep.request.arguments(sweep)
        assert command.request(arguments(words)) == sweep
        assert sweep.command().startswith("python -m kvviz sweep --model")
    assert arguments(["--task", "qa_1", "--length", "9", "--seed", "0:3,7"]).seed == [0, 1, 2, 7]


def test_the_command(tiny_folder, tmp_path, engine, spec, capsys):
    folder = str(tmp_path / "out")
    base = ["sweep", "--model", tiny_folder(), "--device", "cpu", "--task", "niah_single_2", "--length", "700"]
    base += [
        "--policy",
        "sink",
        "--policy",
        "capkv",
        "--policy",
        "momentkv",
        "--budget",
        "24,60",
        "--max-new-tokens",
        "6",
    ]
    base += ["--compare", "--out", folder, "--quiet"]
    assert main(base) == 0
    assert same(load(folder).rows, results(request(spec), engine).rows)
    out = capsys.readouterr().out
    assert "Full cache" in out and "niah_single_2" in out and "KL, nats" in out and "1 seed." in out
    assert main(base) == 2 and "Resume it" in capsys.readouterr().err
    assert main([*base, "--resume", "--seed", "0:2"]) == 0 and len(load(folder).rows) == 14


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--task", "niah"], "There is no task"),
        (["--policy", "kapkv"], "capkv"),
        (["--length", "5000"], "positions"),
        (["--length", "many"], "whole number"),
        (["--share-removed", "x"], "not a number"),
        (["--resume"], "folder"),
    ],
)
def test_bad_command_lines_are_refused(tiny_folder, capsys, change, message):
    base = [
        "sweep",
        "--model",
        tiny_folder(),
        "--device",
        "cpu",
        "--task",
        "qa_1",
        "--length",
        "700",
        "--policy",
        "sink",
    ]
    try:
        code = main([*base, "--budget", "8", "--quiet", *change])
    except SystemExit as exit:
        code = exit.code
    assert code == 2 and message in capsys.readouterr().err
