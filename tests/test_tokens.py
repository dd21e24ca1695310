"""The page Tokens: what it says is what `evict` keeps; the parts of a score multiply to it; a prompt is never HTML."""

from __future__ import annotations

import numpy as np
import pytest
import streamlit as st
import torch
from streamlit.testing.v1 import AppTest

import kvviz
import ui
from kvviz import analysis
from kvviz.analysis import Pace, tokens
from kvviz.analysis.tokens import Shares, by_query_head, explain
from kvviz.figures import tokens as figures
from kvviz.policies.policy import Policy
from tests.reference import EVERY
from tests.test_decode import state_of
from tests.test_ui import opened, page, shown
from ui import tokens as text

HOSTILE = [
    '<script>alert("x")</script>',
    "&amp;",
    "'\"",
    "</del></span>",
    "<img src=x onerror=alert(1)>",
    "\n",
    "\t",
    "",
    " ",
]


def shares(counts, heads=4, policy="capkv") -> Shares:
    counts = np.asarray(counts)
    return Shares(policy, policy, 8, counts, heads, np.zeros(len(counts), dtype=bool))


@pytest.fixture(params=["llama", "gemma3"])
def state(request, tiny_engine):
    return state_of(tiny_engine(request.param))


@pytest.mark.parametrize("name", [*EVERY, "full"])
@pytest.mark.parametrize("budget", [5, 40, 10_000])
def test_the_counts_are_those_of_evict(state, name, budget):
    policy = kvviz.policy(name)
    counts = np.zeros(state.n_tokens, dtype=int)
    retained = kvviz.evict.evict(state, policy, budget)
    for layer in retained.layers:
        if not layer.sliding:
            counts += np.bincount(layer.positions.numpy(), minlength=state.n_tokens)
    found = tokens.kept_by(analysis.of(state), policy, budget)
    assert (found.counts == counts).all()
    assert found.shares.sum() == pytest.approx(retained.entries, rel=1e-4)
    assert (found.counts[found.always] == found.heads).all()


@pytest.mark.parametrize("name", EVERY)
def test_kept_is_a_rank_within_the_cutoff(state, name):
    policy, numbers = kvviz.policy(name), analysis.of(state)
    retained = kvviz.evict.evict(state, policy, 24)
    for token in (0, 30, state.n_tokens - 1):
        why = tokens.why(numbers, policy, 24, token)
        for index, layer in enumerate(retained.layers):
            if layer.sliding:
                assert why.sliding[index] and why.kept[index].all()
                continue
            for head, (_, _, positions) in enumerate(layer.heads()):
                assert why.kept[index, head] == (token in positions)
                if rank := why.rank[index, head]:
                    assert why.kept[index, head] == (rank <= why.cutoff[index, head])
    assert figures.why_map(why, 2).to_json() and str(token) in figures.why_alt(why, "x")


@pytest.mark.parametrize("options", [{}, {"output": "exact"}, {"gating": "covariance", "tau": 2.0}, {"sinks": 0}])
def test_capkv_is_weight_times_leverage(state, options):
    _multiplies(kvviz.policy("capkv", **options), state, ("weight", "leverage"))


def test_printed_capkv_is_a_sum_of_logarithms(state):
    policy = kvviz.policy("capkv", variant="paper", tau=0.2)
    layer = state.layers[1]
    parts = explain(policy.scorer, layer)
    product = (parts["log weight"].values + parts["log leverage"].values).exp().unflatten(0, (-1, layer.groups)).mean(1)
    torch.testing.assert_close(product, policy.scorer.score(layer), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"epsilon": 0.01}, {"covariance": False}])
def test_expected_attention_is_attention_times_length(state, options):
    _multiplies(kvviz.policy("expected_attention", **options), state, ("expected attention", "value norm"))


def test_momentkv_begins_with_attention_times_length(state):
    _multiplies(kvviz.policy("momentkv"), state, ("attention", "length of the value"))


def _multiplies(policy: Policy, state, names) -> None:
    layer = state.layers[1]
    parts = explain(policy.scorer, layer)
    assert tuple(parts) == names
    product = parts[names[0]].values * parts[names[1]].values
    mean = product.unflatten(0, (-1, layer.groups)).mean(dim=1)
    scored = ~mean.isnan()
    assert scored.sum() >= layer.keys.shape[0] * (layer.n_tokens - 4)
    torch.testing.assert_close(mean[scored], policy.scorer.score(layer)[scored], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"pooling": "max"}])
