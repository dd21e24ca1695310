"""A model's name with `:yarn=FACTOR` after it: the same weights with more positions, by YaRN's scaling of the rotations.

YaRN (Peng et al. 2023, arXiv 2309.00071) keeps the fast rotations, slows the slow ones down by the factor, and sharpens the
attention a little; this is what CapKV's long contexts were measured with (table 5).
"""

from __future__ import annotations

import re

from transformers import PreTrainedConfig

from kvviz.models.errors import ModelError
from kvviz.models.families import positions

MOST = 32.0
"""Factors above this were tried nowhere."""

_NAME = re.compile(r"(?P<base>.+?):yarn=(?P<factor>[^:]*)")


def split(name: str) -> tuple[str, float]:
    """A name -> the name of the weights, and YaRN's factor (1: the rotations as the model has them).

    Raises ModelError for a factor that is no number from 1 to `MOST`.
    """
    match = _NAME.fullmatch(name.strip())
    if match is None:
        return name.strip(), 1.0
    try:
        factor = float(match["factor"])
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= MOST:
        raise ModelError(f"YaRN's factor is {match['factor'][:20]!r}. Give a number from 1 to {MOST:g}, as in :yarn=4.")
    return match["base"], factor


def join(base: str, factor: float) -> str:
    """The other way round."""
    return base if factor == 1 else f"{base}:yarn={factor:g}"


def stretch(config: PreTrainedConfig, factor: float, name: str) -> None:
    """Put YaRN into a configuration, which then has `factor` times as many positions.

    Raises ModelError where its rotations are scaled already, or differ from layer to layer.
    """
    if factor == 1:
        return
    rope = config.rope_parameters or {}
    kind = rope.get("rope_type", "several kinds in one model")
    if kind != "default":
        raise ModelError(f"{name} cannot take YaRN: its rotations are scaled already ({kind}). Load it without :yarn=.")
    before = positions(config)
    config.rope_parameters = rope | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": before,
    }
    config.max_position_embeddings = int(before * factor)
