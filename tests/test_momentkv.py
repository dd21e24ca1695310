"""MomentKV's scorer: rounds and sequential eviction against loops, blocks, exact counts, and what must never leave."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvviz.allocation import Adaptive, keep
from kvviz.moments import Moments, evict_sequential
from kvviz.policies.attention_scores import window_attention
from kvviz.policies.momentkv import MomentKV
from kvviz.rotary import Rotary
from kvviz.state import LayerState

SETTINGS = [
    MomentKV(window=8),
    MomentKV(window=8, block=1),
    MomentKV(window=8, rounds=3, block=5),
    MomentKV(window=8, order_of_eviction="one batch"),
    MomentKV(window=8, order_of_eviction="sequential"),
]


def layer(n: int, heads: int = 2, groups: int = 3, d: int = 8, seed: int = 0, dtype=torch.float64) -> LayerState:
    generator = torch.Generator().manual_seed(seed)
    keys, values, queries = (
        torch.randn(h, n, d, generator=generator, dtype=torch.float64) for h in (heads, heads, heads * groups)
    )
    return LayerState.from_tensors(
        (keys + 1).to(dtype), values.to(dtype), queries.to(dtype), Rotary.from_theta(1e4, d), scaling=0.4
    )


def ends(n: int, sinks: int = 1, recent: int = 8) -> torch.Tensor:
    index = torch.arange(n)
    return (index < sinks) | (index >= n - recent)


def alpha(state: LayerState, window: int = 8) -> torch.Tensor:
    return window_attention(state, window).unflatten(0, (-1, state.groups)).mean((1, 2))


def order(refined: torch.Tensor) -> list[list[int]]:
    """Positions in order of eviction, head by head."""
    return [sorted((row < 0).nonzero()[:, 0].tolist(), key=row.tolist().__getitem__) for row in refined]


def test_score_is_attention_times_the_values_norm():
    state = layer(50)
    received = torch.zeros(2, 50, dtype=torch.float64)
    for q in range(6):
        for t in range(42, 50):
            weights = (0.4 * state.keys[q // 3, : t + 1] @ state.queries[q, t]).softmax(0)
            received[q // 3, : t + 1] += weights / 24
    torch.testing.assert_close(
        MomentKV(window=8).score(state), received * state.values.norm(dim=-1), atol=1e-12, rtol=0
    )


def test_score_on_a_live_cache_goes_on_from_what_was_evicted_before():
    state = layer(50)
    moments = Moments(2, 8, scaling=0.4).add(state.keys[:, :9] + 1, state.values[:, :9])
    scores = MomentKV(window=8).score(replace(state, moments=moments))
    expected = alpha(state) * moments.residual(state.keys, state.values).norm(dim=-1)
    torch.testing.assert_close(scores, expected, atol=1e-12, rtol=0)
    step = MomentKV(window=8).while_decoding(1)
    assert step.window == 1 and MomentKV(window=8).while_decoding(512).window == 8
    assert torch.equal(step.refine(state, scores, torch.tensor([49, 49]), ends(50)), scores)


def brute_rounds(state, head, losses, free, block, rounds):
    """Whole blocks by the mean score of their members, statistics between rounds, the last block in part."""
    a, moments = alpha(state)[head], Moments((), state.keys.shape[2], scaling=state.scaling)
    blocks, gone = [free[i : i + block] for i in range(0, len(free), block)], []
    for part in range(1, rounds + 1):
        target = losses * part // rounds
        score = (a * moments.residual(state.keys[head], state.values[head]).norm(dim=-1)).tolist()
        new = []
        for members in sorted(blocks, key=lambda members: sum(score[j] for j in members) / len(members)):
            members = sorted(members, key=score.__getitem__)
            room = target - len(gone) - len(new)
            if room < len(members) and part < rounds:
                break
            new += members[:room]
        blocks = [members for members in blocks if members[0] not in new]
        gone += new
        moments.add(state.keys[head][new], state.values[head][new])
    return gone


@pytest.mark.parametrize("block, rounds", [(1, 16), (4, 16), (4, 5), (7, 3), (4, 1), (100, 2)])
def test_rounds_are_the_plain_loop(block, rounds):
    state, protected, counts = layer(90), ends(90), torch.tensor([21, 46])
    scorer = MomentKV(window=8, block=block, rounds=rounds)
    refined = scorer.refine(state, scorer.score(state), counts, protected)
    free = list(range(1, 82))
    assert order(refined) == [brute_rounds(state, h, 90 - int(counts[h]), free, block, rounds) for h in range(2)]
    if rounds == 1:
        batch = MomentKV(window=8, block=block, order_of_eviction="one batch")
        assert torch.equal(batch.refine(state, batch.score(state), counts, protected), refined)


def test_sequential_is_algorithm_1():
    """For a window of one query, whose attention no renormalisation changes, the function on plain tensors agrees."""
    state, protected, counts = layer(60), ends(60), torch.tensor([20, 31])
    scorer = MomentKV(window=1, order_of_eviction="sequential")
    queries = state.queries[:, -1:].unflatten(0, (2, 3))
    queries[:, 1:] = queries[:, :1]
    state = replace(state, queries=queries.flatten(0, 1))
    refined = scorer.refine(state, scorer.score(state), counts, protected)
    expected = evict_sequential(state.keys, state.values, queries, counts, protected=protected, scaling=0.4)
    assert order(refined) == [[j for j in row if j >= 0] for row in expected.tolist()]


def test_sequential_is_one_entry_a_round():
    state, protected, counts = layer(120), ends(120), torch.tensor([30, 30])

    def refined(**options):
        scorer = MomentKV(window=8, **options)
        return scorer.refine(state, scorer.score(state), counts, protected)

    goal = refined(order_of_eviction="sequential")
    assert torch.equal(refined(block=1, rounds=90), goal)
    assert not torch.equal(refined(block=1, rounds=16), goal)


@pytest.mark.parametrize("scorer", SETTINGS)
def test_counts_are_exact_and_the_protected_stay(scorer):
    for n in (1, 5, 9, 10, 11, 40, 97):
        state, protected = layer(n, seed=n), ends(n)
        scores = scorer.score(state)
        for budget in {1, min(n, 5), min(n, 9), max(1, n - 2), n}:
            counts = Adaptive().head_counts(scores, budget, protected)
            refined = scorer.refine(state, scores, counts, protected)
            stays = keep(refined, counts, protected)
            assert torch.equal(stays.sum(1), counts)
            assert not bool((refined[:, protected] < 0).any()), "a protected entry left"
            lost = (n - counts).clamp(max=int((~protected).sum()))
            assert torch.equal((refined < 0).sum(1), lost)
            assert bool((refined >= 0)[:, ~protected].eq(stays[:, ~protected]).all())
            for h in range(2):
                ranks = refined[h][refined[h] < 0].sort().values
                assert ranks.tolist() == list(range(-int(lost[h]), 0))


def test_blocks_stay_whole_but_for_the_last():
    state, protected = layer(90), ends(90)
    scorer = MomentKV(window=8, block=4)
    refined = scorer.refine(state, scorer.score(state), torch.tensor([30, 31]), protected)
    gone = (refined < 0)[:, 1:81].view(2, 20, 4).sum(2)
    assert [row.count(4) + row.count(0) for row in gone.tolist()] >= [19, 19]
    assert gone.tolist()[0] != gone.tolist()[1]


@pytest.mark.parametrize("scorer", SETTINGS)
def test_constant_keys_and_values(scorer):
    state = layer(60)
    state = LayerState.from_tensors(torch.ones(2, 60, 8), torch.ones(2, 60, 8), torch.ones(6, 60, 8), state.rotary)
    refined = scorer.refine(state, scorer.score(state), torch.tensor([12, 20]), ends(60))
    stays = keep(refined, torch.tensor([12, 20]), ends(60))
    assert bool(stays[:, ends(60)].all()) and stays.sum(1).tolist() == [12, 20]


@pytest.mark.parametrize("scorer", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(scorer, dtype):
    state, counts = layer(70, dtype=dtype), torch.tensor([20, 30])
    scores = scorer.score(state)
    assert scores.dtype == torch.float32
    refined = scorer.refine(state, scores, counts, ends(70))
    assert bool(refined.isfinite().all()) and (refined < 0).sum(1).tolist() == [50, 40]


def test_a_scattered_protection_is_respected():
    protected = torch.zeros(50, dtype=torch.bool)
    protected[[0, 7, 8, 30, 49]] = True
    for scorer in SETTINGS:
        refined = scorer.refine(layer(50), scorer.score(layer(50)), torch.tensor([6, 9]), protected)
        assert not bool((refined[:, protected] < 0).any()) and (refined < 0).sum(1).tolist() == [44, 41]


def test_published_setting_follows_the_window():
    published = MomentKV(window=16).published
    assert (published.sinks, published.recent, published.allocation, published.correction) == (1, 16, "adaptive", 1)


@pytest.mark.parametrize(
    "option", [{"window": 0}, {"block": 0}, {"block": 2.5}, {"rounds": "many"}, {"order_of_eviction": "at once"}]
)
def test_options_out_of_range(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        MomentKV(**option)
