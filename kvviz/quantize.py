"""4-bit storage of what is kept: HQQ (half-quadratic quantisation, Badri and Shaji 2023), fitted by the hqq library.

Every entry is quantised on its own, in groups of at most GROUP channels, with a scale and a zero in the cache's dtype. So
entries can be dropped later without quantising the others again. Two codes share a byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 64
"""Channels that share a scale and a zero; a smaller head is one group."""


@dataclass(frozen=True)
class Quantized:
    """S entries of d channels in 4 bits.

    Attributes:
        codes: [S, d / 2] uint8, two codes a byte.
        scale, zero: [S, d / group] in the original dtype; value = (code - zero) * scale.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Quantized:
        """Quantise x [S, d].

        Raises:
            ValueError: d is odd, or not a multiple of the group.
            ImportError: the hqq library is missing.
        """
        from hqq.core.quantize import Quantizer  # here, because importing it takes seconds

        s, d = x.shape
        group = min(GROUP, d)
        if d % 2 or d % group:
            raise ValueError(f"4-bit storage needs a head size that is even and a multiple of {GROUP}; got {d}.")
        if s == 0:
            empty = x.new_empty(0, d // group)
            return cls(x.new_empty(0, d // 2, dtype=torch.uint8), empty, empty)
        codes, meta = Quantizer.quantize(
            x.float(),
            nbits=4,
            group_size=group,
            axis=1,
            bitpack=False,
            device=str(x.device),
            compute_dtype=torch.float32,
        )
        codes = codes.reshape(s, d).to(torch.uint8)
        scale, zero = (meta[name].reshape(s, -1).to(x.dtype) for name in ("scale", "zero"))
        return cls(codes[:, ::2] | codes[:, 1::2] << 4, scale, zero)

    def dequantize(self) -> Tensor:
        """The values that attention sees, [S, d]."""
        codes = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1)
        grouped = codes.to(self.scale.dtype).unflatten(1, (self.scale.shape[1], -1))
        return ((grouped - self.zero[..., None]) * self.scale[..., None]).flatten(1)

    def __getitem__(self, rows) -> Quantized:
        """The entries `rows`, as they are."""
        return Quantized(self.codes[rows], self.scale[rows], self.zero[rows])

    @staticmethod
    def cat(parts: list[Quantized]) -> Quantized:
        """Entries one after another."""
        return Quantized(*(torch.cat([getattr(p, name) for p in parts]) for name in ("codes", "scale", "zero")))

    def split(self, counts) -> list[Quantized]:
        """Consecutive parts of `counts` entries."""
        parts = (t.split(counts) for t in (self.codes, self.scale, self.zero))
        return [Quantized(*part) for part in zip(*parts, strict=True)]

    @property
    def shape(self) -> tuple[int, int]:
        """(S, d)."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes


def entry_bytes(d: int, itemsize: int) -> float:
    """Bytes of one quantised key or value of d channels: codes, and scales and zeros of `itemsize` bytes."""
    return d / 2 + 2 * itemsize * d / min(GROUP, d)
