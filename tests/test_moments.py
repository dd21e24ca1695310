"""Moments: equations 9 to 12, the running sums, and algorithm 1 phase 1, against loops, identities and golden values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvviz.moments import Correction, Moments, evict_sequential

GOLDEN = load_file(Path(__file__).parent / "golden" / "paper_formulas.safetensors")
K, V, Q, KEEP = (GOLDEN[name] for name in ("K", "V", "Q", "keep"))
EVICTED = torch.tensor([i for i in range(len(K)) if i not in KEEP.tolist()])


def close(left, right, atol=1e-9):
    torch.testing.assert_close(left, right, atol=atol, rtol=0)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def attend(query, keys, values, c):
    logits = c * query @ keys.mT
    return logits.softmax(-1) @ values, logits.logsumexp(-1)


# --- statistics and correction -------------------------------------------------------------------------------------------


def test_correction_is_golden():
    moments = Moments((), 8).add(K[EVICTED], V[EVICTED])
    log_Z_R = (Q @ K[KEEP].T / 8**0.5).logsumexp(-1)
    close(moments.log_partition(Q), GOLDEN["error.log_Zhat_E"])
    for order in (0, 1):
        close(moments.predict(Q, order), GOLDEN[f"error.fhat_E.order{order}"])
        close(moments.correct(Q, GOLDEN["error.f_R"], log_Z_R, order), GOLDEN[f"error.out.order{order}"])


def test_residual_is_equation_10():
    moments = Moments((), 8).add(K[:20], V[:20])
    key_mean, value_mean = K[:20].mean(0), V[:20].mean(0)
    covariance = sum(torch.outer(V[i], K[i] - key_mean) for i in range(20))
    expected = [V[j] - value_mean - covariance @ (K[j] - key_mean) / (20 * 8**0.5) for j in range(20, 48)]
    close(moments.residual(K[20:], V[20:]), torch.stack(expected))


def test_residual_is_the_value_while_nothing_is_evicted():
    assert torch.equal(Moments(2, 8).residual(K[None].expand(2, -1, -1), V[None].expand(2, -1, -1))[1], V.float())


def test_residual_vanishes_for_affine_values_of_whitened_keys():
    """The model's slope is (c / n) C, which is W for v = W k + b when c times the keys' covariance is the identity."""
    keys = random(60, 8)
    keys = keys - keys.mean(0)
    root = torch.linalg.cholesky(keys.T @ keys / 60)
    keys = torch.linalg.solve_triangular(root, keys.T, upper=False).T * 8**0.25 + 3
    values = keys @ random(8, 5, seed=1) + random(5, seed=2)
    residual = Moments((), 8, value_dim=5).add(keys, values).residual(keys, values)
    close(residual, torch.zeros_like(residual))


def test_order_and_manner_of_adding_do_not_matter():
    keys, values = random(3, 40, 8), random(3, 40, 6, seed=1)
    mask = random(3, 40, seed=2) > 0
    at_once = Moments(3, 8, value_dim=6, second=True).add(keys, values, mask)
    one_by_one = Moments(3, 8, value_dim=6, second=True)
    for j in torch.randperm(40, generator=torch.Generator().manual_seed(3)).tolist():
        one_by_one.add(keys[:, j : j + 1], values[:, j : j + 1], mask[:, j : j + 1])
    for name in Moments._SUMS:
        close(getattr(at_once, name), getattr(one_by_one, name), 1e-12)
    assert at_once.count.tolist() == mask.sum(1).tolist()
    assert len(set(at_once.count.tolist())) > 1, "the case is ragged"


def test_one_entry_a_head():
    keys, values = random(3, 8), random(3, 8, seed=1)
    moments = Moments(3, 8).add(keys, values)
    close(moments.outer_sum, values[:, :, None] * keys[:, None, :])
    assert moments.count.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_for_half_precision_input(dtype):
    moments = Moments(1, 2, second=True)
    for _ in range(1000):
        moments.add(torch.ones(1, 2, dtype=dtype), torch.ones(1, 2, dtype=dtype))
    for name in Moments._SUMS:
        assert getattr(moments, name).dtype == torch.float32
        assert bool((getattr(moments, name) == 1000).all()), name


def test_masked_entries_may_hold_any_finite_number():
    keys = random(2, 5, 8)
    keys[:, 2] = 1e37
    mask = torch.tensor([True, True, False, True, True]).expand(2, 5)
    made, wanted = Moments(2, 8, second=True).add(keys, keys, mask), Moments(2, 8, second=True)
    wanted.add(keys[:, [0, 1, 3, 4]], keys[:, [0, 1, 3, 4]])
    for name in Moments._SUMS:
        torch.testing.assert_close(getattr(made, name), getattr(wanted, name))


def test_masked_entries_may_hold_anything():
    keys = random(2, 5, 8)
    keys[:, 2] = float("nan")
    mask = torch.tensor([True, True, False, True, True]).expand(2, 5)
    assert bool(Moments(2, 8).add(keys, keys, mask).outer_sum.isfinite().all())


def test_float64_stays():
    moments = Moments(2, 8).add(random(2, 3, 8), random(2, 3, 8))
    assert moments.outer_sum.dtype == torch.float64
    assert moments.predict(random(2, 4, 8)).dtype == torch.float64


@pytest.mark.parametrize("order", [0, 1])
def test_correction_is_exact_when_all_evicted_keys_are_equal(order):
    keys, values, queries = random(30, 8), random(30, 8, seed=1), random(7, 8, seed=2)
    keys[10:] = keys[10]
    c = 0.7
    moments = Moments((), 8, scaling=c).add(keys[10:], values[10:])
    f_R, log_Z_R = attend(queries, keys[:10], values[:10], c)
    close(moments.correct(queries, f_R, log_Z_R, order), attend(queries, keys, values, c)[0])


def test_nothing_evicted_gives_the_output_back():
    f_R = random(2, 3, 8, dtype=torch.float32).bfloat16()
    moments = Moments(2, 8, second=True)
    for partition in (0.0, 1.0):
        out = moments.correct(random(2, 3, 8), f_R, random(2, 3), partition=partition)
        assert out.dtype == torch.bfloat16 and torch.equal(out, f_R)


def test_correction_in_the_log_domain_survives_large_logits():
    moments = Moments((), 8).add(K[EVICTED] * 100, V[EVICTED])
    out = moments.correct(Q * 100, GOLDEN["error.f_R"], torch.full((5,), 3000.0, dtype=torch.float64))
    assert bool(out.isfinite().all())


def test_partition_is_a_lower_bound_by_jensen():
    queries = 3 * random(200, 8)
    truth = (queries @ K[EVICTED].T / 8**0.5).logsumexp(-1)
    estimate = Moments((), 8).add(K[EVICTED], V[EVICTED]).log_partition(queries)
    assert bool((estimate <= truth + 1e-12).all()) and bool((estimate < truth - 0.1).any())


def test_full_partition_is_exact_for_gaussian_keys():
    mix = random(8, 8, seed=1)
    keys, queries = random(200_000, 8) @ mix + random(8, seed=2), 0.5 * random(6, 8, seed=3)
    moments = Moments((), 8, second=True).add(keys, keys)
    truth = (queries @ keys.T / 8**0.5).logsumexp(-1)
    bound = moments.log_partition(queries)
    close(moments.log_partition(queries, 1.0), truth, atol=0.02)
    assert float((truth - bound).min()) > 0.04, "the bound alone is not"
    close(moments.log_partition(queries, 0.5), (bound + moments.log_partition(queries, 1.0)) / 2, atol=1e-9)


def test_bytes_are_those_of_the_sums():
    assert Moments(3, 64).bytes == 4 * 3 * (64 * 64 + 2 * 64 + 1)
    assert Moments(3, 64, second=True).bytes == 4 * 3 * (2 * 64 * 64 + 2 * 64 + 1)


def test_query_groups_and_leading_shapes():
    """[R, Hkv] statistics correct [R, Hkv, g, T, d] queries as each of its heads would alone."""
    keys, values = random(2, 3, 20, 8), random(2, 3, 20, 6, seed=1)
    moments = Moments((2, 3), 8, value_dim=6, second=True).add(keys, values)
    queries, f_R, log_Z_R = random(2, 3, 4, 5, 8, seed=2), random(2, 3, 4, 5, 6, seed=3), random(2, 3, 4, 5, seed=4)
    out = moments.correct(queries, f_R, log_Z_R, partition=0.5)
    assert out.shape == f_R.shape
    for r in range(2):
        for h in range(3):
            alone = Moments((), 8, value_dim=6, second=True).add(keys[r, h], values[r, h])
            for g in range(4):
                close(out[r, h, g], alone.correct(queries[r, h, g], f_R[r, h, g], log_Z_R[r, h, g], partition=0.5))


def test_stacks_keep_every_row_its_own():
    rows = [
        Moments(3, 8, second=second).add(random(3, n, 8, seed=n), random(3, n, 8, seed=n + 1))
        for n, second in ((5, 0), (9, 1))
    ]
    rows = [*rows, Moments(3, 8).to(torch.float64)]
    settings = [(0, 0.0), (1, 0.7), (1, 0.0)]
    queries, f_R, log_Z_R = random(3, 3, 4, 8), random(3, 3, 4, 8, seed=1), random(3, 3, 4, seed=2)
    alone = [m.correct(q, f, z, *s) for m, q, f, z, s in zip(rows, queries, f_R, log_Z_R, settings, strict=True)]
    stacked = Correction.stack([m.finalise(*s) for m, s in zip(rows, settings, strict=True)])
    close(stacked.apply(queries, f_R, log_Z_R), torch.stack(alone), 1e-12)
    both = Moments.stack([rows[0], rows[2]])
    assert both.lead == (2, 3)
    close(both.correct(queries[:2], f_R[:2], log_Z_R[:2])[0], rows[0].correct(queries[0], f_R[0], log_Z_R[0]), 1e-12)
    close(both[0].outer_sum, rows[0].outer_sum, 0)
    close(both[:, 1].key_sum[0], rows[0].key_sum[1], 0)
    with pytest.raises(ValueError, match=r"Correction\.stack"):
        Moments.stack(rows)


def test_a_clone_is_independent_and_adding_renews_the_correction():
    moments = Moments((), 8).add(K[:5], V[:5])
    copy, before = moments.clone(), moments.predict(Q)
    moments.add(K[5:9], V[5:9])
    assert copy.count == 5 and moments.count == 9
    close(copy.predict(Q), before, 0)
    assert not torch.allclose(moments.predict(Q), before)
    assert moments.finalise() is moments.finalise()


@pytest.mark.parametrize("partition", [-0.1, 1.1, float("nan")])
def test_partition_outside_its_range(partition):
    with pytest.raises(ValueError, match=r"between 0 .* and 1"):
        Moments(1, 8, second=True).finalise(1, partition)


def test_errors_say_the_remedy():
    with pytest.raises(ValueError, match="second=True"):
        Moments(1, 8).finalise(1, 0.5)
    with pytest.raises(ValueError, match="order is 2"):
        Moments(1, 8).finalise(2)
    with pytest.raises(ValueError, match="float32 or float64"):
        Moments(1, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="scaling"):
        Moments(1, 8, scaling=float("nan"))
    with pytest.raises(ValueError, match="do not fit heads"):
        Moments(2, 8).add(random(3, 5, 8), random(3, 5, 8))
    with pytest.raises(ValueError, match="reshape query heads"):
        Moments(2, 8).predict(random(6, 5, 8))


# --- algorithm 1, phase 1 ------------------------------------------------------------------------------------------------


def algorithm_1(keys, values, queries, budget, c, protected=()):
    """Lines 3 to 15 as printed; the attention is the mean over the queries."""
    left, n, order = list(range(len(keys))), 0, []
    s_k, s_v, S = (
        torch.zeros_like(keys[0]),
        torch.zeros_like(values[0]),
        torch.zeros(values.shape[1], keys.shape[1]).to(keys),
    )
    while len(left) > budget:
        k_, v_, C = (s_k / n, s_v / n, S - torch.outer(s_v, s_k) / n) if n else (s_k, s_v, S)
        alpha = (c * queries @ keys[left].T).softmax(-1).mean(0)
        residual = [values[j] - v_ - (C @ (keys[j] - k_) * c / n if n else 0) for j in left]
        scores = [
            float(a * r.norm()) if j not in protected else float("inf")
            for a, r, j in zip(alpha, residual, left, strict=True)
        ]
        gone = left.pop(min(range(len(left)), key=scores.__getitem__))
        n, s_k, s_v, S = n + 1, s_k + keys[gone], s_v + values[gone], S + torch.outer(values[gone], keys[gone])
        order.append(gone)
    return order


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("budget", [24, 8])
def test_sequential_is_golden(budget, dtype):
    order = evict_sequential(K.to(dtype), V.to(dtype), Q[-1:].to(dtype), budget)
    name = f"momentkv.sequential.L{budget}"
    assert torch.equal(order, GOLDEN[f"{name}.evicted_in_order"])
    moments = Moments((), 8).add(K[order], V[order])
    for sums in ("key_sum", "value_sum", "outer_sum"):
        close(getattr(moments, sums), GOLDEN[f"{name}.{sums}"])


def test_sequential_is_algorithm_1_with_several_queries_heads_counts_and_protection():
    heads, n, d, c = 3, 60, 8, 0.5
    keys, values = random(heads, n, d) + 2 * random(heads, 1, d, seed=9), random(heads, n, 6, seed=1) + 1
    queries = random(heads, 2, 3, d, seed=2)  # [H, g, w, d]
    protected = torch.zeros(n, dtype=torch.bool)
    protected[[0, 57, 58, 59]] = True
    budget = torch.tensor([10, 4, 33])
    order = evict_sequential(keys, values, queries, budget, protected=protected, scaling=c)
    assert order.shape == (heads, n - 4)
    for h in range(heads):
        expected = algorithm_1(keys[h], values[h], queries[h].flatten(0, 1), int(budget[h]), c, {0, 57, 58, 59})
        assert order[h].tolist() == expected + [-1] * (n - 4 - len(expected))


def test_renormalised_attention_matters_with_several_queries():
    """The case tells algorithm 1 from one with the attention of the start."""
    keys, values, queries = 2 * random(40, 4), random(40, 4, seed=1), 2 * random(3, 4, seed=2)
    order = evict_sequential(keys, values, queries, 5)
    assert order.tolist() == algorithm_1(keys, values, queries, 5, 0.5)
    fixed = (queries @ keys.T / 2).softmax(-1).mean(0)
    left, moments, frozen = list(range(40)), Moments((), 4), []
    while len(left) > 5:
        best = (fixed[left] * moments.residual(keys[left], values[left]).norm(dim=-1)).argmin()
        frozen.append(left.pop(int(best)))
        moments.add(keys[frozen[-1]], values[frozen[-1]])
    assert order.tolist() != frozen


def test_sequential_in_float32_makes_choices_as_good_as_exact_ones():
    """600 steps with keys far from the origin: each float32 choice is within 1e-3 of the exact minimum of that step."""
    keys, values, queries = random(700, 16) + 4 * random(16, seed=5), random(700, 16, seed=1), random(1, 16, seed=2)
    order = evict_sequential(keys.float(), values.float(), queries.float(), 100).tolist()
    assert len(set(order)) == 600
    alpha = (queries[0] @ keys.T / 4).softmax(-1)
    left, moments = torch.ones(700, dtype=torch.bool), Moments((), 16).to(torch.float64)
    for step, j in enumerate(order):
        if step % 50 == 49:
            score = alpha * moments.residual(keys, values).norm(dim=-1)
            assert score[j] <= score[left].min() * 1.001
        left[j] = False
        moments.add(keys[j], values[j])


@pytest.mark.parametrize("budget", [48, 100])
def test_budget_that_covers_everything_evicts_nothing(budget):
    assert evict_sequential(K, V, Q, budget).tolist() == []


def test_a_single_token():
    assert evict_sequential(K[:1], V[:1], Q, 1).tolist() == []


def test_sequential_errors():
    with pytest.raises(ValueError, match="at least one entry"):
        evict_sequential(K, V, Q, 0)
    with pytest.raises(ValueError, match="only 8 are unprotected"):
        evict_sequential(K, V, Q, 20, protected=torch.arange(48) < 40)
