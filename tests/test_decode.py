"""Decoding from what was kept: equal to `generate`, to masks, to itself alone, token for token."""

from dataclasses import replace

import pytest
import torch

import kvviz
from kvviz.attention import running
from kvviz.cache import RowCache
from kvviz.decode import Sampling, forward
from kvviz.evict import evict
from kvviz.metrics import first_difference, kl_divergence
from tests import tiny
from tests.reference import EVERY, masked_logits, run

TEXT = "".join(chr(33 + i) for i in tiny.prompt_ids(90, seed=3) if i < 90) + " and some words to read, once and again."
QUESTION = " Which words?"


def state_of(engine, text=TEXT, **more):
    """A prompt state that every policy can use."""
    state = engine.prefill(text, attention_mass=True, **more)
    if state.layers[0].probes is None:
        run(engine, state, QUESTION, [], 8, max_new_tokens=6)
        state = engine.latest(state)
    return state


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_full_cache_writes_what_generate_writes(tiny_engine, family):
    engine = tiny_engine(family)
    ids = engine.tokenizer(TEXT + QUESTION, return_tensors="pt").input_ids
    own = engine.model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
    state = engine.prefill(TEXT)
    assert run(engine, state, QUESTION, [], 8, max_new_tokens=24).reference.token_ids == own
    seen = engine.prefill(TEXT, question=QUESTION)
    assert run(engine, seen, "", [], 8, max_new_tokens=24).reference.token_ids == own


def test_a_chat_has_the_ids_of_the_template(engine):
    messages = [{"role": "user", "content": "Some text.\n\nA question?"}]
    own = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    context, tail = engine.encode([{"role": "user", "content": "Some text."}])
    assert context + kvviz.prompts.encode_question(engine.tokenizer, "A question?", tail) == own
    assert engine.encode([{"role": "user", "content": "Some text."}], "A question?") == (own, "")


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_budget_of_the_whole_prompt_is_the_full_cache(tiny_engine, family, name):
    engine = tiny_engine(family)
    state = state_of(engine)
    for budget in (state.n_tokens, 10 * state.n_tokens):
        result = run(engine, state, QUESTION, [kvviz.policy(name)], budget, max_new_tokens=12)
        full, row = result.rows
        assert row.token_ids == full.token_ids and row.first_difference is None
        assert row.entries == state.n_tokens and row.bytes == full.bytes
        assert max(row.kl) < 1e-6


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_eviction_is_what_a_mask_would_do_to_the_same_forward(tiny_engine, family, name):
    """Kept entries at true positions: the same logits as the whole sequence with evicted entries masked out."""
    engine = tiny_engine(family)
    state = state_of(engine)
    kept = evict(state, kvviz.policy(name, correction=None), 16)
    more = [5, 9, 77, 200, 13]
    expected = masked_logits(engine.model, [*state.ids, *more], kept)[state.n_tokens :]
    cache = RowCache([kept], room=len(more))
    torch.testing.assert_close(
        forward(engine.model, cache, torch.tensor([more]), all_logits=True)[0], expected, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_forward_of_several_tokens_equals_several_of_one(tiny_engine, family, name):
    """VeloxQuant-MLX #370: the mask after eviction is lower-right."""
    engine = tiny_engine(family)
    kept = evict(state_of(engine), kvviz.policy(name), 16)
    more = torch.tensor([[5, 9, 77, 200]])
    together, one_by_one = RowCache([kept], room=4), RowCache([kept], room=4)
    logits = forward(engine.model, together, more, all_logits=True)
    for i in range(4):
        single = forward(engine.model, one_by_one, more[:, i : i + 1])
        torch.testing.assert_close(single, logits[:, i], rtol=1e-3, atol=1e-4)


def test_rows_do_not_touch_each_other(engine):
    """Side by side or alone, every policy writes the same; ragged, corrected and full rows in one batch."""
    state = state_of(engine)
    policies = [kvviz.policy(name) for name in EVERY] + [
        kvviz.policy("capkv", correction=0),
        kvviz.policy("snapkv", correction=1, partition=0.5),
    ]
    together = run(engine, state, QUESTION, policies, 20, max_new_tokens=16)
    for row, policy in zip(together.rows[1:], policies, strict=True):
        alone = run(engine, state, QUESTION, [policy], 20, max_new_tokens=16).rows[1]
        assert row.token_ids == alone.token_ids
        torch.testing.assert_close(torch.tensor(row.kl), torch.tensor(alone.kl), rtol=1e-3, atol=1e-5)


def test_rows_stop_on_their_own(engine):
    """A row that writes an end token leaves; the others go on as if it had never been there."""
    state = state_of(engine)
    policies = [kvviz.policy("random", seed=s) for s in range(4)]
    free = run(engine, state, QUESTION, policies, 16, max_new_tokens=20, stop=False)
    ends = frozenset({free.rows[1].token_ids[3], free.rows[3].token_ids[7]})
    before, engine.loaded = engine.loaded, replace(engine.loaded, eos_ids=ends)
    try:
        stopped = run(engine, state, QUESTION, policies, 16, max_new_tokens=20)
    finally:
        engine.loaded = before
    for row, whole in zip(stopped.rows, free.rows, strict=True):
        n = len(row.token_ids)
        assert row.token_ids == whole.token_ids[:n]
        assert (row.token_ids[-1] in ends) == (row.finish == "end")
        assert row.finish == "end" or n == 20
        assert not ends & set(row.token_ids[:-1])
    assert len({len(row.token_ids) for row in stopped.rows}) > 1


def test_evicting_after_the_prefill_is_evicting_during_it(engine):
    """A layer's keys and values do not depend on what an earlier layer dropped afterwards."""
    state, policy = engine.prefill(TEXT), kvviz.policy("capkv")
    dropped = []

    class EvictingPass(kvviz.prefill._PrefillPass):
        def attend(self, layer, q, k, v, scaling, window):
            out = super().attend(layer, q, k, v, scaling, window)
            recorder = self.recorders[layer]
            own = recorder.state(layer, None)
            mask = kvviz.evict.keep_mask(
                own, policy, policy.scorer.score(own), 16, policy.protected(len(state.ids), 16)
            )
            dropped.append((own.keys[mask], own.values[mask]))
            recorder.keys = recorder.values = None
            return out

    recorders = [kvviz.prefill._Recorder(r, state.n_tokens, False) for r in kvviz.prefill.rotaries(engine.model)]
    during = EvictingPass(recorders, state.n_tokens, None)
    during.next_chunk(0, state.n_tokens)
    with running(engine.model, during):
        engine.model(torch.tensor([state.ids]), use_cache=False)
    for (keys, values), after in zip(dropped, evict(state, policy, 16).layers, strict=True):
        torch.testing.assert_close(keys, after.keys)
        torch.testing.assert_close(values, after.values)


def test_a_second_question_is_answered_as_if_it_were_the_first(engine):
    """Several turns on one evicted cache, in either order, uneven layers included."""
    state = state_of(engine)
    policies = [kvviz.policy("pyramidkv", window=4), kvviz.policy("momentkv", window=4)]
    questions = [" What is said first?", " And then, what follows after it?"]
    answers = {q: [r.token_ids for r in run(engine, state, q, policies, 16, max_new_tokens=8).rows] for q in questions}
    again = {
        q: [r.token_ids for r in run(engine, state, q, policies, 16, max_new_tokens=8).rows]
        for q in reversed(questions)
    }
    assert answers == again and answers[questions[0]] != answers[questions[1]]


def test_two_prompts_in_a_row_are_both_evicted(engine):
    """KVCache-Factory #15: only the first prompt was compressed."""
    for text in (TEXT, TEXT[::-1] + TEXT):
        result = run(engine, engine.prefill(text), QUESTION, [kvviz.policy("snapkv", window=4)], 16, max_new_tokens=4)
        assert result.rows[1].entries == 16
        assert [set(counts) for counts in result.rows[1].head_counts] == [{16}] * 4


def test_sampling_is_the_same_for_equal_rows_and_follows_the_seed(engine):
    state = state_of(engine)
    policies = [kvviz.policy("sink")]
    first = run(engine, state, QUESTION, policies, state.n_tokens, max_new_tokens=16, temperature=1.5, seed=1)
    again = run(engine, state, QUESTION, policies, state.n_tokens, max_new_tokens=16, temperature=1.5, seed=1)
    other = run(engine, state, QUESTION, policies, state.n_tokens, max_new_tokens=16, temperature=1.5, seed=2)
    assert first.rows[0].token_ids == first.rows[1].token_ids == again.rows[0].token_ids != other.rows[0].token_ids


def test_sampling_draws_from_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]])
    choose = Sampling(temperature=2.0, seed=0).start()
    counts = torch.bincount(torch.cat([choose(logits) for _ in range(4000)]), minlength=4) / 4000
    torch.testing.assert_close(counts, (logits[0] / 2).softmax(-1), rtol=0, atol=0.03)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature"):
            Sampling(temperature=bad)


