"""Ada-KV (arXiv:2407.11550): SnapKV's scores, with the heads of a layer competing for its budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvviz.policies.base import Published
from kvviz.policies.snapkv import SnapKV


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV's scores; the allocation makes the difference."""

    name = "adakv"
    title = "Ada-KV"
    summary = "SnapKV's choice, with more room for heads whose attention is spread out."
    paper = "2407.11550"

    @property
    def published(self) -> Published:
        """SnapKV's, with budgets by head."""
        return replace(super().published, allocation="adaptive")
