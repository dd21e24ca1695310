"""The host: one worker, fair turns, cancel, faults that end one job and no other, one model in memory."""

import gc
import threading
import time
import weakref
from dataclasses import dataclass

import pytest

import kvviz
from kvviz.events import Doing, Token
from kvviz.host import Host, ModelSpec
from kvviz.jobs import Generate, Load, Prompt, Read
from tests.test_decode import QUESTION, TEXT


@pytest.fixture
def host():
    made = Host()
    yield made
    made.close()


@pytest.fixture
def spec(tiny_folder):
    return ModelSpec(tiny_folder(), device="cpu")


@dataclass(frozen=True)
class Scripted:
    """A request that does what a test says."""

    model: ModelSpec
    script: object

    def run(self, engine, progress):
        yield from self.script(engine, progress)


def generate(spec, policies=("capkv",), budget=16, n=8, **prompt):
    chosen = tuple(kvviz.policy(p) for p in policies)
    return Generate(spec, Prompt(TEXT, QUESTION, **prompt), chosen, budget, max_new_tokens=n)


def test_a_run_streams_and_finishes(host, spec):
    job = host.submit(generate(spec), "one")
    assert job.wait(60) and job.status == "done" and not job.error
    tokens = [e for e in job.events if isinstance(e, Token)]
    for number, row in enumerate(job.result.rows):
        assert [e.id for e in tokens if e.row == number] == row.token_ids
        assert "".join(e.text for e in tokens if e.row == number) == row.text.rstrip("\ufffd")
    assert not any(isinstance(e, Doing) for e in job.events)


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_both_scenarios(host, spec, seen, chat):
    job = host.submit(generate(spec, seen=seen, chat=chat), "one")
    job.wait(60)
    n = job.result.config["prompt_tokens"]
    other = host.submit(generate(spec, seen=not seen, chat=chat), "one")
    other.wait(60)
    assert (n > other.result.config["prompt_tokens"]) == seen
    assert job.result.reference.token_ids == other.result.reference.token_ids


def test_sessions_take_turns(host, spec):
    order, gate = [], threading.Event()

    def script(name):
        def steps(engine, progress):
            order.append(name)
            yield Doing(1.0, name)

        return steps

    def hold(engine, progress):
        gate.wait(30)
        yield Doing(1.0, "held")

    host.submit(Scripted(spec, hold), "z")
    greedy = [host.submit(Scripted(spec, script("a")), "a") for _ in range(4)]
    late = host.submit(Scripted(spec, script("b")), "b")
    assert [host.place(job) for job in [*greedy, late]] == [1, 3, 4, 5, 2]
    gate.set()
    assert all(job.wait(60) for job in [*greedy, late])
    assert order == ["a", "b", "a", "a", "a"]


def test_cancel_between_layers_and_between_tokens(host, spec):
    host.submit(Load(spec), "a").wait(60)
    layers = host.submit(Scripted(spec, lambda engine, progress: _slow_read(engine, progress)), "a")
    while layers.doing.share < 0.2:
        time.sleep(0.005)
    layers.cancel()
    assert layers.wait(30) and layers.status == "cancelled" and layers.doing.share < 1
    writing = host.submit(generate(spec, n=400), "a")
    while not writing.events or not isinstance(writing.events[-1], Token):
        time.sleep(0.002)
    writing.cancel()
    assert writing.wait(30) and writing.status == "cancelled" and writing.result is None
    assert host.engine.model.config._attn_implementation == "sdpa"
    after = host.submit(generate(spec), "a")
    assert after.wait(60) and after.status == "done"


def _slow_read(engine, progress):
    def slow(share, text):
        time.sleep(0.05)
        progress(share, text)

    engine._states.clear()
    Prompt(TEXT).prefill(engine, progress=slow)
    yield Doing(1.0, "Read")


def test_a_waiting_job_can_be_cancelled(host, spec):
    gate = threading.Event()

    def hold(engine, progress):
        gate.wait(30)
        yield Doing(1.0, "held")

    host.submit(Scripted(spec, hold), "a")
    waiting = host.submit(generate(spec), "b")
    waiting.cancel()
    gate.set()
    assert waiting.wait(30) and waiting.status == "cancelled" and waiting.events == []