def test_kl_and_first_difference():
    a, b = torch.randn(5, 40), torch.randn(5, 40)
    p, q = a.softmax(-1), b.softmax(-1)
    torch.testing.assert_close(kl_divergence(a, b), (p * (p / q).log()).sum(-1))
    assert kl_divergence(a, a).abs().max() == 0
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2


def test_kl_is_measured_along_the_full_caches_output(engine):
    """Each step's divergence equals the one from a fresh masked forward over prompt, question and full output."""
    state = state_of(engine)
    policy = kvviz.policy("snapkv", window=4)
    result = run(engine, state, QUESTION, [policy], 12, max_new_tokens=10)
    follow = kvviz.prompts.encode_question(engine.tokenizer, QUESTION, "")
    sequence = [*state.ids, *follow, *result.reference.token_ids]
    start = state.n_tokens + len(follow) - 1
    full = masked_logits(engine.model, sequence)[start:-1]
    mine = masked_logits(engine.model, sequence, evict(state, policy, 12))[start:-1]
    torch.testing.assert_close(torch.tensor(result.rows[1].kl), kl_divergence(full, mine), rtol=1e-2, atol=1e-4)
    assert len(result.rows[1].top) == len(result.reference.token_ids)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_gives_finite_logits(tiny_folder, dtype):
    """kvpress #250: head-wise eviction in half precision wrote '!!!!'."""
    engine = kvviz.load(tiny_folder(), device="cpu", dtype=dtype)
    state = engine.prefill(TEXT, attention_mass=True)
    names = [n for n in EVERY if n != "oracle"]
    result = run(engine, state, QUESTION, [kvviz.policy(n) for n in names], 16, max_new_tokens=8)
    for row in result.rows:
        assert len(row.token_ids) >= 1 and all(k == k and k != float("inf") for k in row.kl)
    assert {layer.dtype for layer in (state.layers[0].keys, state.layers[0].values)} == {engine.loaded.dtype}
