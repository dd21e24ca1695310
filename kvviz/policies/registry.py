"""The registry of methods, and their formulas on plain tensors.

A new method is one file with a `Scorer` and one line in METHODS.
"""

from __future__ import annotations

from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from kvviz.attention import attention_mass
from kvviz.policies.adakv import AdaKV
from kvviz.policies.base import Scorer, require
from kvviz.policies.capkv import CapKV
from kvviz.policies.expected_attention import ExpectedAttention
from kvviz.policies.full import Full
from kvviz.policies.greedy_logdet import GreedyLogDet
from kvviz.policies.h2o import H2O
from kvviz.policies.keydiff import KeyDiff
from kvviz.policies.knorm import Knorm
from kvviz.policies.momentkv import MomentKV
from kvviz.policies.observed_attention import ObservedAttention
from kvviz.policies.oracle import Oracle
from kvviz.policies.pyramidkv import PyramidKV
from kvviz.policies.random import Random
from kvviz.policies.sink import Sink
from kvviz.policies.snapkv import SnapKV
from kvviz.policies.tova import TOVA
from kvviz.rotary import Rotary
from kvviz.state import LayerState

METHODS: dict[str, type[Scorer]] = {
    "full": Full,
    "sink": Sink,
    "knorm": Knorm,
    "keydiff": KeyDiff,
    "expected_attention": ExpectedAttention,
    "snapkv": SnapKV,
    "h2o": H2O,
    "observed_attention": ObservedAttention,
    "tova": TOVA,
    "pyramidkv": PyramidKV,
    "adakv": AdaKV,
    "capkv": CapKV,
    "momentkv": MomentKV,
    "greedy_logdet": GreedyLogDet,
    "oracle": Oracle,
    "random": Random,
}


def names() -> tuple[str, ...]:
    """Every method's name, in the order in which they are shown."""
    return tuple(METHODS)


def options(name: str) -> dict[str, Any]:
    """A method's options with their published values."""
    default = scorer(name)
    return {field.name: getattr(default, field.name) for field in fields(default)}


def scorer(name: str, **options: Any) -> Scorer:
    """Make a scorer by name.

    Raises:
        ValueError: unknown name or option, or a value out of range; the message says what is allowed.
    """
    if name not in METHODS:
        close = get_close_matches(str(name).lower().replace("-", "_"), METHODS)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(f"There is no method {name!r}. {hint}All of them: {', '.join(METHODS)}.")
    method = METHODS[name]
    allowed = [field.name for field in fields(method)]
    for option in options:
        has = f"its options are {', '.join(allowed)}" if allowed else "it has none"
        require(option in allowed, f"{name} has no option {option!r}; {has}.")
    return method(**options)


def score(
    name: str,
    key: Tensor,
    value: Tensor,
    query: Tensor,
    rope_theta: float = 10000.0,
    o_proj: Tensor | None = None,
    *,
    mu: Tensor | None = None,
    scaling: float | None = None,
    probes: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """A method's scores on plain tensors, no model; float64 stays float64, but for the attention mass.

    Args:
        name: of the registry.
        key, value: [Hkv, N, d], keys after RoPE.
        query: [Hq, N, d], after RoPE.
        rope_theta: base of plain RoPE, for the methods that look at queries before it.
        o_proj: [hidden, Hq * d], for CapKV with output="exact".
        mu: [Hq, d] or [d], the expected query after RoPE, where it is not to be taken from `query`.
        scaling: factor on the attention logits; 1 / sqrt(d) by default.
        probes: [Hq, P, d], later queries, for the oracle.
        options: the scorer's. Those of an allocation (`alpha`, `beta`) are accepted for methods that are
            published with one; scores do not depend on them.

    Returns:
        [Hkv, N], higher = keep.
    """
    _check_shapes(key, value, query)
    chosen = scorer(name, **_without_allocation(name, options))
    scaling = key.shape[-1] ** -0.5 if scaling is None else scaling
    layer = LayerState.from_tensors(
        key,
        value,
        query,
        Rotary.from_theta(rope_theta, key.shape[-1]) if mu is None else Rotary(_unturned),
        o_proj=o_proj,
        scaling=scaling,
        probes=probes,
        attention_mass=attention_mass(query, key, scaling) if "attention_mass" in chosen.needs else None,
    )
    if mu is not None:
        layer = replace(layer, query_mean=mu.expand(query.shape[0], -1))
    return chosen.score(layer)


def _without_allocation(name: str, given: dict[str, Any]) -> dict[str, Any]:
    if scorer(name).published.allocation == "uniform":
        return given
    foreign = {"alpha", "beta"} - set(options(name))
    return {option: value for option, value in given.items() if option not in foreign}


def _unturned(positions: Tensor) -> tuple[Tensor, Tensor]:
    """A rotary table that turns nothing: what stands for "before RoPE" then is what came after it."""
    cos = torch.ones(len(positions), 2, device=positions.device)
    return cos, torch.zeros_like(cos)


def _check_shapes(key: Tensor, value: Tensor, query: Tensor) -> None:
    require(
        key.dim() == 3 and key.shape == value.shape,
        f"key and value are [Hkv, N, d], of one shape; got {tuple(key.shape)} and {tuple(value.shape)}.",
    )
    require(
        query.dim() == 3 and query.shape[1:] == key.shape[1:] and query.shape[0] % key.shape[0] == 0,
        f"query is [Hq, N, d], Hq a multiple of Hkv; got {tuple(query.shape)}, and keys {tuple(key.shape)}.",
    )
