"""Where later queries are expected: the prompt's mean query and covariance, moved to the positions to come.

Both are taken before RoPE, without the first tokens, and turned by the mean rotation matrix of the next
positions (Expected Attention, arXiv:2510.00636; CapKV's published code does the same with the mean).
"""

from __future__ import annotations

from torch import Tensor

from kvviz.policies.attention_scores import precise
from kvviz.policies.base import require
from kvviz.state import LayerState


def check_future(future_positions: int, sinks: int) -> None:
    """The two counts that the methods with expected queries share."""
    require(
        future_positions == int(future_positions) and future_positions >= 1,
        f"future_positions is a number of positions, 1 or more; got {future_positions}.",
    )
    require(sinks == int(sinks) and sinks >= 0, f"sinks is a number of first tokens, 0 or more; got {sinks}.")


def _mean_rotation(layer: LayerState, future_positions: int) -> Tensor:
    keys = layer.keys
    start = max(layer.total_tokens, layer.n_tokens)
    matrix = layer.rotary.mean_matrix(start, future_positions, keys.shape[-1], keys.device)
    return matrix.to(precise(keys[:0]).dtype)


def future_mean(layer: LayerState, future_positions: int) -> Tensor:
    """mu, the expected query at the next positions, [Hq, d]."""
    turn = _mean_rotation(layer, future_positions)
    return layer.query_mean.to(turn.dtype) @ turn.T


def future_covariance(layer: LayerState, future_positions: int) -> Tensor:
    """Sigma, its covariance, [Hq, d, d]."""
    turn = _mean_rotation(layer, future_positions)
    return turn @ layer.query_cov.to(turn.dtype) @ turn.T
