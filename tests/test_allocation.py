"""Budgets: exact totals at every level, the peer's numbers where asked for, and protection that no tie can break."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvviz import budget as budgets
from kvviz.allocation import Adaptive, Pyramid, Uniform, allocation, keep, positions, split

GOLDEN = Path(__file__).parent / "golden"
ALL = [
    Uniform(),
    Pyramid(),
    Pyramid(beta=1),
    Pyramid(beta=100),
    Adaptive(),
    Adaptive(alpha=0),
    Adaptive(alpha=1),
    Adaptive(compatible=True),
]


def mask(n: int, *indices: int) -> torch.Tensor:
    made = torch.zeros(n, dtype=torch.bool)
    made[list(indices)] = True
    return made


def ends(n: int, sinks: int, recent: int) -> torch.Tensor:
    index = torch.arange(n)
    return (index < sinks) | (index >= n - recent)


# --- the peer's numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", json.loads((GOLDEN / "index.json").read_text())["pyramidkv_layer_budgets"])
def test_pyramid_as_the_peer(setting):
    n, window = setting["n_tokens"], setting["window"]
    budget = budgets.from_share(n, setting["compression_ratio"])
    pyramid = Pyramid(setting["beta"], compatible=True)
    assert pyramid.layer_budgets(budget, setting["layers"], n, window) == setting["budgets"]


@pytest.mark.parametrize("model", ["llama", "qwen3"])
@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("alpha", [0, 0.2])
def test_adaptive_as_the_peer(model, layer, alpha):
    golden = load_file(GOLDEN / f"kvpress_{model}.safetensors")
    scores = golden[f"layer{layer}.snapkv.window32.kernel5"]
    protected = ends(160, 0, 32)
    counts = Adaptive(alpha, compatible=True).head_counts(scores, budgets.from_share(160, 0.75), protected)
    expected = golden[f"layer{layer}.adakv.snapkv.ratio0.75.alpha{alpha}.kept"]
    assert torch.equal(keep(scores, counts, protected), expected)


# --- layers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_layer_totals_are_exact(kind):
    rng = random.Random(0)
    for _ in range(400):
        layers, n = rng.randint(1, 40), rng.randint(1, 300)
        budget, window = rng.randint(1, n + 5), rng.randint(0, 70)
        shares = kind.layer_budgets(budget, layers, n, window)
        assert sum(shares) == layers * min(budget, n) and len(shares) == layers
        assert min(shares) >= 1 and max(shares) <= n
        if not isinstance(kind, Pyramid):
            assert len(set(shares)) == 1


def test_pyramid_is_its_formula():
    shares = Pyramid(20).layer_budgets(132, 5, 4096, 32)  # b = 100: 195, 147.5, 100, 52.5, 5, and the window
    assert shares == [227, 180, 132, 84, 37]
    capped = Pyramid(20).layer_budgets(1032, 5, 1500, 32)  # highest 1950 > 1468: lowest 532
    assert capped == [1500, 1266, 1032, 798, 564]


def test_pyramid_falls_from_layer_to_layer_and_never_below_the_window():
    shares = Pyramid(20).layer_budgets(128, 30, 2048, 32)
    assert shares == sorted(shares, reverse=True) and shares[0] > 2 * shares[-1]
    assert shares[-1] >= 32 + math.floor(96 / 20)


def test_pyramid_edges():
    assert Pyramid().layer_budgets(64, 1, 2048, 32) == [64]
    assert Pyramid().layer_budgets(16, 4, 2048, 32) == [16] * 4, "nothing beyond the window to spread"
    assert Pyramid().layer_budgets(5000, 3, 2048, 32) == [2048] * 3
    assert Pyramid().layer_budgets(3, 3, 5, 32) == [3] * 3
    assert Pyramid().layer_budgets(1, 6, 100, 0) == [1] * 6, "at least one entry"
    assert Pyramid(beta=1).layer_budgets(100, 6, 1000, 32) == [100] * 6


def test_split_rounds_by_largest_remainders_within_bounds():
    assert split([1.5, 1.2, 1.3], 4, 10) == [2, 1, 1]
    assert split([2.5, 2.5, 2.5, 2.5], 10, 10) == [3, 3, 2, 2]
    assert split([0.1, 0.1, 2.8], 3, 10) == [1, 1, 1]
    assert split([9.7, 1.2, 1.1], 12, 9) == [9, 2, 1]


# --- heads ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_head_counts_are_exact_and_what_is_kept_has_all_that_is_protected(kind):
    rng = random.Random(1)
    for case in range(300):
        heads, n = rng.randint(1, 5), rng.randint(1, 60)
        budget, protected = rng.randint(1, n + 3), ends(n, rng.randint(0, 4), rng.choice([0, 1, 8, 32]))
        scores = torch.randn(heads, n, generator=torch.Generator().manual_seed(case)) * rng.choice([0.0, 1.0])
        if rng.random() < 0.2:
            scores[0] = -torch.inf
        counts = kind.head_counts(scores, budget, protected)
        assert counts.dtype == torch.int64 and int(counts.sum()) == heads * min(budget, n)
        assert int(counts.min()) >= 1 and int(counts.max()) <= n
        stays = keep(scores, counts, protected)
        assert torch.equal(stays.sum(1), counts)
        if budget >= int(protected.sum()):
            assert bool(stays[:, protected].all())
        else:
            assert not bool(stays[:, ~protected].any())


def brute_adaptive(scores, budget, held, alpha):
    """Sort all pairs (score, head) of the unprotected entries; the safeguarded ones of each head first."""
    heads, n = scores.shape
    share = budget - held
    sure = max(int(alpha * share), 1 - held)
    pool = [(float(s), h) for h in range(heads) for s in sorted(scores[h, : n - held].tolist())[::-1][sure:]]
    counts = [held + sure] * heads
    for _, h in sorted(pool, reverse=True)[: heads * (share - sure)]:
        counts[h] += 1
    return counts


@pytest.mark.parametrize("alpha", [0, 0.2, 0.7, 1])
@pytest.mark.parametrize("held", [0, 6])
def test_adaptive_is_a_pooled_choice(alpha, held):
    scores = torch.randn(3, 40, generator=torch.Generator().manual_seed(5)) * torch.tensor([[1.0], [3.0], [0.1]])
    counts = Adaptive(alpha).head_counts(scores, 13, ends(40, 0, held))
    assert counts.tolist() == brute_adaptive(scores, 13, held, alpha)
    assert (len(set(counts.tolist())) == 1) == (alpha == 1)


def test_safeguard_and_ceiling():
    scores = torch.stack((torch.full((50,), -9.0), torch.zeros(50), torch.ones(50)))
    assert Adaptive(0.2).head_counts(scores, 20, mask(50)).tolist() == [4, 6, 50]
    assert Adaptive(0).head_counts(scores, 20, mask(50)).tolist() == [1, 9, 50]
    assert Adaptive(0.2).head_counts(scores, 20, ends(50, 0, 10)).tolist() == [12, 12, 36]
    assert Adaptive(0.5, compatible=True).head_counts(scores, 20, ends(50, 0, 10)).tolist() == [10, 10, 40]


def test_equal_scores_share_evenly():
    assert Adaptive(0).head_counts(torch.zeros(3, 50), 20, mask(50)).tolist() == [20] * 3


# --- entries -------------------------------------------------------------------------------------------------------------


def test_keep_takes_the_best_of_each_head():
    scores = torch.tensor([[5.0, 1, 4, 2, 3], [1, 2, 3, 4, 5]])
    stays = keep(scores, torch.tensor([2, 3]), mask(5, 1))
    assert stays.tolist() == [[True, True, False, False, False], [False, True, False, True, True]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_constant_scores_keep_the_protected_set(dtype):
    protected = ends(300, 4, 32)
    stays = keep(torch.full((2, 300), 300.0, dtype=dtype), torch.tensor([40, 36]), protected)
    assert bool(stays[:, protected].all()) and stays.sum(1).tolist() == [40, 36]
    assert stays[0].nonzero()[:, 0].tolist() == [*range(8), *range(268, 300)], "of equals the earlier stay"


def test_fewer_than_are_protected_keeps_sinks_then_the_most_recent():
    scores = torch.randn(3, 20)
    stays = keep(scores, torch.tensor([2, 5, 9]), ends(20, 4, 8))
    assert [row.nonzero()[:, 0].tolist() for row in stays] == [
        [0, 1],
        [0, 1, 2, 3, 19],
        [0, 1, 2, 3, 15, 16, 17, 18, 19],
    ]
    everything = keep(scores[:1, :10], torch.tensor([6]), ends(10, 4, 8), sinks=4)
    assert everything[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 8, 9]
    unsaid = keep(scores[:1, :10], torch.tensor([3]), ends(10, 4, 8))
    assert unsaid[0].nonzero()[:, 0].tolist() == [0, 8, 9]


def test_minus_infinity_is_a_score_and_nan_is_none():
    scores = torch.full((1, 6), -torch.inf)
    assert keep(scores, torch.tensor([3]), mask(6, 5))[0].tolist() == [True, True, False, False, False, True]
    scores[0, 2] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        keep(scores, torch.tensor([3]), mask(6))


def test_one_token():
    for kind in ALL:
        counts = kind.head_counts(torch.zeros(2, 1), 1, ends(1, 4, 32))
        assert counts.tolist() == [1, 1] and bool(keep(torch.zeros(2, 1), counts, ends(1, 4, 32)).all())


def test_positions_are_sorted_within_each_head():
    flat, counts = positions(torch.tensor([[False, True, True], [True, False, False]]))
    assert flat.tolist() == [1, 2, 0] and counts.tolist() == [2, 1]


# --- names and errors ----------------------------------------------------------------------------------------------------


def test_allocations_by_name():
    assert allocation("uniform") == Uniform()
    assert allocation("pyramid", beta=7) == Pyramid(7)
    assert allocation("adaptive", alpha=0.5, compatible=True) == Adaptive(0.5, True)
    with pytest.raises(ValueError, match="choose from uniform, pyramid, adaptive"):
        allocation("flat")
    with pytest.raises(ValueError, match="'uniform' has no option 'beta'; it has none"):
        allocation("uniform", beta=3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Pyramid(0.5),
        lambda: Pyramid(float("nan")),
        lambda: Adaptive(-0.1),
        lambda: Adaptive(1.1),
        lambda: Adaptive(float("nan")),
        lambda: Uniform().layer_budgets(0, 3, 10),
        lambda: Pyramid().layer_budgets(-4, 3, 10),
        lambda: Uniform().layer_budgets(float("nan"), 3, 10),
        lambda: Adaptive().head_counts(torch.zeros(1, 5), 0, mask(5)),
        lambda: keep(torch.zeros(1, 5), torch.tensor([6]), mask(5)),
        lambda: keep(torch.zeros(1, 5), torch.tensor([0]), mask(5)),
    ],
)
def test_out_of_range(make):
    with pytest.raises(ValueError):
        make()


# --- units of a budget ---------------------------------------------------------------------------------------------------


def test_share_and_entries():
    assert budgets.from_share(160, 0.75) == 40
    assert budgets.from_share(2000, 0.9) == 200, "0.1 * 2000 is 199.99999999999997 in floating point"
    assert budgets.from_share(2048, 0) == 2048
    assert budgets.from_share(10, 0.99) == 1
    assert budgets.to_share(2048, 256) == 0.875
    assert budgets.to_share(100, 256) == 0
    for entries in range(1, 1001):
        assert budgets.from_share(1000, budgets.to_share(1000, entries)) == entries


def test_bytes_and_entries():
    shape = {"layers": 30, "kv_heads": 3, "head_dim": 64, "itemsize": 4}
    assert budgets.to_bytes(256, **shape) == 256 * 2 * 64 * 4 * 90
    statistics = budgets.moments_bytes(64)
    assert statistics == 4 * (64 * 64 + 2 * 64 + 1)
    for entries in (1, 7, 256, 5000):
        for own in (0, statistics):
            size = budgets.to_bytes(entries, **shape, moments_bytes=own)
            assert budgets.from_bytes(size, **shape, moments_bytes=own) == entries
            assert budgets.from_bytes(size + 511 * 90, **shape, moments_bytes=own) == entries
    assert budgets.moments_bytes(128) / budgets.entry_bytes(128, 2) == pytest.approx(130, abs=0.2)


def test_budgets_that_cannot_be():
    shape = {"layers": 1, "kv_heads": 1, "head_dim": 64, "itemsize": 2}
    for share in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="share removed"):
            budgets.from_share(100, share)
    for entries in (0, -3, 1.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            budgets.check_entries(entries)
    for size in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="positive number"):
            budgets.from_bytes(size, **shape)
    with pytest.raises(ValueError, match=r"give at least 256 bytes$"):
        budgets.from_bytes(255, **shape)
    with pytest.raises(ValueError, match="at least 356 bytes, the moments' statistics included"):
        budgets.from_bytes(256, **shape, moments_bytes=100)
