"""How much memory a loaded model takes on its device, and how much is left."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from kvviz.models import Loaded


@dataclass(frozen=True)
class Memory:
    """Bytes on the device: the weights, and what is free."""

    weights: int
    free: int


def of(loaded: Loaded) -> Memory:
    """The memory of a loaded model's device now."""
    weights = loaded.parameters * loaded.dtype.itemsize
    if loaded.device.type == "cuda":
        return Memory(weights, torch.cuda.mem_get_info(loaded.device)[0])
    return Memory(weights, psutil.virtual_memory().available)


def words(size: float) -> str:
    """Bytes as people read them: "5.6 MiB", "19 GiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            value = size / scale
            return (
                f"{value:.0f} {unit}"
                if value >= 99.5
                else f"{value:.3g} {unit}"
                if value >= 10
                else f"{value:.2g} {unit}"
            )
    return f"{size:.0f} bytes"
