"""The decomposition of the error: golden values, its identities, and the cases where nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvviz.errors import decompose, decompose_sets
from kvviz.moments import Moments

GOLDEN = load_file(Path(__file__).parent / "golden" / "paper_formulas.safetensors")
K, V, Q, KEEP = (GOLDEN[name] for name in ("K", "V", "Q", "keep"))
PLAIN = [
    "f",
    "f_R",
    "f_E",
    "w_E",
    "cos",
    "gamma",
    "relative_error",
    "parallel",
    "perpendicular",
    "log_Z_E",
    "log_Zhat_E",
]


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(left, right, atol=1e-9):
    torch.testing.assert_close(left, right, atol=atol, rtol=0)


@pytest.mark.parametrize("order", [0, 1])
def test_golden(order):
    parts = decompose(Q, K, V, KEEP, order=order)
    for name in PLAIN:
        close(parts[name], GOLDEN[f"error.{name}"])
    close(parts.fhat_E, GOLDEN[f"error.fhat_E.order{order}"])
    close(parts.out, GOLDEN[f"error.out.order{order}"])


@pytest.fixture
def heads():
    """Hq = 6, P = 7, Hkv = 2, N = 50, ragged."""
    kept = random(2, 50, seed=4) > torch.tensor([[0.0], [1.0]])
    return random(6, 7, 8), random(2, 50, 8, seed=1), random(2, 50, 8, seed=2), kept


def test_heads_are_one_by_one(heads):
    query, keys, values, kept = heads
    assert len(set(kept.sum(1).tolist())) == 2, "the case is ragged"
    parts = decompose(query, keys, values, kept, scaling=0.4)
    for h in range(6):
        alone = decompose(query[h], keys[h // 3], values[h // 3], kept[h // 3], scaling=0.4)
        for name in parts:
            close(parts[name][h], alone[name])


def test_identities(heads):
    query, keys, values, kept = heads
    p = decompose(query, keys, values, kept)
    logits = query.view(2, 21, 8) @ keys.mT / 8**0.5
    close(p.f, (logits.softmax(-1) @ values).view(6, 7, 8))
    close((1 - p.w_E)[..., None] * p.f_R + p.w_E[..., None] * p.f_E, p.f)
    error, size = (p.f - p.f_R).norm(dim=-1), p.f.norm(dim=-1)
    close(p.parallel**2 + p.perpendicular**2, error**2)
    close(p.relative_error, error / size)
    close(p.relative_error, p.w_E * p.gamma)
    close(torch.logaddexp(p.log_Z_R, p.log_Z_E), logits.logsumexp(-1).view(6, 7))
    close(p.corrected_error, (p.f - p.out).norm(dim=-1) / size)
    assert bool((p.log_Zhat_E <= p.log_Z_E + 1e-12).all()), "Jensen"
    close(p.cos_estimate, torch.cosine_similarity(p.f_E, p.fhat_E, dim=-1))


def test_it_is_a_mapping_under_the_golden_names():
    parts = decompose(Q, K, V, KEEP)
    assert set(PLAIN) < set(parts) and len(parts) == len(dict(parts)) == 16
    assert parts["w_E"] is parts.w_E
    with pytest.raises(KeyError, match="there are f, f_R"):
        parts["nothing"]


def test_kept_may_be_positions_or_a_mask_for_one_head_or_all(heads):
    query, keys, values, _ = heads
    index = torch.tensor([3, 0, 41])
    mask = torch.zeros(50, dtype=torch.bool)
    mask[index] = True
    for kept in (mask, index.expand(2, 3), mask.expand(2, 50)):
        close(decompose(query, keys, values, kept).f_R, decompose(query, keys, values, index).f_R, 0)
    close(decompose(query, keys, values, index).f_R[4], decompose(query[4], keys[1], values[1], mask).f_R)


def test_own_moments_correct_the_output():
    """Statistics of other entries than the evicted (a decode that went on) are used as they are."""
    moments = Moments(1, 8, second=True).add(K[None, :30], V[None, :30])
    single = moments[0]
    parts = decompose(Q, K, V, KEEP, moments=single, partition=0.5)
    close(parts.fhat_E, single.predict(Q))
    close(parts.log_Zhat_E, single.log_partition(Q, 0.5))
    close(parts.out, single.correct(Q, parts.f_R, parts.log_Z_R, partition=0.5))
    close(decompose(Q, K, V, KEEP, moments=moments, partition=0.5).out, parts.out, 0)


def test_nothing_evicted():
    parts = decompose(Q, K, V, torch.ones(48, dtype=torch.bool))
    for name in ("w_E", "gamma", "relative_error", "parallel", "perpendicular", "corrected_error"):
        assert bool((parts[name] == 0).all()), name
    close(parts.cos, torch.ones(5).double())
    close(parts.cos_estimate, torch.ones(5).double())
    assert torch.equal(parts.f, parts.f_R) and torch.equal(parts.out, parts.f_R)
    assert bool((parts.log_Z_E == -torch.inf).all() & (parts.log_Zhat_E == -torch.inf).all())
    assert not any(bool(part.isnan().any()) for part in parts.values())


def test_one_head_may_lose_nothing_while_another_does():
    mask = torch.ones(2, 48, dtype=torch.bool)
    mask[1, 5:] = False
    parts = decompose(Q.expand(2, 5, 8), K.expand(2, 48, 8), V.expand(2, 48, 8), mask)
    assert bool((parts.w_E[0] == 0).all()) and bool((parts.w_E[1] > 0).all())
    assert not any(bool(part.isnan().any()) for part in parts.values())


def test_one_query_and_one_token():
    parts = decompose(Q[0], K, V, KEEP)
    close(parts.f, GOLDEN["error.f"][0])
    assert parts.w_E.shape == ()
    assert float(decompose(Q[0], K[:1], V[:1], torch.tensor([0])).w_E) == 0


def test_far_logits_underflow_nothing():
    """Evicted entries 1,000 below the best have weight 0, and still an output and a partition function of their own."""
    keys = K.clone()
    keys[KEEP] += 1000 * Q[0] / Q[0].norm() ** 2 * 8**0.5
    parts = decompose(Q[:1], keys, V, KEEP)
    assert float(parts.w_E) == 0
    close(parts.f_E, GOLDEN["error.f_E"][:1])
    close(parts.log_Z_E, GOLDEN["error.log_Z_E"][:1])


def test_precision():
    assert decompose(Q.bfloat16(), K.bfloat16(), V.bfloat16(), KEEP).f.dtype == torch.float32
    single = decompose(Q.float(), K.float(), V.float(), KEEP)
    assert single.f.dtype == torch.float32
    close(single.relative_error.double(), GOLDEN["error.relative_error"], 1e-5)


def test_a_head_that_keeps_nothing():
    with pytest.raises(ValueError, match="at least one"):
        decompose(Q, K, V, torch.zeros(48, dtype=torch.bool))


FAMILIES = {
    "nested": lambda score: [score > cut for cut in (2.0, 1.0, 0.3, -0.4, -9.0)],
    "alike": lambda score: [(score + 0.3 * tau * random(2, 50, seed=9)) > 0.5 for tau in range(6)],
    "anything": lambda score: [random(2, 50, seed=seed) > 0 for seed in range(5)],
    "one": lambda score: [score > 0],
    "all and one": lambda score: [score > -9, score > 1.5, score > -9],
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("order", "partition"), [(0, 0.0), (1, 0.0), (1, 0.7)])
def test_sets_together_are_each_alone(family, order, partition):
    query, keys, values = random(6, 7, 8), random(2, 50, 8, seed=1), random(2, 50, 8, seed=2)
    score = random(2, 50, seed=4) + torch.tensor([[0.0], [0.7]])
    score[:, 0] = 5  # every head keeps something
    sets = torch.stack(FAMILIES[family](score))
    sets[:, :, 0] = True
    together = decompose_sets(query, keys, values, sets, scaling=0.4, order=order, partition=partition)
    for number, kept in enumerate(sets):
        alone = decompose(query, keys, values, kept, scaling=0.4, order=order, partition=partition)
        for name in alone:
            close(together[name][number], alone[name], 1e-9)


def test_sets_together_in_single_and_half_precision():
    """A sink takes nearly all attention and goes; what it leaves behind must not drown the rest."""
    query, keys, values = random(2, 5, 8), random(1, 60, 8, seed=1), random(1, 60, 8, seed=2)
    keys[0, 3] += 12 * query.mean((0, 1)) / query.mean((0, 1)).norm()
    sets = torch.ones(3, 1, 60, dtype=torch.bool)
    sets[0, 0, 3] = sets[1, 0, 30:] = sets[2, 0, 3] = sets[2, 0, 50:] = False
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (each.to(dtype) for each in (query, keys, values))
        together = decompose_sets(q, k, v, sets)
        for number, kept in enumerate(sets):
            alone = decompose(q.double(), k.double(), v.double(), kept)
            for name in alone:
                assert together[name].dtype == torch.float32
                torch.testing.assert_close(together[name][number].double(), alone[name], atol=1e-5, rtol=1e-5)


def test_sets_together_underflow_nothing():
    keys = K.clone()
    keys[KEEP] += 1000 * Q[0] / Q[0].norm() ** 2 * 8**0.5
    mask = torch.zeros(48, dtype=torch.bool)
    mask[KEEP] = True
    parts = decompose_sets(Q[None, :1], keys[None], V[None], mask[None, None].expand(2, 1, 48))
    for number in range(2):
        close(parts.f_E[number, 0], GOLDEN["error.f_E"][:1])
        close(parts.log_Z_E[number, 0], GOLDEN["error.log_Z_E"][:1])


def test_sets_of_which_one_keeps_nothing():
    sets = torch.ones(3, 1, 48, dtype=torch.bool)
    sets[1] = False
    with pytest.raises(ValueError, match="at least one"):
        decompose_sets(Q[None], K[None], V[None], sets)
