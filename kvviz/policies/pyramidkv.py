"""PyramidKV (arXiv:2406.02069): SnapKV's scores, with larger budgets in the lower layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvviz.policies.base import Published
from kvviz.policies.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's scores; the allocation makes the difference."""

    name = "pyramidkv"
    title = "PyramidKV"
    summary = "SnapKV's choice, with more room in the lower layers and less in the upper ones."
    paper = "2406.02069"

    @property
    def published(self) -> Published:
        """SnapKV's, with budgets that fall from layer to layer."""
        return replace(super().published, allocation="pyramid")
