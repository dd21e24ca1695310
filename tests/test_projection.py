"""The plane of a head's values: an orthonormal, deterministic PCA that also takes outputs and the origin."""

from __future__ import annotations

import numpy as np
import torch

from kvviz.projection import fit


def values(n=200, d=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator) * torch.tensor([5.0, 3.0] + [0.3] * (d - 2)) + 2


def test_axes_are_the_leading_eigenvectors():
    x = values()
    plane = fit(x)
    spectrum, vectors = np.linalg.eigh(np.cov(x.double().numpy().T))
    np.testing.assert_allclose(np.abs(plane.axes @ vectors[:, ::-1][:, :2]), np.eye(2), atol=1e-8)
    np.testing.assert_allclose(plane.explained, spectrum[::-1][:2] / spectrum.sum(), atol=1e-8)
    assert plane.points.shape == (200, 2) and plane.points.dtype == np.float32


def test_points_are_the_values_transformed_and_outputs_lie_among_them():
    x = values()
    plane = fit(x)
    np.testing.assert_allclose(plane.transform(x), plane.points, atol=1e-5)
    np.testing.assert_allclose(plane.transform(x.mean(0)), [0, 0], atol=1e-5)
    weights = torch.rand(200, generator=torch.Generator().manual_seed(1)).softmax(0)
    np.testing.assert_allclose(plane.transform(weights @ x), weights.numpy() @ plane.points, atol=1e-5)
    np.testing.assert_allclose(plane.origin, plane.transform(torch.zeros(8)))
    assert np.abs(plane.origin).max() > 1, "zero is not the mean here"
    assert plane.transform(torch.zeros(3, 4, 8)).shape == (3, 4, 2)


def test_signs_do_not_depend_on_the_order_of_the_values():
    x = values()
    flipped = fit(x.flip(0))
    np.testing.assert_allclose(flipped.axes, fit(x).axes, atol=1e-8)
    for axis in flipped.axes:
        assert axis[np.abs(axis).argmax()] > 0
    assert fit(-x).axes[0] @ fit(x).axes[0] > 0.99


def test_ranges_hold_all_points_and_the_origin():
    plane = fit(values() + 50)
    for (low, high), axis in ((plane.x_range, 0), (plane.y_range, 1)):
        assert low < min(plane.points[:, axis].min(), plane.origin[axis])
        assert high > max(plane.points[:, axis].max(), plane.origin[axis])


def test_degenerate_heads():
    for x in (torch.ones(1, 8), torch.ones(5, 8), torch.ones(5, 8).bfloat16()):
        plane = fit(x)
        assert plane.points.tolist() == [[0, 0]] * len(x) and plane.explained.tolist() == [0, 0]
        assert plane.x_range[0] < plane.x_range[1]
    two = fit(torch.tensor([[0.0, 0, 0], [0, 3, 0]]))
    np.testing.assert_allclose(np.abs(two.points), [[1.5, 0], [1.5, 0]])
    np.testing.assert_allclose(two.explained, [1, 0])
