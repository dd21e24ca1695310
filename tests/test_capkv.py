"""CapKV against the printed equations, in any range of weights, and the greedy search that it approximates."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import mpmath
import pytest
import torch
from safetensors.torch import load_file

from kvviz.policies import score, scorer
from kvviz.policies.capkv import SMALLEST, CapKV
from kvviz.policies.future_queries import future_covariance, future_mean
from kvviz.policies.greedy_logdet import rank_greedily
from kvviz.policies.leverage import log_leverage, quadratic_forms
from kvviz.rotary import Rotary
from kvviz.state import LayerState

PAPER = load_file(Path(__file__).parent / "golden" / "paper_formulas.safetensors")


def tensors(heads=2, groups=3, n=30, d=6, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(h, n, d, generator=draw, dtype=torch.float64).to(dtype) for h in (heads, heads, heads * groups)
    )


def layer_of(key, value, query, **more):
    return LayerState.from_tensors(key, value, query, Rotary.from_theta(10000.0, key.shape[-1]), **more)


def ridge_leverage(outputs, weights, inside=None):
    """w_i u_i' A^-1 u_i of one head by a loop, and A^-1; `inside`: the weights in A, where they differ."""
    inside = weights if inside is None else inside
    capacity = torch.eye(outputs.shape[1], dtype=outputs.dtype)
    for u, w in zip(outputs, inside, strict=True):
        capacity += w * torch.outer(u, u)
    inverse = torch.linalg.inv(capacity)
    return torch.stack([w * u @ inverse @ u for u, w in zip(outputs, weights, strict=True)]), inverse


def paper_score(key, value, mu, tau):
    return score("capkv", key[None], value[None], key[None], variant="paper", tau=tau, mu=mu)[0]


# --- the printed equations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0, 1, 5])
def test_the_printed_equations(tau):
    ours = paper_score(PAPER["K"], PAPER["V"], PAPER["mu"], tau)
    torch.testing.assert_close(ours, PAPER[f"capkv_paper.tau{tau}"], rtol=1e-9, atol=0)


def test_weights_that_overflow_float64():
    """log w reaches 1,327, and e^709 is the largest float64."""
    alignment = PAPER["K"] @ PAPER["mu"]
    tau = float(PAPER["capkv_paper.overflow.logw_max"]) / alignment.max().item()
    assert math.isclose(tau, 200)
    ours = paper_score(PAPER["K"], PAPER["V"], PAPER["mu"], tau)
    expected = exact_log_leverage(PAPER["V"], tau * alignment)
    assert ours.isfinite().all() and (ours > 0).all()
    torch.testing.assert_close(ours, torch.where(expected > SMALLEST, expected.exp(), ours), rtol=1e-9, atol=0)
    assert torch.equal(ours.argsort()[:40], expected.argsort()[:40])  # no ties at 0


def exact_log_leverage(values, log_weights):
    """log s_i with 2,000 decimal digits."""
    with mpmath.workdps(2000):
        vectors = [mpmath.matrix(v.tolist()) for v in values]
        weights = [mpmath.exp(mpmath.mpf(w)) for w in log_weights.tolist()]
        capacity = mpmath.eye(values.shape[1])
        for v, w in zip(vectors, weights, strict=True):
            capacity += w * v * v.T
        inverse = mpmath.inverse(capacity)
        forms = [w * (v.T * inverse * v)[0] for v, w in zip(vectors, weights, strict=True)]
        return torch.tensor([float(mpmath.log(s)) if s else -math.inf for s in forms], dtype=torch.float64)


@pytest.mark.parametrize("spread, offset", [(3, 0), (60, 0), (60, -200), (300, 300)])
@pytest.mark.parametrize("kind", ["plain", "copies", "zeros"])
def test_log_leverage_in_any_range_of_weights(spread, offset, kind):
    draw = torch.Generator().manual_seed(1)
    values = (torch.randn(24, 4, generator=draw, dtype=torch.float64) * 8).round() / 8  # sums are exact
    log_weights = torch.randn(24, generator=draw, dtype=torch.float64) * spread + offset
    heaviest = log_weights.argsort(descending=True)
    if kind == "copies":  # nine times the heaviest value, and a sum of two: the first 2 d rows are no basis
        values[heaviest[1:9]] = values[heaviest[0]].clone()
        values[heaviest[11]] = values[heaviest[9]] + values[heaviest[0]]
    if kind == "zeros":
        values[heaviest[0]] = 0
        values[:, 1][::2] = 0
    expected = exact_log_leverage(values, log_weights)
    ours = log_leverage(values[None], log_weights[None])[0]
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-9)


