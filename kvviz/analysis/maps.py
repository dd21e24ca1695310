"""The error of every layer and query head, under one setting or under all positions of a slider."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvviz.analysis.core import PIECE, Setting, Store
from kvviz.analysis.head import order_of
from kvviz.analysis.views import MEASURES, ErrorMap
from kvviz.errors import decompose, decompose_sets
from kvviz.moments import Moments
from kvviz.policies.policy import Policy
from kvviz.state import LayerState


def error_maps(store: Store, settings: Sequence[Setting], pace: Callable[[], None] = lambda: None) -> list[ErrorMap]:
    """See `ErrorMap`. Many settings at once cost a fraction of what each costs alone.

    Args:
        settings: of policies with the same correction, in the order of a slider.
        pace: called before each layer; it may raise to end it all, and what is done stays in memory.
    """
    layers = store.state.layers
    heads = max(layer.queries.shape[0] for layer in layers)
    found = [np.full((len(MEASURES), len(layers), heads), np.nan, dtype=np.float32) for _ in settings]
    for index in store.open_layers:
        pace()
        for values, own in zip(found, _layer(store, settings, index), strict=True):
            values[:, index] = own
    first = layers[store.open_layers[0]]
    return [
        ErrorMap(
            label=policy.label,
            policy=policy.name,
            budget=budget,
            groups=first.groups,
            sliding=np.array([layer.sliding for layer in layers]),
            measures=dict(zip(MEASURES, values, strict=True)),
            probes=store.probes(first).shape[1],
        )
        for (policy, budget), values in zip(settings, found, strict=True)
    ]


def _layer(store: Store, settings: Sequence[Setting], index: int) -> list[np.ndarray]:
    """Each setting's measures [M, Hq] in one layer; those not in memory together."""
    key = lambda setting: ("layer errors", *setting, index)  # noqa: E731
    new = _errors(store, [setting for setting in settings if not store.holds(key(setting))], index)
    return [store.result(key(s), lambda s=s: new[s] if s in new else _errors(store, [s], index)[s]) for s in settings]


def _errors(store: Store, settings: Sequence[Setting], index: int) -> dict[Setting, np.ndarray]:
    """Each setting's measures [M, Hq] in one layer, worked out together."""
    if not settings:
        return {}
    layer = store.state.layers[index]
    sets = torch.stack([store.mask(*setting, index) for setting in settings])
    made = layer_errors(layer, store.probes(layer), sets, settings[0][0])
    return dict(zip(settings, made.transpose(0, 1).cpu().numpy(), strict=True))


def layer_errors(layer: LayerState, probes: Tensor, sets: Tensor, policy: Policy) -> Tensor:
    """MEASURES under each of sets [B, Hkv, N], [M, B, Hq] float32: means over the probes [Hq, P, d].

    A few probes at a time where the prompt is long.
    """
    hq, count, d = probes.shape
    size = max(1, PIECE // (hq * max(layer.n_tokens, len(sets) * d)))
    own = {"scaling": layer.scaling, "order": order_of(policy), "partition": policy.partition}
    if len(sets) == 1 and size < count:  # the same for every piece
        own["moments"] = Moments(
            len(layer.keys), d, scaling=layer.scaling, second=policy.partition > 0, device=layer.keys.device
        )
        own["moments"].add(layer.keys, layer.values, mask=~sets[0])
    total = 0.0
    for piece in probes.split(size, dim=1):
        if len(sets) > 1:
            parts = decompose_sets(piece, layer.keys, layer.values, sets, **own)
        else:
            parts = decompose(piece, layer.keys, layer.values, sets[0], **own)
        shown = [parts.log_Z_E - parts.log_Zhat_E if key == "log_z_gap" else parts[key] for key in MEASURES]
        total = total + torch.stack(shown).float().sum(dim=-1)
    return (total / count).view(len(MEASURES), len(sets), hq)
