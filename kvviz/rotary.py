"""Rotary position embedding (RoPE), read from the model's own rotary module.

The policies need three things that a forward pass does not hand out: a query taken back to what it was before RoPE, a
query statistic moved to *future* positions, and the rotation itself. Cosines and sines always come from the model, so
llama3 and YaRN scaling (with YaRN's attention factor, which is part of cos and sin) are right by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + r/2) of x [..., P, d] by the angles of cos, sin [P, r]; channels from r on stay."""
    r = cos.shape[-1]
    half = r // 2
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x[..., :half], x[..., half:r]
    turned = x[..., :r] * cos
    turned[..., :half].addcmul_(second, sin[..., :half], value=-1)
    turned[..., half:].addcmul_(first, sin[..., half:])
    return turned if r == x.shape[-1] else torch.cat((turned, x[..., r:]), dim=-1)


@dataclass(frozen=True)
class Rotary:
    """The rotations of one layer type.

    `table(positions [P]) -> cos [P, r], sin [P, r]` in float32; r is the rotary part of the head (r <= d, partial
    rotary models turn only the first r channels).
    """

    table: Callable[[Tensor], tuple[Tensor, Tensor]]

    @classmethod
    def from_theta(cls, theta: float, head_dim: int) -> Rotary:
        """Plain RoPE with base `theta` over the whole head."""

        def table(positions: Tensor) -> tuple[Tensor, Tensor]:
            exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
            angle = positions.float()[:, None] * (theta**-exponent)[None]
            angle = torch.cat((angle, angle), dim=-1)
            return angle.cos(), angle.sin()

        return cls(table)

    @classmethod
    def from_module(cls, module: torch.nn.Module, layer_type: str | None = None) -> Rotary:
        """The rotations of a transformers rotary module (`model.model.rotary_emb`); Gemma 3 has one for each layer type."""
        extra = {} if layer_type is None else {"layer_type": layer_type}

        def table(positions: Tensor) -> tuple[Tensor, Tensor]:
            like = torch.empty(0, device=positions.device, dtype=torch.float32)
            cos, sin = module(like, positions[None], **extra)
            return cos[0].float(), sin[0].float()

        return cls(table)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., P, d] before RoPE, positions [P] -> after RoPE."""
        return turn(x, *self.table(positions))

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., P, d] after RoPE, positions [P] -> before RoPE (YaRN's attention factor divided out again)."""
        return turn(x, *self.inverse_table(positions))

    def inverse_table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [P, r] that undo `table(positions)`."""
        cos, sin = self.table(positions)
        square = cos[:1] ** 2 + sin[:1] ** 2  # [1, r]: 1, or YaRN's attention factor squared
        return cos / square, -sin / square

    def mean_matrix(self, start: int, count: int, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
        """The mean rotation matrix of positions start ... start + count - 1, [d, d]; after RoPE = matrix @ before."""
        cos, sin = self.table(torch.arange(start, start + count, device=device))
        basis = torch.eye(head_dim, device=device)  # row i is e_i; turning it gives column i of the matrix
        return turn(basis, cos.mean(0, keepdim=True), sin.mean(0, keepdim=True)).T
