"""Capacities: golden values, the n x n definitions, and the properties of a log-determinant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvviz.capacity import (
    capacity_curve,
    capacity_of_sets,
    effective_rank,
    joint_capacity,
    key_capacity,
    mutual_information,
    output_capacity,
)

GOLDEN = load_file(Path(__file__).parent / "golden" / "paper_formulas.safetensors")
K, V, KEEP = GOLDEN["K"], GOLDEN["V"], GOLDEN["keep"]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(left, right, atol=1e-9):
    torch.testing.assert_close(left, right, atol=atol, rtol=0)


def as_printed(U):
    """log det(I + U U') by its eigenvalues, n x n."""
    return torch.linalg.eigvalsh(torch.eye(len(U), dtype=U.dtype) + U @ U.T).log().sum()


def test_golden():
    k, v = K[KEEP], V[KEEP]
    close(key_capacity(k), GOLDEN["capacity.K"][0])
    close(output_capacity(v), GOLDEN["capacity.U"][0])
    close(joint_capacity(k, v), GOLDEN["capacity.KU"][0])
    close(mutual_information(k, v, GOLDEN["query_cov"], 0.25), GOLDEN["capacity.mutual_information.noise0.25"][0])


def test_equations_as_printed_with_more_entries_than_dimensions_and_fewer():
    for n in (3, 20):
        k, v = random(n, 6), random(n, 5, seed=1)
        close(key_capacity(k), as_printed(k))
        close(output_capacity(v), as_printed(v))
        close(joint_capacity(k, v), as_printed(v.T @ k))


def test_batches_are_heads_on_their_own():
    k, v = random(2, 3, 20, 6), random(2, 3, 20, 5, seed=1)
    together = torch.stack((key_capacity(k), output_capacity(v), joint_capacity(k, v)))
    for a in range(2):
        for b in range(3):
            alone = torch.stack((key_capacity(k[a, b]), output_capacity(v[a, b]), joint_capacity(k[a, b], v[a, b])))
            close(together[:, a, b], alone)


def test_noise_may_be_a_variance_or_a_covariance():
    query_cov = random(8, 8) @ random(8, 8).T
    scalar = mutual_information(K, V, query_cov, 0.3)
    close(scalar, mutual_information(K, V, query_cov, 0.3 * torch.eye(8).double()))
    root = random(8, 8, seed=3)
    noise = root @ root.T + torch.eye(8)
    S = V.T @ K
    direct = torch.logdet(torch.eye(8) + torch.linalg.inv(noise) @ S @ query_cov @ S.T) / 2
    close(mutual_information(K, V, query_cov, noise), direct, 1e-7)
    with pytest.raises(ValueError, match="above 0"):
        mutual_information(K, V, query_cov, 0.0)


def test_an_entry_more_never_lowers_key_or_output_capacity():
    for measure, x in ((key_capacity, K), (output_capacity, V)):
        values = torch.stack([measure(x[:n]) for n in range(49)])
        assert float(values[0]) == 0 and bool((values.diff() > 0).all())


def test_zero_rows_add_nothing():
    padded = torch.cat((K, torch.zeros(10, 8)))
    close(joint_capacity(padded, torch.cat((V, torch.ones(10, 8)))), joint_capacity(K, V), 1e-9)


def test_curve_is_the_capacity_of_every_prefix():
    k, v = random(3, 40, 6), random(3, 40, 5, seed=1)
    order = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(h)) for h in range(3)])
    budgets = [8, 1, 40, 0, 8, 13]
    curve = capacity_curve(k, v, order, budgets)
    assert curve.shape == (3, 6, 3)
    for column, b in enumerate(budgets):
        for h in range(3):
            kept = order[h, :b]
            expected = [key_capacity(k[h, kept]), output_capacity(v[h, kept]), joint_capacity(k[h, kept], v[h, kept])]
            close(curve[:, column, h], torch.stack(expected))
    with pytest.raises(ValueError, match="between 0 and the 40"):
        capacity_curve(k, v, order, [41])


def test_sets_need_not_be_nested_nor_of_equal_size():
    k, v = random(3, 40, 6), random(3, 40, 5, seed=1)
    sets = random(5, 3, 40, seed=2) > torch.tensor([0.0, 1, -1])[:, None]
    sets[3] = False
    found = capacity_of_sets(k, v, sets)
    for s in range(5):
        for h in range(3):
            kept = sets[s, h]
            expected = [key_capacity(k[h, kept]), output_capacity(v[h, kept]), joint_capacity(k[h, kept], v[h, kept])]
            close(found[:, s, h], torch.stack(expected))


def test_low_precision_input_is_computed_in_float64():
    k = (100 * random(1, 500, 16)).bfloat16()
    close(key_capacity(k), key_capacity(k.double()), 0)
    assert key_capacity(k).dtype == torch.float64


def test_effective_rank():
    close(effective_rank(torch.eye(6).double()), torch.tensor(6.0).double())
    close(effective_rank(random(20, 1) @ random(1, 8)), torch.tensor(1.0).double(), 1e-5)
    assert float(effective_rank(torch.zeros(5, 8))) == 0
    X = random(4, 30, 8)
    share = torch.linalg.svdvals(X)
    share = share / share.sum(-1, keepdim=True)
    close(effective_rank(X), (-(share * share.log()).sum(-1)).exp())