def test_log_leverage_looks_beyond_near_copies():
    """The largest values differ by 1e-8 of their size only; a basis of them would lose all digits."""
    draw = torch.Generator().manual_seed(2)
    values = torch.randn(40, 4, generator=draw, dtype=torch.float64)
    values[:20] = 10 + 1e-8 * values[:20]
    log_weights = torch.zeros(40, dtype=torch.float64)
    expected = exact_log_leverage(values, log_weights)
    torch.testing.assert_close(log_leverage(values[None], log_weights[None])[0], expected, rtol=1e-9, atol=1e-9)


def test_the_paper_variant_never_overflows():
    for dtype in (torch.float32, torch.bfloat16):
        given = tensors(n=200, d=16, dtype=dtype)
        for tau in (0.0, 5.0, 1e4):
            scores = score("capkv", *given, variant="paper", tau=tau)
            assert scores.isfinite().all() and (scores >= 0).all() and (scores <= 1).all()
            assert len(scores[0].unique()) > 150  # an order to choose by, not ties at 0 (bf16 has equal keys)


# --- identities ---------------------------------------------------------------------------------------------


@pytest.fixture(params=[0.0, 0.5, 2.0])
def paper_head(request):
    """tau, key, value, mu of one head."""
    key, value, _ = tensors(heads=1)
    return request.param, key[0], value[0], torch.linspace(-1, 1, 6, dtype=torch.float64)


def test_scores_are_shares_that_add_up(paper_head):
    tau, key, value, mu = paper_head
    ours = paper_score(key, value, mu, tau)
    _, inverse = ridge_leverage(value, (tau * key @ mu).exp())
    assert (ours >= 0).all() and (ours < 1).all()
    torch.testing.assert_close(ours.sum(), 6 - inverse.trace())


def test_turning_all_values_changes_nothing(paper_head):
    tau, key, value, mu = paper_head
    rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    torch.testing.assert_close(paper_score(key, value @ rotation, mu, tau), paper_score(key, value, mu, tau))


def test_a_duplicate_lowers_both_copies(paper_head):
    tau, key, value, mu = paper_head
    alone = paper_score(key, value, mu, tau)
    twice = paper_score(torch.cat((key, key[3:4])), torch.cat((value, value[3:4])), mu, tau)
    torch.testing.assert_close(twice[3], twice[-1])
    assert twice[3] < alone[3] - 1e-6


def test_tau_zero_is_plain_ridge_leverage():
    key, value, query = tensors()
    for h in range(2):
        expected, _ = ridge_leverage(value[h], torch.ones(30, dtype=torch.float64))
        torch.testing.assert_close(score("capkv", key, value, query, variant="paper", tau=0)[h], expected)
        expected, _ = ridge_leverage(value[h, 4:], torch.ones(26), torch.full((26,), 1 + 1e-6))
        torch.testing.assert_close(score("capkv", key, value, query, tau=0)[h, 4:], expected)


def test_dividing_the_weights_is_not_neutral():
    weights = torch.rand(1, 1, 30, dtype=torch.float64) * 50
    _, value, _ = tensors(heads=1)
    plain = weights * quadratic_forms(value, weights)
    divided = weights / weights.max() * quadratic_forms(value, weights / weights.max())
    assert not torch.equal(plain[0, 0].argsort(), divided[0, 0].argsort())


