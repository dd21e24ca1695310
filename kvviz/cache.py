"""Storage for what is kept while many policies decode together.

A *row* is one policy's sequence; a *segment* is one KV head of one row. Segments of equal length stand in one block, a
dense tensor that is allocated once with room for the new tokens. So uniform policies attend in one batched product,
ragged ones in as few as possible, the full cache beside them, and no entry is ever padded or masked out.
Queries heads of a group share their segment: keys and values are never repeated.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from kvviz.evict import Retained, RetainedLayer
from kvviz.moments import Correction


@dataclass
class Block:
    """G segments of equal length. keys, values [G, room, d]; the first `length` entries are in use."""

    segments: Tensor
    keys: Tensor
    values: Tensor
    length: int

    @classmethod
    def gather(cls, segments: list[int], parts: list[tuple[Tensor, Tensor]], room: int) -> Block:
        """Copy parts (keys [n, d], values [n, d]) of equal length into one block with room for `room` new entries."""
        first, _ = parts[0]
        n, d = first.shape
        keys = first.new_empty(len(parts), n + room, d)
        values = first.new_empty(len(parts), n + room, parts[0][1].shape[1])
        for i, (k, v) in enumerate(parts):
            keys[i, :n], values[i, :n] = k, v
        return cls(torch.tensor(segments, device=first.device), keys, values, n)

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v [R * Hkv, T, d] of all rows: store those of this block's segments."""
        end = self.length + k.shape[1]
        self.keys[:, self.length : end] = k[self.segments]
        self.values[:, self.length : end] = v[self.segments]
        self.length = end

    def attend(self, q: Tensor, new: int, window: int | None, want_log_z: bool) -> tuple[Tensor, Tensor | None]:
        """Attention of scaled queries q [G, g, T, d] over all entries; the last `new` = T of them are the queries' own.

        Returns:
            output [G, g, T, d], and log of the partition function [G, g, T] float32 if wanted.
        """
        g_segments, g, t, d = q.shape
        keys, values = self.keys[:, : self.length], self.values[:, : self.length]
        logits = (q.reshape(g_segments, g * t, d) @ keys.mT).float().view(g_segments, g, t, self.length)
        if new > 1 or (window is not None and self.length > window):
            logits.masked_fill_(self._hidden(t, window, q.device), float("-inf"))
        log_z = None
        if want_log_z:
            log_z = logits.logsumexp(dim=-1)
            weights = (logits - log_z[..., None]).exp_()
        else:
            weights = logits.softmax(dim=-1)
        out = weights.to(values.dtype).view(g_segments, g * t, self.length) @ values
        return out.view(g_segments, g, t, -1), log_z

    def _hidden(self, t: int, window: int | None, device: torch.device) -> Tensor:
        ahead = (
            torch.arange(self.length, device=device)
            - torch.arange(self.length - t, self.length, device=device)[:, None]
        )
        hidden = ahead > 0
        return hidden if window is None else hidden | (ahead <= -window)

    def only(self, renumber: dict[int, int]) -> Block | None:
        """This block with only the segments that are keys of `renumber`, under their new numbers."""
        numbers = self.segments.tolist()
        stay = [i for i, segment in enumerate(numbers) if segment in renumber]
        if not stay:
            return None
        segments = torch.tensor([renumber[numbers[i]] for i in stay], device=self.segments.device)
        if len(stay) == len(numbers):
            return Block(segments, self.keys, self.values, self.length)
        return Block(segments, self.keys[stay], self.values[stay], self.length)