def test_a_job_whose_session_is_gone_ends(host, spec):
    alive = [True]
    job = host.submit(generate(spec, n=500), "tab", alive=lambda: alive[0])
    while not job.events:
        time.sleep(0.002)
    alive[0] = False
    assert job.wait(30) and job.status == "cancelled"
    assert host.submit(generate(spec), "other").wait(60)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (RuntimeError("boom"), "boom"),
        (MemoryError(), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "shorter prompt"),
        (kvviz.KvvizError("do this instead"), "do this instead"),
    ],
)
def test_a_fault_ends_one_job_and_no_other(host, spec, fault, message, caplog):
    def broken(engine, progress):
        yield Doing(0.5, "about to fail")
        with kvviz.exceptions.memory_advice("testing"):
            raise fault

    bad = host.submit(Scripted(spec, broken), "a")
    good = host.submit(generate(spec), "b")
    assert bad.wait(60) and bad.status == "failed" and message in bad.error
    assert good.wait(60) and good.status == "done"
    assert host.queue_length == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt(""), "empty"),
        (Prompt(" \n\t"), "empty"),
        (Prompt("a\x00b"), "binary"),
        (Prompt("word " * 400, "?"), "1,024 positions"),
        (Prompt(TEXT, "a\x00b"), "NUL"),
    ],
)
def test_bad_prompts_fail_clearly(host, spec, prompt, message):
    job = host.submit(Generate(spec, prompt, (kvviz.policy("sink"),), 16), "a")
    assert job.wait(60) and job.status == "failed" and message in job.error
    assert host.submit(generate(spec), "a").wait(60)


def test_an_unknown_model_fails_clearly_and_the_next_job_finds_its_own(host, spec):
    bad = host.submit(Load(ModelSpec("/no/such/folder", device="cpu")), "a")
    assert bad.wait(60) and bad.status == "failed" and "/no/such/folder" in bad.error
    good = host.submit(generate(spec), "a")
    assert good.wait(60) and good.status == "done"


def test_changing_the_model_frees_the_old_one_first(host, tiny_folder, monkeypatch):
    """streamlit #3885: two models in memory."""
    first, second = (ModelSpec(tiny_folder(f), device="cpu") for f in ("llama", "qwen3"))
    host.submit(Read(first, Prompt(TEXT)), "a").wait(60)
    old = weakref.ref(host.engine.model)
    alive_at_load = []
    real = kvviz.host.load_model

    def watched(*args, **more):
        gc.collect()
        alive_at_load.append(old() is not None)
        return real(*args, **more)

    monkeypatch.setattr(kvviz.host, "load_model", watched)
    job = host.submit(Read(second, Prompt(TEXT)), "b")
    assert job.wait(60) and job.status == "done"
    assert alive_at_load == [False]
    assert host.submit(generate(first), "a").wait(60) and len(alive_at_load) == 2


def test_one_load_for_many_jobs(host, spec, monkeypatch):
    loads = []
    real = kvviz.host.load_model
    monkeypatch.setattr(kvviz.host, "load_model", lambda *a, **k: loads.append(a) or real(*a, **k))
    jobs = [host.submit(generate(spec), str(i % 3)) for i in range(6)]
    assert all(job.wait(60) for job in jobs) and len(loads) == 1


def test_a_prompt_is_read_once(host, spec, monkeypatch):
    reads = []
    real = kvviz.engine.prefill
    monkeypatch.setattr(kvviz.engine, "prefill", lambda *a, **k: reads.append(a) or real(*a, **k))
    for policies, budget in ((("capkv",), 8), (("snapkv",), 16), (("sink", "momentkv"), 24)):
        assert host.submit(generate(spec, policies, budget), "a").wait(60)
    assert len(reads) == 1


def test_states_are_bounded(tiny_folder):
    host = Host(state_bytes=100_000)
    try:
        for i in range(5):
            job = host.submit(Read(ModelSpec(tiny_folder(), device="cpu"), Prompt(TEXT + str(i))), "a")
            assert job.wait(60) and job.status == "done"
            assert 0 < sum(s.bytes for s in host.engine._states.values()) <= 100_000
    finally:
        host.close()


def test_too_many_waiting_jobs_are_refused(host, spec, monkeypatch):
    monkeypatch.setattr(kvviz.host, "MAX_WAITING", 2)
    gate = threading.Event()

    def hold(engine, progress):
        gate.wait(30)
        yield Doing(1.0, "held")

    first = host.submit(Scripted(spec, hold), "a")
    while first.status == "queued":
        time.sleep(0.005)
    jobs = [host.submit(generate(spec), "a") for _ in range(2)]
    with pytest.raises(kvviz.host.Busy, match="waiting"):
        host.submit(generate(spec), "b")
    gate.set()
    assert all(job.wait(60) for job in jobs)


def test_ten_sessions_at_once_each_get_their_own(host, spec):
    wanted = [("capkv", 8 + i) if i % 2 else ("snapkv", 8 + i) for i in range(10)]
    jobs = []

    def press(i):
        name, budget = wanted[i]
        jobs.append((i, host.submit(generate(spec, (name,), budget, n=6), f"s{i}")))

    threads = [threading.Thread(target=press, args=(i,)) for i in range(10)]
    [t.start() for t in threads], [t.join() for t in threads]
    for i, job in jobs:
        assert job.wait(120) and job.status == "done"
        row = job.result.rows[1]
        assert (row.policy, row.entries) == wanted[i]