# --- the options, by brute force ----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["published", "paper"])
@pytest.mark.parametrize("gating", ["mean", "covariance"])
@pytest.mark.parametrize("output", ["value", "exact"])
def test_every_option_by_loops(variant, gating, output):
    key, value, query = tensors()
    o_proj = torch.randn(20, 36, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) / 4
    layer = layer_of(key, value, query, o_proj=o_proj)
    method = CapKV(tau=1.5, variant=variant, gating=gating, output=output, future_positions=32)
    mu, sigma = future_mean(layer, 32), future_covariance(layer, 32)
    first = 4 if variant == "published" else 0
    expected = torch.zeros(2, 30 - first, dtype=torch.float64)
    for h in range(6):
        k, v = key[h // 3, first:], value[h // 3, first:]
        log_weights = []
        for row in k:
            factors = (row, mu[h]) if gating == "mean" else (row**2, sigma[h].diagonal())
            norms = factors[0].norm() * factors[1].norm() if variant == "published" else 1
            log_weights.append(1.5 * factors[0] @ factors[1] / norms)
        weights = torch.stack(log_weights).exp()
        if variant == "published":
            weights = weights / weights.max()
        u = v if output == "value" else v @ o_proj[:, h * 6 : h * 6 + 6].T  # W_O v, as wide as the model
        inside = weights + 1e-6 if variant == "published" else weights
        expected[h // 3] += ridge_leverage(u, weights, inside)[0] / 3
    ours = method.score(layer)
    torch.testing.assert_close(ours[:, first:], expected)
    if first:
        torch.testing.assert_close(ours[:, :first], expected.amax(1, keepdim=True).expand(-1, first))


def test_exact_output_with_fewer_dimensions_than_a_head():
    """W_O' W_O is singular then; the exact output needs no inverse of it."""
    key, value, query = tensors()
    o_proj = torch.randn(3, 36, dtype=torch.float64)
    layer = layer_of(key, value, query, o_proj=o_proj)
    ours = CapKV(tau=0, variant="paper", output="exact").score(layer)
    expected = sum(ridge_leverage(value[0] @ o_proj[:, h * 6 : h * 6 + 6].T, torch.ones(30))[0] for h in range(3)) / 3
    torch.testing.assert_close(ours[0], expected)


def test_tau_moves_the_choice_towards_the_expected_query():
    key, value, query = tensors(n=200)
    layer = layer_of(key, value, query)
    mu = future_mean(layer, 512)[:3].mean(0)
    chosen = [CapKV(tau=tau).score(layer)[0, 4:].topk(40).indices + 4 for tau in (0, 5)]
    aligned = [torch.cosine_similarity(key[0, rows], mu, dim=-1).mean() for rows in chosen]
    assert aligned[1] > aligned[0] + 0.1


def test_quadratic_forms_outlive_a_float32_factor_that_fails():
    """1e8 + 1 is 1e8 in float32, so A has no Cholesky factor there; it is done again in float64."""
    value, weights = torch.full((1, 1, 2), 1e4), torch.ones(1, 1, 1)
    assert torch.linalg.cholesky_ex(value.mT @ value + torch.eye(2)).info > 0
    forms = quadratic_forms(value, weights)
    assert forms.dtype == torch.float32
    torch.testing.assert_close(forms, torch.full((1, 1, 1), 2e8 / (1 + 2e8)))


# --- greedy -------------------------------------------------------------------------------------------------


def capacity(value, weights):
    """Mean over g of log det(I + sum w v v') of one head; weights [g, n]."""
    grams = [torch.eye(value.shape[1], dtype=value.dtype) + (value.T * w) @ value for w in weights]
    return torch.stack([torch.logdet(gram) for gram in grams]).mean()


def test_greedy_takes_the_largest_gain_each_time():
    _, value, _ = tensors(n=20, d=4)
    weights = torch.rand(2, 3, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ours = rank_greedily(value, weights, picks=20)
    for h in range(2):
        taken: list[int] = []
        while len(taken) < 20:  # far past the 4 dimensions
            open_ = [i for i in range(20) if i not in taken]
            gains = [capacity(value[h, [*taken, i]], weights[h][:, [*taken, i]]) for i in open_]
            taken.append(open_[int(torch.stack(gains).argmax())])
        assert ours[h].argsort(descending=True).tolist() == taken
        assert sorted(ours[h].tolist()) == list(range(-20, 0))


def test_greedy_sees_the_second_copy_lose_its_worth():
    """Eight directions, each there twice: one-shot scores rank both copies of the strongest before the weaker ones."""
    strength = torch.linspace(3, 2, 8, dtype=torch.float64)
    value = (torch.eye(8, dtype=torch.float64) * strength).repeat(2, 1)[None]
    key, _, query = tensors(heads=1, n=16, d=8)
    layer = layer_of(key, value, query)
    kept = {name: scorer(name, tau=0, sinks=0).score(layer)[0].topk(8).indices for name in ("greedy_logdet", "capkv")}
    assert sorted((kept["capkv"] % 8).tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (kept["greedy_logdet"] % 8).tolist() == list(range(8))
    ones = torch.ones(1, 8, dtype=torch.float64)
    greedy, one_shot = (capacity(value[0, kept[name]], ones) for name in ("greedy_logdet", "capkv"))
    torch.testing.assert_close(greedy, (1 + strength**2).log().sum())
    torch.testing.assert_close(one_shot, (1 + 2 * strength[:4] ** 2).log().sum())
    assert greedy > one_shot


def test_greedy_is_near_the_best_subset():
    _, value, _ = tensors(heads=1, n=9, d=3)
    weights = torch.rand(1, 2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    rows = rank_greedily(value, weights, picks=3)[0].topk(3).indices
    best = max(capacity(value[0, list(c)], weights[0][:, list(c)]) for c in itertools.combinations(range(9), 3))
    assert (1 - 1 / math.e) * best <= capacity(value[0, rows], weights[0][:, rows]) <= best + 1e-12


def test_a_larger_budget_picks_on():
    key, value, query = tensors(n=60)
    layer = layer_of(key, value, query)
    short, full = scorer("greedy_logdet", picks=5), scorer("greedy_logdet", picks=60)
    scores, whole = short.score(layer), full.score(layer)
    assert torch.equal(scores[:, 4:].topk(5).indices, whole[:, 4:].topk(5).indices)
    assert not torch.equal(scores, whole)
    protected = torch.zeros(60, dtype=torch.bool)
    assert torch.equal(short.refine(layer, scores, torch.tensor([60, 20]), protected), whole)
    assert short.refine(layer, scores, torch.tensor([5, 3]), protected) is scores
