"""The error of every layer and query head."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvviz.analysis.core import PIECE, Store
from kvviz.analysis.head import order_of
from kvviz.analysis.views import MEASURES, ErrorMap
from kvviz.errors import decompose
from kvviz.moments import Moments
from kvviz.policies.policy import Policy
from kvviz.state import LayerState


def error_map(store: Store, policy: Policy, budget: int) -> ErrorMap:
    """See `ErrorMap`."""
    layers = store.state.layers
    heads = max(layer.queries.shape[0] for layer in layers)
    measures = {key: np.full((len(layers), heads), np.nan, dtype=np.float32) for key in MEASURES}
    for index in store.open_layers:
        means = layer_errors(layers[index], store.probes(layers[index]), store.mask(policy, budget, index), policy)
        for key, values in means.items():
            measures[key][index] = values.float().cpu().numpy()
    first = layers[store.open_layers[0]]
    return ErrorMap(
        label=policy.label,
        policy=policy.name,
        budget=budget,
        groups=first.groups,
        sliding=np.array([layer.sliding for layer in layers]),
        measures=measures,
        probes=store.probes(first).shape[1],
    )


def layer_errors(layer: LayerState, probes: Tensor, mask: Tensor, policy: Policy) -> dict[str, Tensor]:
    """Key of MEASURES -> [Hq], means over the probes [Hq, P, d]; a few probes at a time where the prompt is long."""
    hq, count, _ = probes.shape
    size = max(1, PIECE // (hq * layer.n_tokens))
    order, partition = order_of(policy), policy.partition
    moments = None
    if size < count:  # the same for every piece
        heads, _, d = layer.keys.shape
        moments = Moments(heads, d, scaling=layer.scaling, second=partition > 0, device=layer.keys.device)
        moments.add(layer.keys, layer.values, mask=~mask)
    sums: dict[str, Tensor | float] = dict.fromkeys(MEASURES, 0.0)
    for piece in probes.split(size, dim=1):
        parts = decompose(
            piece,
            layer.keys,
            layer.values,
            mask,
            scaling=layer.scaling,
            moments=moments,
            order=order,
            partition=partition,
        )
        for key in MEASURES:
            values = parts.log_Z_E - parts.log_Zhat_E if key == "log_z_gap" else parts[key]
            sums[key] = sums[key] + torch.as_tensor(values).sum(dim=1)
    return {key: total / count for key, total in sums.items()}
