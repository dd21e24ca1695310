"""Eviction: entries really leave memory, totals are exact, protected entries stay."""

import pytest
import torch

import kvviz
from kvviz.cache import RowCache
from kvviz.evict import evict
from tests.reference import EVERY
from tests.test_decode import TEXT, state_of

SETTINGS = [
    {},
    {"allocation": "uniform"},
    {"allocation": "pyramid"},
    {"allocation": "adaptive"},
    {"allocation": "adaptive", "sinks": 2, "recent": 5, "correction": 1},
]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("budget", [1, 5, 16, 40])
@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_totals_are_exact_and_bytes_follow_the_formula(engine, name, budget, setting):
    """SnapKV #16: KV heads are not repeated. bytes = 2 L Hkv kept d itemsize."""
    state = state_of(engine)
    kept = evict(state, kvviz.policy(name, **SETTINGS[setting]), budget)
    assert sum(sum(layer.counts) for layer in kept.layers) == 4 * 2 * budget
    assert kept.entries == budget
    assert kept.kv_bytes == 2 * 4 * 2 * budget * 16 * 4
    assert all(min(layer.counts) >= 1 for layer in kept.layers)


@pytest.mark.parametrize("name", EVERY)
def test_what_is_kept_is_the_prompts_own_and_holds_no_more_memory(engine, name):
    state = state_of(engine)
    kept = evict(state, kvviz.policy(name), 12)
    for layer, source in zip(kept.layers, state.layers, strict=True):
        for tensor in (layer.keys, layer.values):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert tensor.untyped_storage().data_ptr() != source.keys.untyped_storage().data_ptr()
        for head, (keys, values, positions) in enumerate(layer.heads()):
            assert torch.equal(positions, positions.unique())
            assert torch.equal(keys, source.keys[head, positions])
            assert torch.equal(values, source.values[head, positions])


@pytest.mark.parametrize("allocation", ["uniform", "pyramid", "adaptive"])
def test_the_decode_cache_holds_what_is_kept_and_room_for_new_tokens(engine, allocation):
    """H2O #51: memory is really reduced, ragged heads included."""
    state = state_of(engine)
    rows = [evict(state, kvviz.policy("snapkv", window=4, allocation=allocation), b) for b in (8, 16)]
    cache = RowCache(rows, room=10)
    assert cache.bytes == sum(row.kv_bytes for row in rows) + 2 * 2 * 4 * 2 * 10 * 16 * 4
    cache.select([1])
    assert cache.bytes == rows[1].kv_bytes + 2 * 4 * 2 * 10 * 16 * 4


@pytest.mark.parametrize("name", EVERY)
def test_protected_entries_survive_ties(name):
    """kvpress #226: sinks or window were lost when scores tie. Here all keys and values are the same."""
    from kvviz.rotary import Rotary
    from kvviz.state import LayerState, PromptState

    n, same = 60, torch.ones(2, 60, 16)
    rotary = Rotary.from_theta(10000.0, 16)
    layer = LayerState.from_tensors(
        same, same, torch.ones(4, n, 16), rotary, attention_mass=torch.ones(2, n), probes=torch.ones(4, 3, 16)
    )
    state = PromptState(tuple(range(n)), (layer,) * 2, torch.zeros(5))
    policy = kvviz.policy(name, sinks=3, recent=6)
    for _, _, positions in [head for part in evict(state, policy, 20).layers for head in part.heads()]:
        assert {0, 1, 2, *range(n - 6, n)} <= set(positions.tolist())


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("text", ["x", "words"])
def test_short_prompts_go_through_every_method(engine, name, text):
    """kvpress #61: a prompt that is not longer than the window."""
    state = engine.prefill(text, attention_mass=True)
    list(engine.generate(state, "?", [], 8, max_new_tokens=3))
    state = engine.latest(state)
    for budget in range(1, len(text) + 2):
        assert evict(state, kvviz.policy(name), budget).entries == min(budget, len(text))


@pytest.mark.parametrize("name", ["snapkv", "capkv"])
def test_sliding_layers_are_left_alone(tiny_engine, name):
    state = state_of(tiny_engine("gemma3"))
    kept = evict(state, kvviz.policy(name, correction=1), 12)
    for layer, source in zip(kept.layers, state.layers, strict=True):
        assert layer.sliding == source.sliding
        if layer.sliding:
            assert torch.equal(layer.keys, source.keys.flatten(0, 1)) and layer.moments is None
            assert layer.positions[-1] == state.n_tokens - 1
        else:
            assert sum(layer.counts) == 2 * 12
    assert kept.entries == 12


