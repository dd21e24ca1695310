"""What a shared server allows: each limit ends one job with the remedy, and the next one runs."""

import pytest

import kvviz
from kvviz.engine import Engine
from kvviz.limits import Limits
from kvviz.prompts import PromptError
from tests.reference import run
from tests.test_decode import QUESTION, TEXT


@pytest.fixture
def limited(engine):
    return lambda **limits: Engine(engine.loaded, limits=Limits(**limits))


@pytest.mark.parametrize(
    ("limits", "error", "message"),
    [
        ({"prompt_tokens": 20}, PromptError, "takes 20 at most"),
        ({"new_tokens": 4}, PromptError, "writes 4 tokens at most"),
        ({"policies": 1}, PromptError, "runs 1 policies at most"),
    ],
)
def test_each_limit_says_what_it_allows(limited, limits, error, message):
    engine, policies = limited(**limits), [kvviz.policy("sink"), kvviz.policy("keydiff")]
    with pytest.raises(error, match=message):
        run(engine, engine.prefill(TEXT), QUESTION, policies, 8, max_new_tokens=5)
    if "prompt_tokens" not in limits:
        assert run(engine, engine.prefill(TEXT), QUESTION, policies[:1], 8, max_new_tokens=4).rows


def test_a_full_memory_ends_one_job_and_frees_what_it_held(limited):
    engine = limited(kv_mib=1)
    long = TEXT * 12
    assert len(engine.encode(long)[0]) * engine.entry_bytes < 1 << 20
    state = engine.prefill(long)
    with pytest.raises(kvviz.OutOfMemory, match="fewer policies"):
        run(engine, state, QUESTION, [kvviz.policy("sink")] * 8, 700, max_new_tokens=2)
    assert run(engine, state, QUESTION, [kvviz.policy("sink")], 100, max_new_tokens=2).rows
    tiny = Limits(kv_mib=1)
    with pytest.raises(kvviz.OutOfMemory, match="shorter prompt"):
        tiny.check_kv(2 << 20, "The prompt")


def test_limits_come_from_the_environment(monkeypatch):
    assert Limits.from_environment() == Limits()
    monkeypatch.setenv("KVVIZ_MAX_NEW_TOKENS", "100")
    monkeypatch.setenv("KVVIZ_MAX_KV_MIB", "512")
    assert Limits.from_environment() == Limits(new_tokens=100, kv_mib=512)
    monkeypatch.setenv("KVVIZ_MAX_KV_MIB", "many")
    with pytest.raises(ValueError, match="KVVIZ_MAX_KV_MIB"):
        Limits.from_environment()