def test_snapkv_is_its_pooled_attention(state, options):
    policy, layer = kvviz.policy("snapkv", **options), state.layers[1]
    pooled = explain(policy.scorer, layer)["pooled attention"].values.unflatten(0, (-1, layer.groups)).mean(dim=1)
    scored = ~pooled.isnan()
    assert scored.sum() == layer.keys.shape[0] * (layer.n_tokens - policy.scorer.window)
    torch.testing.assert_close(pooled[scored], policy.scorer.score(layer)[scored])


@pytest.mark.parametrize("name", EVERY)
def test_facts_of_every_method(state, name):
    numbers, policy = analysis.of(state), kvviz.policy(name)
    found = tokens.facts(numbers, policy, 24, token=30, layer=1, head=3)
    score = next(fact for fact in found if fact.name == "score")
    assert score.value == pytest.approx(float(policy.scorer.score(state.layers[1])[1, 30]), rel=1e-5)
    assert all(fact.rank is None or 1 <= fact.rank <= state.n_tokens for fact in found)


def test_the_residual_is_that_of_the_evicted(state):
    numbers, policy, layer = analysis.of(state), kvviz.policy("momentkv"), state.layers[1]
    kept = kvviz.evict.evict(state, policy, 24).layers[1]
    expected = kept.moments.residual(layer.keys, layer.values).norm(dim=-1)
    np.testing.assert_allclose(tokens.residual(numbers, policy, 24, 1), expected.numpy(), rtol=1e-4, atol=1e-5)


def test_received_attention_is_that_of_the_later_queries(state):
    layer = state.layers[1]
    logits = torch.einsum("hpd,hnd->hpn", layer.probes, by_query_head(layer).keys) * layer.scaling
    np.testing.assert_allclose(tokens.received(analysis.of(state), 1), logits.softmax(-1).mean(1).numpy(), rtol=1e-4)
    why = tokens.why(analysis.of(state), kvviz.policy("capkv"), 24, 7)
    assert why.attention.shape == (len(state.layers), 4) and why.attention_rank[1].min() >= 1


def test_without_a_run_nobody_knows_the_attention(engine):
    fresh = engine.prefill("A text that no other test has read before, for the page Tokens.")
    why = tokens.why(analysis.of(fresh), kvviz.policy("capkv"), 8, 3)
    assert why.attention is None
    assert len(figures.why_map(why, 2).data) == 2


def test_pieces_are_the_text(tiny_engine):
    engine = tiny_engine("llama")  # one token a byte
    ids, _ = engine.encode("Grüße & more")
    found = tokens.pieces(ids, engine.tokenizer.decode)
    assert len(found) == len(ids)
    assert "".join(p for p in found if p != tokens.PART_OF_A_CHARACTER) == "Grüße & more"


def test_find():
    texts = ["The", " magic", " num", "ber", " is", " a", " number", "\n"]
    assert tokens.find(texts, "number") == [2, 6]
    assert tokens.find(texts, "MAGIC NUM") == [1]
    assert tokens.find(texts, "") == tokens.find(texts, "absent") == []


def test_the_text_is_escaped():
    n = len(HOSTILE)
    for second in (None, shares([4] * n, policy="momentkv")):
        html = text.strip(HOSTILE, shares([0] * n), second, token=2)
        assert "<script" not in html and "<img" not in html and "&lt;script&gt;" in html and "&amp;amp;" in html
        assert html.count('title="') == n
    assert "<script" not in text.quote(HOSTILE, 1) + text.table(HOSTILE, [HOSTILE])
    assert "↵\n" in html and "⇥" in html and "∅" in html


def test_shape_says_what_colour_says():
    first, second = shares([0, 4, 2, 0, 3]), shares([0, 2, 2, 4, 3], policy="momentkv")
    alone = text.strip("abcde", first, token=1)
    assert alone.count("<del") == 2 and 'class="k16 kv-chosen"' in alone
    both = text.strip("abcde", first, second)
    assert both.count("<del") == 1
    assert [c.split('"')[0] for c in both.split('class="')[2:]] == ["k0 kv-gone", "m8", "k0", "f16", "k0"]
    assert "underline dotted" in text.styles()
    assert "1 tokens" in text.legend(first, second) and "2 of 5 tokens" in text.legend(first, None)


def test_8000_tokens():
    rng = np.random.default_rng(0)
    long = shares(rng.integers(0, 5, 8000))
    html = text.strip([" word"] * 8000, long, token=7999)
    assert html.count(" word<") == 8000 and len(html) < 600_000
    figure = figures.profile([long], 7999)
    assert len(figure.data[0].x) <= figures.BINS
    assert figure.data[0].y.mean() == pytest.approx(100 * long.shares.mean(), rel=1e-3)