def test_moments_are_of_what_left(engine):
    state = state_of(engine)
    kept = evict(state, kvviz.policy("adakv", window=4, correction=1, partition=0.5), 12)
    for layer, source in zip(kept.layers, state.layers, strict=True):
        for head, (_, _, positions) in enumerate(layer.heads()):
            gone = torch.ones(state.n_tokens, dtype=torch.bool)
            gone[positions] = False
            assert layer.moments.count[head] == gone.sum()
            torch.testing.assert_close(
                layer.moments.key_sum[head], source.keys[head, gone].sum(0), rtol=1e-4, atol=1e-4
            )
            outer = source.values[head, gone].T @ source.keys[head, gone]
            torch.testing.assert_close(layer.moments.outer_sum[head], outer, rtol=1e-4, atol=1e-4)
    assert kept.moments_bytes == 4 * 2 * (2 * 16 * 16 + 2 * 16 + 1) * 4
    assert kept.bytes == kept.kv_bytes + kept.moments_bytes


@pytest.mark.parametrize("budget", [0, -1, 2.5, float("nan")])
def test_bad_budgets(engine, budget):
    with pytest.raises(ValueError, match="budget"):
        evict(engine.prefill(TEXT), kvviz.policy("sink"), budget)


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("capkv", {"tau": -1.0}, "tau"),
        ("capkv", {"tau": float("nan")}, "tau"),
        ("capkv", {"sinks": -1}, "sinks"),
        ("capkv", {"recent": 2.5}, "recent"),
        ("capkv", {"correction": 2}, "correction"),
        ("capkv", {"partition": 1.5}, "partition"),
        ("capkv", {"bits": 3}, "bits"),
        ("capkv", {"allocation": "even"}, "allocation"),
        ("capkv", {"colour": 1}, "colour"),
        ("kapkv", {}, "capkv"),
    ],
)
def test_bad_policies_say_what_is_allowed(name, options, word):
    with pytest.raises((ValueError, TypeError), match=word):
        kvviz.policy(name, **options)


@pytest.mark.parametrize("name", ["full", *EVERY])
def test_a_policy_can_be_made_again_from_its_settings(name):
    for more in ({}, {"sinks": 7, "recent": 9, "allocation": "adaptive", "correction": 0, "partition": 0.25}):
        policy = kvviz.policy(name, **more)
        assert kvviz.policy(policy.name, **policy.settings()) == policy
    assert kvviz.policy(name).label == kvviz.policy(name).title


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (2, 3), (6, 10)])
def test_what_is_said_to_be_protected_is_what_is_kept_for_nothing(engine, name, sinks, recent):
    """The lowest scores everywhere: only the protected entries that the policy names survive for that reason."""
    state = state_of(engine)
    policy = kvviz.policy(
        name, sinks=sinks, recent=recent, **({"window": 4} if name in ("snapkv", "adakv", "pyramidkv") else {})
    )
    said = policy.protection(state.n_tokens, 20)
    unscored = policy.scorer.unscored
    assert said == (max(sinks, unscored[0]), max(recent, unscored[1]))
    if unscored[0]:
        assert unscored[0] == sinks  # CapKV and EA leave out of their sums what is protected
    again = kvviz.policy(name).with_protection(sinks, recent)
    assert (again.sinks, again.recent) == (sinks, recent)


@pytest.mark.parametrize(("options", "word"), [({"alpha": 0.5}, "adaptive"), ({"beta": 4}, "pyramid")])
def test_shares_of_another_allocation_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        kvviz.policy("capkv", **options)


@pytest.mark.parametrize("allocation", ["uniform", "pyramid", "adaptive"])
@pytest.mark.parametrize("order", ["one batch", "rounds", "sequential"])
def test_layers_refined_together_are_as_each_alone(engine, order, allocation):
    state, chosen = state_of(engine), kvviz.policy("momentkv", order_of_eviction=order, window=8, allocation=allocation)
    scores, budgets = kvviz.evict.score_layers(state, chosen), kvviz.evict.layer_budgets(state, chosen, 24)
    protected = chosen.protected(state.n_tokens, 24, state.layers[0].keys.device)
    assert chosen.scorer.together > 1
    for layer, part in zip(state.layers, evict(state, chosen, 24).layers, strict=True):
        alone = kvviz.evict.keep_mask(layer, chosen, scores[layer.index], budgets[layer.index], protected)
        assert part.positions.tolist() == alone.nonzero()[:, 1].tolist()
        assert part.counts == tuple(alone.sum(1).tolist())