class LayerCache:
    """One layer of all rows: its blocks, and the corrections of the rows that have one."""

    def __init__(self, rows: list[RetainedLayer], settings: list[tuple[int | None, float]], room: int) -> None:
        self.n_rows, self.n_heads = len(rows), len(rows[0].counts)
        by_length: dict[int, list[tuple[int, tuple[Tensor, Tensor]]]] = defaultdict(list)
        for r, layer in enumerate(rows):
            for h, (k, v, _) in enumerate(layer.heads()):
                by_length[k.shape[0]].append((r * self.n_heads + h, (k, v)))
        self.blocks = [
            Block.gather([segment for segment, _ in members], [part for _, part in members], room)
            for _, members in sorted(by_length.items())
        ]
        self._prepared = {
            r: layer.moments.finalise(order, partition)
            for r, (layer, (order, partition)) in enumerate(zip(rows, settings, strict=True))
            if layer.moments is not None and order is not None
        }
        self._stack()

    def _stack(self) -> None:
        """One correction for all rows that have one, whatever their order and partition."""
        self.corrected = torch.tensor(list(self._prepared), device=self.blocks[0].keys.device)
        self.correction = Correction.stack(list(self._prepared.values())) if self._prepared else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        """Store k, v [R, Hkv, T, d] and answer q [R, Hq, T, d] -> output [R, Hq, T, d]."""
        rows, hq, t, d = q.shape
        flat = q.reshape(rows * self.n_heads, hq // self.n_heads, t, d)
        k, v = k.reshape(-1, t, k.shape[-1]), v.reshape(-1, t, v.shape[-1])
        scaled = flat * scaling
        want_log_z = self.correction is not None
        out = scaled.new_empty(*flat.shape[:3], v.shape[-1])
        log_z = out.new_empty(flat.shape[:3], dtype=torch.float32) if want_log_z else None
        for block in self.blocks:
            block.append(k, v)
            part, part_z = block.attend(scaled[block.segments], t, window, want_log_z)
            out[block.segments] = part
            if want_log_z:
                log_z[block.segments] = part_z
        if want_log_z:
            self._correct(q, out.view(rows, self.n_heads, -1, t, out.shape[-1]), log_z.view(rows, self.n_heads, -1, t))
        return out.view(rows, hq, t, -1)

    def _correct(self, q: Tensor, out: Tensor, log_z: Tensor) -> None:
        """Mix the evicted part's estimate into out [R, Hkv, g, T, d], in place."""
        grouped = q.reshape(out.shape[:-1] + q.shape[-1:])
        rows = self.corrected
        out[rows] = self.correction.apply(grouped[rows], out[rows], log_z[rows])

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, renumbered 0, 1, ...; the others leave memory."""
        h = self.n_heads
        renumber = {old * h + head: new * h + head for new, old in enumerate(rows) for head in range(h)}
        self.blocks = [block for block in (b.only(renumber) for b in self.blocks) if block is not None]
        self._prepared = {new: self._prepared[old] for new, old in enumerate(rows) if old in self._prepared}
        self.n_rows = len(rows)
        self._stack()

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, room for new tokens included."""
        return sum(b.keys.nbytes + b.values.nbytes for b in self.blocks)


class RowCache:
    """The caches of several policies over one prompt, layer by layer; also the attention pass that decodes with them."""

    def __init__(self, rows: list[Retained], room: int) -> None:
        settings = [(row.policy.correction, row.policy.partition) for row in rows]
        self.layers = [LayerCache([row.layers[i] for row in rows], settings, room) for i in range(len(rows[0].layers))]
        self.position = rows[0].n_tokens
        """Tokens that the rows have read so far: the next token's true position."""
        self._queries: list[list[Tensor]] | None = None

    def attend(self, layer, q, k, v, scaling, window):
        if self._queries is not None:
            self._queries[layer].append(q[0].clone())
        return self.layers[layer].attend(q, k, v, scaling, window).transpose(1, 2)

    def record(self) -> None:
        """From now on keep the queries of the first row."""
        self._queries = [[] for _ in self.layers]

    def recorded(self) -> list[Tensor]:
        """The queries [Hq, P, d] of the first row since `record`, layer by layer."""
        return [torch.cat(pieces, dim=1) for pieces in self._queries if pieces]

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        for layer in self.layers:
            layer.select(rows)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, room for new tokens included."""
        return sum(layer.bytes for layer in self.layers)