@pytest.fixture
def model(tiny_folder):
    """The host of the process, fresh, and a tiny model to ask it for."""
    st.cache_resource.clear()
    yield tiny_folder("llama")
    ui.host().close()
    st.cache_resource.clear()


def visit(model: str, **query) -> AppTest:
    """The page after the prompt was read."""
    app = opened(model, **query)
    app.switch_page("pages/tokens.py").run()
    app.button(key="read").click().run()
    assert app.session_state["_task"].job.wait(60)
    app.run()
    assert not app.exception
    return app


def strip_of(app: AppTest) -> str:
    return next(each.value for each in app.html if 'class="kv-strip"' in each.value)


def test_the_page_shades_and_explains(model):
    app = visit(model)
    assert strip_of(app).count("<span") + strip_of(app).count("<del") > 300 and "<b>nothing" not in strip_of(app)
    assert "CapKV keeps it in" in page(app) and "leverage" in page(app)
    before = strip_of(app)
    app.session_state["_size"] = kvviz.experiment.Size(128)
    app.run()
    assert strip_of(app) != before
    app.selectbox(key="minus").set_value(1).run()
    assert "MomentKV does" in page(app) and not app.exception


def test_shades_in_numbers_are_those_of_the_text():
    """Classes k0 ... k16 by the share of heads; m and f by the difference, with its sign; GONE where no head is left."""
    some = lambda counts: tokens.Shares("sink", "Sink", 9, np.array(counts), 32, np.zeros(len(counts), bool))  # noqa: E731
    first, second = some([0, 1, 16, 32, 0, 31, 7]), some([0, 1, 32, 0, 3, 30, 7])
    names = lambda codes: [(text.CLASSES[c % text.GONE], c >= text.GONE) for c in codes.tolist()]  # noqa: E731
    alone = ["k0", "k1", "k8", "k16", "k0", "k16", "k4"]
    assert names(text.codes(first)) == [(name, count == 0) for name, count in zip(alone, first.counts, strict=True)]
    both = ["k0", "k0", "f8", "m16", "f2", "m1", "k0"]
    assert names(text.codes(first, second)) == [(name, i == 0) for i, name in enumerate(both)]
    assert len(text.CLASSES) == 49 < text.GONE


def test_shares_of_many_settings_as_long_as_there_is_time(state):
    numbers = analysis.of(state)
    wanted = [(kvviz.policy("capkv"), 9), (kvviz.policy("keydiff"), 12), (kvviz.policy("capkv"), 9)]
    found = tokens.kept_by_each(numbers, wanted, Pace(60))
    assert list(found) == wanted[:2]
    for setting, shares in found.items():
        assert np.array_equal(shares.counts, tokens.kept_by(numbers, *setting).counts)
    paused = []
    new = (kvviz.policy("keydiff", recent=2), 7)
    assert list(tokens.kept_by_each(numbers, [new, *wanted], Pace(0, lambda: paused.append(1)))) == wanted[:2]
    assert paused == []
    with pytest.raises(KeyboardInterrupt):
        tokens.kept_by_each(numbers, [*wanted, new], Pace(60, lambda: (_ for _ in ()).throw(KeyboardInterrupt)))


def test_the_token_is_in_the_link_and_can_be_looked_for(model):
    app = visit(model, token="11")
    assert shown(app, "token").value == 11 and "Why token 11" in page(app)
    app.text_input(key="find").set_value("left the house").run()
    first = shown(app, "token").value
    assert first == next(i for i in tokens.find(list(_texts(app)), "left the house") if i >= 11)
    app.button(key="find_next").click().run()
    assert shown(app, "token").value > first
    app.button(key="token_left").click().run()
    assert app.query_params["token"] == str(shown(app, "token").value)
    app.session_state["_own"] = "A much shorter text."
    app.run()
    assert not app.exception


def _texts(app: AppTest) -> list[str]:
    """The prompt, one byte a token."""
    engine = ui.host().engine
    ids, _ = engine.encode([{"role": "user", "content": app.session_state["_own"]}])
    return tokens.pieces(ids, engine.tokenizer.decode)


def test_the_answer_tells_what_was_looked_at(model):
    app = visit(model)
    assert "known once it has written one" in page(app) and "attention it really got" not in page(app)
    app.button(key="read").click().run()
    assert app.session_state["_task"].job.wait(60)
    app.run()
    assert "attention it really got" in page(app) and not app.exception
