"""What a scorer is, and what a policy is made of.

A policy is a scorer x an allocation x a protection x a correction x a number of bits. Each is its own small thing and they
combine freely. A new method is one file in this folder: a frozen dataclass with a `score`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvviz.state import LayerState


def require(condition: bool, remedy: str) -> None:
    """Refuse an option that a method cannot work with."""
    if not condition:
        raise ValueError(remedy)


@dataclass(frozen=True)
class Published:
    """The setting that a method was published with (sinks, recent: entries never evicted; recent in (0, 1) is a share
    of the budget; correction: order 0 or 1 of the moments, or None)."""

    sinks: int = 0
    recent: float = 0
    allocation: str = "uniform"
    correction: int | None = None


@dataclass(frozen=True)
class Scorer:
    """Gives every cached entry a score; higher = keep.

    Subclasses are frozen dataclasses whose fields are the method's options, with the published values as defaults, and
    validate them in `__post_init__` (ValueError, with the remedy).
    """

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    """One plain sentence for the dashboard: what the method keeps."""
    paper: ClassVar[str] = ""
    """arXiv id or link of the source."""
    formula: ClassVar[str] = ""
    """The score as LaTeX."""
    published: ClassVar[Published] = Published()
    """Read it on an instance: where it follows an option (SnapKV's window), it is a property."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Of "attention_mass" (prefill must be asked for it), "probes" (only after a run)."""
    together: ClassVar[int] = 1
    """Layers that `refine` takes at once."""
    uses_moments: ClassVar[bool] = False
    """Whether its score looks at the statistics of what was evicted before (`LayerState.moments`)."""

    def score(self, layer: LayerState) -> Tensor:
        """Scores [Hkv, N] of one layer, higher = keep; float32 for a cache of any dtype but float64."""
        raise NotImplementedError

    @property
    def unscored(self) -> tuple[int, int]:
        """(first, last) entries that the method leaves unscored and therefore always keeps, whatever is protected besides."""
        return 0, 0

    def while_decoding(self, every: int) -> Scorer:
        """The scorer that stands in for this one when entries are evicted every `every` decoding steps.

        Raises:
            ValueError: the method cannot evict while decoding.
        """
        if "probes" in self.needs:
            raise ValueError(
                f"{self.title} knows only queries that were recorded before: it cannot evict while decoding."
            )
        return self

    def refine(self, layer: LayerState, scores: Tensor, counts: Tensor, protected: Tensor) -> Tensor:
        """Scores [Hkv, N] once the number of entries to keep is known.

        Args:
            scores: [Hkv, N], what `score` gave.
            counts: [Hkv] int64, entries to keep in each head, the protected ones included.
            protected: [N] bool, entries that are never evicted.

        Only methods that evict step by step (MomentKV's rounds) need it. A method that looks at keys and values alone, each
        head for itself, may set `together`: then it gets so many layers at once, as one layer of all their heads.
        """
        return scores
