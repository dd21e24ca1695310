"""Two dimensions of one head's value space, for pictures of what is kept, evicted and put out.

PCA is fitted once a head on all N values, so that axes and points stay where they are while the policy or the budget changes;
attention outputs lie in the same space and are drawn as arrows from the image of the zero vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MARGIN = 0.06
"""Empty border around the points, as a share of the axis."""


@dataclass(frozen=True, eq=False)
class Projection:
    """A fitted plane of a head's value space.

    Attributes:
        points: [N, 2] float32, the values in the plane.
        explained: (2,) shares of the values' variance that the two axes explain.
        mean: [d], what is subtracted first. axes: [2, d] orthonormal, the largest loading of each positive.
        origin: (2,) float32, the image of the zero vector, where arrows start.
        x_range, y_range: fixed axis ranges that hold all points and the origin.
    """

    points: np.ndarray
    explained: np.ndarray
    mean: np.ndarray
    axes: np.ndarray

    def transform(self, vectors: Tensor | np.ndarray) -> np.ndarray:
        """Vectors [..., d] of value space -> [..., 2] float32."""
        return ((_array(vectors) - self.mean) @ self.axes.T).astype(np.float32)

    @property
    def origin(self) -> np.ndarray:
        """(2,) float32, where the zero vector lands."""
        return self.transform(np.zeros_like(self.mean))

    @property
    def x_range(self) -> tuple[float, float]:
        """Fixed range of the first axis."""
        return self._range(0)

    @property
    def y_range(self) -> tuple[float, float]:
        """Fixed range of the second axis."""
        return self._range(1)

    def _range(self, axis: int) -> tuple[float, float]:
        spread = np.append(self.points[:, axis], self.origin[axis])
        low, high = float(spread.min()), float(spread.max())
        border = MARGIN * (high - low) or 1.0
        return low - border, high + border


def fit(values: Tensor | np.ndarray) -> Projection:
    """Fit the plane to values [N, d]; one value, or one dimension, leaves the missing axes at zero."""
    values = _array(values)
    n, d = values.shape
    axes, explained = np.zeros((2, d)), np.zeros(2)
    mean = values.mean(axis=0)
    found = min(2, n - 1, d)
    if found and np.any(values != mean):
        from sklearn.decomposition import PCA  # here, because importing it takes a second

        pca = PCA(found, svd_solver="covariance_eigh").fit(values)
        signs = np.sign(pca.components_[np.arange(found), np.abs(pca.components_).argmax(axis=1)])
        axes[:found] = signs[:, None] * pca.components_
        explained[:found] = pca.explained_variance_ratio_
    return Projection(((values - mean) @ axes.T).astype(np.float32), explained, mean, axes)


def _array(vectors: Tensor | np.ndarray) -> np.ndarray:
    """float64, whatever it was (numpy knows no bfloat16)."""
    return torch.as_tensor(vectors).detach().cpu().double().numpy()
