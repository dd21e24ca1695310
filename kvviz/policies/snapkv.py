"""SnapKV (arXiv:2404.14469): what the prompt's last queries attend to, smoothed along the sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kvviz.policies.attention_scores import by_group, check_window, window_attention, with_unscored
from kvviz.policies.base import Published, Scorer, require
from kvviz.state import LayerState

KERNELS = {"average": 5, "max": 7}
"""The published kernel of each pooling."""


@dataclass(frozen=True)
class SnapKV(Scorer):
    """Keep what the last queries attend to, and those queries' own entries.

    Attributes:
        window: w, the last queries that are asked (32 in the papers' protocol, 64 in kvpress).
        pooling: "average" (zero padding), or "max" as the original evaluations had it.
        kernel: odd number of positions that are pooled; None is 5 for the average and 7 for the maximum.
    """

    window: int = 32
    pooling: str = "average"
    kernel: int | None = None

    name = "snapkv"
    title = "SnapKV"
    summary = "Keeps what the last queries of the prompt attend to, and its neighbours."
    paper = "2404.14469"
    formula = r"s_i = \tfrac1g \sum_h \mathrm{pool}_i\Bigl(\tfrac1w \sum_{t > N - w} \alpha^h_{t i}\Bigr)"

    def __post_init__(self) -> None:
        check_window(self.window)
        require(self.pooling in KERNELS, f"pooling is one of {', '.join(KERNELS)}; got {self.pooling!r}.")
        if self.kernel is None:
            object.__setattr__(self, "kernel", KERNELS[self.pooling])
        require(
            self.kernel == int(self.kernel) and self.kernel >= 1 and self.kernel % 2 == 1,
            f"kernel is an odd number of positions, 1 (no pooling) or more; got {self.kernel}.",
        )

    @property
    def published(self) -> Published:
        """The window is protected."""
        return Published(recent=self.window)

    @property
    def unscored(self) -> tuple[int, int]:
        """The window."""
        return 0, self.window

    def score(self, layer: LayerState) -> Tensor:
        """[Hkv, N]; the window, which the method does not score, gets the row's maximum."""
        attention = window_attention(layer, self.window)  # [Hq, w, N]
        w = attention.shape[1]
        received = by_group(attention[..., :-w].mean(dim=1), layer)  # [Hkv, g, N - w]
        if received.shape[-1]:
            received = self._pool(received)
        return with_unscored(received.mean(dim=1), last=w)

    def _pool(self, received: Tensor) -> Tensor:
        """[Hkv, g, n] -> the same, or [Hkv, 1, n] for the maximum, which is taken of the group's mean."""
        around = {"kernel_size": self.kernel, "stride": 1, "padding": self.kernel // 2}
        if self.pooling == "max":
            return F.max_pool1d(received.mean(dim=1, keepdim=True), **around)
        return F.avg_pool1d(received, **around)
