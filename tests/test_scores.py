"""The scorers against kvpress' values, against plain loops, and at the edges: short prompts, half precision."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvviz.policies import names, options, score, scorer
from kvviz.policies.attention_scores import window_attention, with_unscored
from kvviz.rotary import Rotary
from kvviz.state import STORED_QUERIES, LayerState

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ("llama", "qwen3")
LAYERS = json.loads((GOLDEN / "index.json").read_text())["dims"]["num_hidden_layers"]

CASES = {
    "knorm": ("knorm", {}),
    "keydiff": ("keydiff", {}),
    "snapkv.window32.kernel5": ("snapkv", {"window": 32, "kernel": 5}),
    "snapkv.window64.kernel5": ("snapkv", {"window": 64, "kernel": 5}),
    "expected_attention.eps0": ("expected_attention", {}),
    "expected_attention.eps1e-2": ("expected_attention", {"epsilon": 1e-2}),
    "expected_attention.nocov": ("expected_attention", {"covariance": False}),
    "tova": ("tova", {}),
    "observed_attention": ("observed_attention", {}),
    **{f"capkv.tau{tau}": ("capkv", {"tau": tau}) for tau in (0, 1, 5, 10)},
}
"""Golden tensor -> the method and its options; "sink" has its own test."""

UNPROTECTED = ("knorm", "keydiff", "observed_attention")

needs_probes = {"oracle"}
METHODS = names()


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request):
    return load_file(GOLDEN / f"kvpress_{request.param}.safetensors")


def tensors(heads=2, groups=3, n=24, d=8, seed=0, dtype=torch.float64):
    """key, value [heads, n, d], query [heads * groups, n, d]."""
    draw = torch.Generator().manual_seed(seed)
    make = lambda h: torch.randn(h, n, d, generator=draw, dtype=torch.float64).to(dtype)  # noqa: E731
    return make(heads), make(heads), make(heads * groups)


def layer_of(key, value, query, **more):
    rotary = Rotary.from_theta(10000.0, key.shape[-1])
    layer = LayerState.from_tensors(key, value, query, rotary, **more)
    return replace(layer, query_mean=layer.query_mean.to(key), query_cov=layer.query_cov.to(key))


def scores_of(name, key, value, query, **given):
    """`score`, with what the oracle needs beside it."""
    probes = {"probes": query[:, -3:] + 0.1} if name in needs_probes else {}
    return score(name, key, value, query, **probes, **given)


def causal_attention(query, key):
    """[Hq, N, N] by loops over heads and queries."""
    heads, n, d = query.shape
    groups = heads // key.shape[0]
    weights = torch.zeros(heads, n, n, dtype=query.dtype)
    for h in range(heads):
        for t in range(n):
            logits = torch.stack([query[h, t] @ key[h // groups, i] / math.sqrt(d) for i in range(t + 1)])
            weights[h, t, : t + 1] = logits.softmax(0)
    return weights


# --- kvpress ------------------------------------------------------------------------------------------------


def test_every_golden_scorer_has_a_case():
    index = json.loads((GOLDEN / "index.json").read_text())
    for listed in index["files"].values():
        scorers = {name for name in listed if not name.startswith("adakv")}
        assert scorers - {"query", "key", "value", "o_proj", "query_pre_rope"} == {*CASES, "sink"}


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("case", CASES)
def test_scores_are_kvpress_scores(golden, case, layer):
    name, given = CASES[case]
    key, value, query = (golden[f"layer{layer}.{part}"] for part in ("key", "value", "query"))
    expected = golden[f"layer{layer}.{case}"]
    protected = torch.zeros_like(expected, dtype=torch.bool)
    if name not in UNPROTECTED:
        protected = expected == expected.max()  # the maximum + 1 of the layer, or TOVA's maximum
        published = scorer(name, **given).published
        position = torch.arange(expected.shape[1])
        wanted = (position < published.sinks) | (position >= expected.shape[1] - published.recent)
        assert (protected == wanted).all()
    ours = score(name, key, value, query, **given)
    torch.testing.assert_close(ours[~protected], expected[~protected], rtol=1e-4, atol=0)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_sink_keeps_what_kvpress_keeps(golden, layer):
    key, value, query = (golden[f"layer{layer}.{part}"] for part in ("key", "value", "query"))
    kept = golden[f"layer{layer}.sink"].bool()
    ours = score("sink", key, value, query)
    sinks = scorer("sink").published.sinks
    assert kept[:, :sinks].all()
    for head, row in enumerate(ours):
        recent = row[sinks:].topk(int(kept[head].sum()) - sinks).indices + sinks
        assert set(recent.tolist()) == set(kept[head].nonzero()[sinks:, 0].tolist())


# --- plain loops --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_snapkv_by_loops(kernel):
    key, value, query = tensors()
    w, n, groups = 6, key.shape[1], 3
    attention = causal_attention(query, key)
    for h in range(2):
        expected = []
        for i in range(n - w):
            total = 0.0
            for head in range(h * groups, (h + 1) * groups):
                for j in range(i - kernel // 2, i + kernel // 2 + 1):
                    if 0 <= j < n - w:  # zero padding
                        total += attention[head, n - w :, j].mean() / kernel
            expected.append(total / groups)
        ours = score("snapkv", key, value, query, window=w, kernel=kernel)[h]
        torch.testing.assert_close(ours[: n - w], torch.stack(expected))
        assert (ours[n - w :] == ours[: n - w].max()).all()


def test_snapkv_max_pooling_pools_the_group_mean():
    key, value, query = tensors()
    w, n = 6, key.shape[1]
    received = causal_attention(query, key)[:, n - w :, : n - w].mean(1).view(2, 3, -1).mean(1)
    ours = score("snapkv", key, value, query, window=w, pooling="max")
    for i in range(n - w):
        expected = received[:, max(0, i - 3) : i + 4].amax(1)  # kernel 7
        torch.testing.assert_close(ours[:, i], expected)


def test_h2o_and_observed_attention_by_a_triangular_sum():
    key, value, query = tensors(n=40)
    attention = causal_attention(query, key)
    mass = torch.stack([attention[h * 3 : h * 3 + 3].sum(1).mean(0) for h in range(2)])
    torch.testing.assert_close(score("h2o", key, value, query).double(), mass, rtol=1e-5, atol=1e-6)
    seen = torch.tensor([40 - i for i in range(40)])
    observed = score("observed_attention", key, value, query).double()
    torch.testing.assert_close(observed, mass / seen, rtol=1e-5, atol=1e-6)


def test_tova_by_loops():
    key, value, query = tensors()
    last = causal_attention(query, key)[:, -1]
    expected = sum(last[h] for h in range(6)) / 6
    torch.testing.assert_close(score("tova", key, value, query), expected.expand(2, -1))


def test_expected_attention_by_loops():
    key, value, query = tensors()
    n, d, sinks = key.shape[1], key.shape[2], 2
    layer = layer_of(key, value, query)
    rotation = layer.rotary.mean_matrix(n, 16, d).double()
    expected = torch.zeros(2, n - sinks, dtype=torch.float64)
    for h in range(6):
        mu = rotation @ layer.query_mean[h]
        sigma = rotation @ layer.query_cov[h] @ rotation.T
        z = []
        for i in range(sinks, n):
            k = key[h // 3, i]
            z.append(k @ mu / math.sqrt(d) + k @ sigma @ k / (2 * d))
        expected[h // 3] += torch.stack(z).softmax(0) / 3
    expected = (expected + 0.01) * value[:, sinks:].norm(dim=-1)
    ours = scorer("expected_attention", sinks=sinks, future_positions=16, epsilon=0.01).score(layer)
    torch.testing.assert_close(ours[:, sinks:], expected)
    torch.testing.assert_close(ours[:, :sinks], expected.amax(1, keepdim=True).expand(-1, sinks))


def test_the_oracle_is_the_probes_mean_attention():
    key, value, query = tensors()
    probes = torch.randn(6, 5, 8, dtype=torch.float64)
    expected = torch.zeros(2, key.shape[1], dtype=torch.float64)
    for h in range(6):
        for t in range(5):
            expected[h // 3] += (key[h // 3] @ probes[h, t] / math.sqrt(8)).softmax(0) / 15
    torch.testing.assert_close(score("oracle", key, value, query, probes=probes), expected)


def test_knorm_keeps_small_norms_and_keydiff_the_odd_one_out():
    key, value, query = tensors()
    key[:, 5] *= 1e-3
    assert (score("knorm", key, value, query).argmax(1) == 5).all()
    key = torch.ones_like(key) + 0.01 * key
    key[:, 7] = -1
    assert (score("keydiff", key, value, query).argmax(1) == 7).all()


def test_window_attention_is_causal_and_sums_to_one():
    key, value, query = tensors()
    attention = window_attention(layer_of(key, value, query), 5)
    torch.testing.assert_close(attention, causal_attention(query, key)[:, -5:])
    torch.testing.assert_close(attention.sum(-1), torch.ones(6, 5, dtype=torch.float64))


def test_the_models_own_scaling_counts():
    key, value, query = tensors(n=60)
    for name in ("snapkv", "tova", "h2o", "expected_attention"):
        small, plain = score(name, key, value, query, scaling=0.01), score(name, key, value, query)
        assert not torch.allclose(small, plain)
    uniform = score("tova", key, value, query, scaling=1e-9)
    torch.testing.assert_close(uniform, torch.full_like(uniform, 1 / key.shape[1]))


# --- every method -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4, 5, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", METHODS)
def test_short_prompts_in_any_dtype(name, dtype, n):
    key, value, query = tensors(n=n, d=16, dtype=dtype)
    scores = scores_of(name, key, value, query)
    assert scores.shape == (2, n)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()


@pytest.mark.parametrize("name", [n for n in METHODS if n != "random"])
def test_heads_do_not_see_each_other(name):
    key, value, query = tensors(heads=3, n=40, d=16, dtype=torch.float32)
    order = torch.tensor([2, 0, 1])
    moved = query.unflatten(0, (3, 3))[order].flatten(0, 1)
    torch.testing.assert_close(
        scores_of(name, key[order], value[order], moved),
        scores_of(name, key, value, query)[order],
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize("name", METHODS)
def test_scores_do_not_change_their_input(name):
    given = tensors(n=40)
    before = [x.clone() for x in given]
    scores_of(name, *given)
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


@pytest.mark.parametrize("name", ["knorm", "keydiff", "expected_attention", "snapkv", "capkv"])
def test_bf16_scores_are_those_of_the_same_numbers_in_float32(name):
    """bf16 keys are taken as they are, but nothing is computed in bf16, where most norms would tie."""
    given = tensors(n=64, d=16, dtype=torch.bfloat16)
    ours, exact = score(name, *given), score(name, *(x.float() for x in given))
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=0)


def test_random_is_repeatable_and_leaves_the_global_generator_alone():
    given = tensors(n=32)
    torch.manual_seed(1)
    first, before = score("random", *given, seed=3), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(first, score("random", *given, seed=3))
    assert not torch.equal(first, score("random", *given, seed=4))
    assert not torch.equal(first[0], first[1])
    layers = [scorer("random").score(layer_of(*given, index=i)) for i in (0, 1)]
    assert not torch.equal(*layers)
    torch.manual_seed(1)
    assert torch.equal(before, torch.get_rng_state())


# --- the registry -------------------------------------------------------------------------------------------


def test_names_are_in_the_order_in_which_they_are_shown():
    assert " ".join(names()) == (
        "full sink knorm keydiff expected_attention snapkv h2o observed_attention tova pyramidkv adakv capkv momentkv "
        "greedy_logdet oracle random"
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_scorer_says_what_it_is(name):
    method = scorer(name)
    assert method.name == name
    assert method.title and method.summary.endswith(".") and method.formula
    assert method.paper or name in ("full", "random", "oracle")
    assert scorer(name, **options(name)) == method
    assert hash(method) == hash(scorer(name))
    assert set(options(name)) == {field.name for field in fields(method)}


def test_protection_is_as_published():
    settings = {name: (s.published.sinks, s.published.recent) for name, s in ((n, scorer(n)) for n in METHODS)}
    settings.pop("momentkv")
    assert settings == {
        "full": (0, 0),
        "sink": (4, 0),
        "knorm": (0, 0),
        "keydiff": (0, 0),
        "expected_attention": (4, 0),
        "snapkv": (0, 32),
        "h2o": (0, 0.5),
        "observed_attention": (0, 0),
        "tova": (0, 1),
        "pyramidkv": (0, 32),
        "adakv": (0, 32),
        "capkv": (4, 0),
        "greedy_logdet": (4, 0),
        "oracle": (0, 0),
        "random": (0, 0),
    }
    assert scorer("snapkv", window=64).published.recent == 64
    assert scorer("adakv", window=16).published.recent == 16
    assert scorer("adakv").published.allocation == "adaptive"
    assert scorer("pyramidkv").published.allocation == "pyramid"
    assert scorer("capkv", sinks=2).published.sinks == 2


@pytest.mark.parametrize("name, extra", [("adakv", {"alpha": 0.5}), ("pyramidkv", {"beta": 10})])
def test_allocations_of_snapkv_have_its_scores(name, extra):
    given = tensors(n=60)
    assert torch.equal(score(name, *given, window=8, **extra), score("snapkv", *given, window=8))


def test_unscored_entries_get_the_rows_maximum():
    scores = torch.tensor([[1.0, 3.0], [-5.0, -4.0]])
    assert with_unscored(scores, first=1, last=2).tolist() == [[3, 1, 3, 3, 3], [-4, -5, -4, -4, -4]]
    assert with_unscored(scores[:, :0], last=2).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    "name, given, message",
    [
        ("capkw", {}, "capkv"),
        ("SnapKV", {}, "snapkv"),
        ("capkv", {"taus": 1}, "tau, variant"),
        ("knorm", {"window": 8}, "it has none"),
        ("snapkv", {"alpha": 0.2}, "window, pooling"),
        ("capkv", {"tau": -1}, "tau is 0"),
        ("capkv", {"tau": float("nan")}, "tau is 0"),
        ("capkv", {"tau": float("inf")}, "tau is 0"),
        ("greedy_logdet", {"tau": float("nan")}, "tau is 0"),
        ("greedy_logdet", {"picks": 0}, "picks"),
        ("capkv", {"variant": "printed"}, "published, paper"),
        ("capkv", {"sinks": -1}, "sinks"),
        ("sink", {"sinks": -1}, "sinks"),
        ("capkv", {"output": "exact"}, "o_proj"),
        ("expected_attention", {"epsilon": -1e-3}, "epsilon"),
        ("expected_attention", {"future_positions": 0}, "future_positions"),
        ("snapkv", {"window": STORED_QUERIES + 1}, str(STORED_QUERIES)),
        ("snapkv", {"window": 0}, "window"),
        ("snapkv", {"kernel": 4}, "odd"),
        ("snapkv", {"pooling": "sum"}, "average, max"),
        ("random", {"seed": -1}, "seed"),
        ("oracle", {}, "with_probes"),
    ],
)
def test_mistakes_are_answered_with_the_remedy(name, given, message):
    with pytest.raises(ValueError, match=message):
        score(name, *tensors(), **given)


def test_h2o_says_how_to_get_the_attention_mass():
    with pytest.raises(ValueError, match="attention_mass=True"):
        scorer("h2o").score(layer_of(*tensors()))


def test_shapes_are_checked():
    key, value, query = tensors()
    with pytest.raises(ValueError, match="of one shape"):
        score("knorm", key, value[:, 1:], query)
    with pytest.raises(ValueError, match="multiple of Hkv"):
        score("knorm", key, value, query[:5])
