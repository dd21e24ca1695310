"""Storage for what is kept while many policies decode together.

A *row* is one policy's sequence; a *segment* is one KV head of one row. Segments of equal length stand in one block, a
dense tensor that is allocated once with room for the new tokens. So uniform policies attend in one batched product,
ragged ones in as few as possible, the full cache beside them, and no entry is ever padded or masked out.
Query heads of a group share their segment: keys and values are never repeated.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvviz.evict import Retained, RetainedLayer
from kvviz.live import LayerLive, Live
from kvviz.moments import Correction
from kvviz.quantize import Quantized
from kvviz.state import PromptState


class Segment(NamedTuple):
    """What one KV head of one row holds: keys, values [n, d], and where it is tracked the attention mass [n] received."""

    keys: Tensor | Quantized
    values: Tensor | Quantized
    mass: Tensor | None = None


@dataclass
class Block:
    """G segments of equal length.

    Attributes:
        numbers: row * Hkv + head of each segment; `where` is the same as an index, a slice where it can be one.
        keys, values: [G, room, d]; the first `held` entries are in use.
        prefix: older entries elsewhere, G * n of them: in 4 bits, or as they lie in a prompt's state, which is not changed.
        mass: [G, room] float32, attention that the entries received, or None where nobody asks.
    """

    numbers: list[int]
    keys: Tensor
    values: Tensor
    held: int
    prefix: tuple[Quantized, Quantized] | tuple[Tensor, Tensor] | None = None
    mass: Tensor | None = None

    def __post_init__(self) -> None:
        self.where = _index(self.numbers, self.keys.device)

    @classmethod
    def gather(cls, members: dict[int, Segment], room: int, like: Tensor) -> Block:
        """Copy segments of equal length into one block with `room` for new entries, on the device and in the dtype of `like`."""
        parts = list(members.values())
        n, d = parts[0].keys.shape
        prefix, held = None, n
        if isinstance(parts[0].keys, Quantized):
            prefix, held = (Quantized.cat([p.keys for p in parts]), Quantized.cat([p.values for p in parts])), 0
        keys, values = like.new_empty(len(parts), held + room, d), like.new_empty(len(parts), held + room, d)
        mass = None if parts[0].mass is None else like.new_zeros(len(parts), n + room, dtype=torch.float32)
        for i, part in enumerate(parts):
            if prefix is None:
                keys[i, :n], values[i, :n] = part.keys, part.values
            if mass is not None:
                mass[i, :n] = part.mass
        return cls(list(members), keys, values, held, prefix, mass)

    @classmethod
    def after(cls, keys: Tensor, values: Tensor, numbers: range, room: int) -> Block:
        """Room for new entries after those of a whole row, [G * n, d], which stay where they are."""
        new = [part.new_empty(len(numbers), room, part.shape[-1]) for part in (keys, values)]
        return cls(list(numbers), *new, 0, (keys, values))

    @property
    def length(self) -> int:
        """Entries in each segment."""
        return self.held + (self.prefix[0].shape[0] // len(self.numbers) if self.prefix else 0)

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v [R * Hkv, T, d] of all rows: store those of this block's segments."""
        end = self.held + k.shape[1]
        if end > self.keys.shape[1]:
            raise IndexError(f"no room: {end} entries do not fit into {self.keys.shape[1]}")
        self.keys[:, self.held : end] = k[self.where]
        self.values[:, self.held : end] = v[self.where]
        self.held = end

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """keys, values [G, n, d] as attention sees them: the older entries, if they lie elsewhere, and those of this block."""
        own = [(self.keys[:, : self.held], self.values[:, : self.held])]
        if self.prefix is None:
            return own
        shape = (len(self.numbers), -1, self.keys.shape[-1])
        older = (part.dequantize() if isinstance(part, Quantized) else part for part in self.prefix)
        return [tuple(part.view(shape) for part in older), *own]

    def contents(self) -> tuple[Tensor, Tensor]:
        """keys, values [G, length, d] in one piece."""
        parts = self.parts()
        return parts[0] if len(parts) == 1 else tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True))

    def attend(self, q: Tensor, window: int | None, want_log_z: bool) -> tuple[Tensor, Tensor | None]:
        """Attention of scaled queries q [G, g, T, d] over all entries; the last T of them are the queries' own.

        Returns:
            output [G, g, T, d], and log of the partition function [G, g, T] float32 if wanted.
        """
        (count, g, t, d), parts = q.shape, self.parts()
        flat = q.reshape(count, g * t, d)
        logits = [flat @ keys.mT for keys, _ in parts]
        logits = (logits[0] if len(parts) == 1 else torch.cat(logits, dim=-1)).float().view(count, g, t, -1)
        n = logits.shape[-1]
        if t > 1 or (window is not None and n > window):
            logits.masked_fill_(_hidden(n, t, window, q.device), float("-inf"))
        weights, log_z = logits.softmax(dim=-1), None
        if want_log_z:  # of the likeliest entry: its weight is exp(logit) / Z, and never small
            log_z = logits.amax(dim=-1) - weights.amax(dim=-1).log_()
        if self.mass is not None:
            self.mass[:, :n] += weights.sum(dim=2).mean(dim=1)
        weights = weights.to(q.dtype).view(count, g * t, n).split([keys.shape[1] for keys, _ in parts], dim=-1)
        out = weights[0] @ parts[0][1]
        for share, (_, values) in zip(weights[1:], parts[1:], strict=True):
            out.baddbmm_(share, values)
        return out.view(count, g, t, -1), log_z

    def only(self, renumber: dict[int, int]) -> Block | None:
        """This block with only the segments that are keys of `renumber`, under their new numbers."""
        stay = [i for i, number in enumerate(self.numbers) if number in renumber]
        if not stay:
            return None
        numbers = [renumber[self.numbers[i]] for i in stay]
        if len(stay) == len(self.numbers):
            return replace(self, numbers=numbers)
        prefix = None
        if self.prefix:
            parts = [stored.split([self.length - self.held] * len(self.numbers)) for stored in self.prefix]
            prefix = tuple(Quantized.cat([part[i] for i in stay]) for part in parts)
        mass = None if self.mass is None else self.mass[stay]
        return Block(numbers, self.keys[stay], self.values[stay], self.held, prefix, mass)

    def take(self, i: int, index: Tensor) -> Segment:
        """Entries `index` (sorted) of segment number i; those in 4 bits stay as they are and newer ones join them."""
        mass = None if self.mass is None else self.mass[i, index]
        if not self.prefix:
            return Segment(self.keys[i, index], self.values[i, index], mass)
        n = self.length - self.held
        old, new = index[index < n], index[index >= n] - n
        parts = (
            Quantized.cat([stored[i * n : (i + 1) * n][old], Quantized.of(recent[i, new])])
            for stored, recent in zip(self.prefix, (self.keys, self.values), strict=True)
        )
        return Segment(*parts, mass)

    @property
    def bytes(self) -> int:
        """Bytes held, room for new tokens included."""
        return self.keys.nbytes + self.values.nbytes + sum(stored.nbytes for stored in self.prefix or ())

    @property
    def used(self) -> int:
        """Bytes of the entries alone."""
        new = 2 * self.keys[:, : self.held].numel() * self.keys.element_size()
        return new + sum(stored.nbytes for stored in self.prefix or ())


def _hidden(n: int, t: int, window: int | None, device: torch.device) -> Tensor:
    """Which of n entries the last t tokens must not see, [t, n]: later ones, and those outside a sliding window."""
    ahead = torch.arange(n, device=device) - torch.arange(n - t, n, device=device)[:, None]
    return ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)


def _index(numbers: list[int], device: torch.device) -> slice | Tensor:
    """An index of these rows: a slice where they follow one another (a view costs nothing), a tensor otherwise."""
    if numbers and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return slice(numbers[0], numbers[0] + len(numbers))
    return torch.tensor(numbers, device=device, dtype=torch.long)


class LayerCache:
    """One layer of all rows: its blocks, and the corrections of the rows that have one."""

    def __init__(
        self, rows: list[dict[int, Segment] | RetainedLayer], rooms: list[int], like: Tensor, sliding: bool = False
    ) -> None:
        """rows: for each row its segments by head, or a whole layer that stays where it is; rooms: new entries for each row."""
        whole = {r: row for r, row in enumerate(rows) if isinstance(row, RetainedLayer)}
        cut = {r: row for r, row in enumerate(rows) if r not in whole}
        n = len(rows[0].counts if 0 in whole else rows[0])
        self.n_rows, self.n_heads, self.like, self.sliding = len(rows), n, like, sliding
        self.blocks = [Block.after(row.keys, row.values, range(r * n, r * n + n), rooms[r]) for r, row in whole.items()]
        self.add({r * n + h: segment for r, row in cut.items() for h, segment in row.items()}, rooms)
        self.corrections: dict[int, Correction] = {}
        self.stack()

    def add(self, segments: dict[int, Segment], rooms: list[int]) -> None:
        """Put segments into new blocks, those of equal length and kind together."""
        groups: dict[tuple, dict[int, Segment]] = defaultdict(dict)
        for number, segment in segments.items():
            kind = (isinstance(segment.keys, Quantized), segment.mass is not None)
            groups[segment.keys.shape[0], rooms[number // self.n_heads], *kind][number] = segment
        self.blocks += [Block.gather(members, key[1], self.like) for key, members in sorted(groups.items())]

    def remove(self, rows: set[int]) -> None:
        """Take the segments of these rows out, and out of memory."""
        stay = {n: n for n in range(self.n_rows * self.n_heads) if n // self.n_heads not in rows}
        self.blocks = [block for block in (b.only(stay) for b in self.blocks) if block is not None]

    def stack(self) -> None:
        """One correction for all rows that have one, whatever their order and partition."""
        self._corrected = _index(list(self.corrections), self.like.device)
        self._correction = Correction.stack(list(self.corrections.values())) if self.corrections else None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, live: LayerLive | None = None
    ) -> Tensor:
        """Store k, v [R, Hkv, T, d] and answer q [R, Hq, T, d] -> output [R, Hq, T, d]."""
        rows, hq, t, d = q.shape
        k, v = k.reshape(-1, t, d), v.reshape(-1, t, d)
        for block in self.blocks:
            block.append(k, v)
        if live is not None:
            live.saw(q)
            if t == 1:  # algorithm 1 of MomentKV: evict, then attend
                live.evict(self)
        scaled = q.reshape(rows * self.n_heads, hq // self.n_heads, t, d) * scaling
        want_log_z = self._correction is not None
        if len(self.blocks) == 1 and isinstance(self.blocks[0].where, slice):  # all segments, in their order
            out, log_z = self.blocks[0].attend(scaled, window, want_log_z)
        else:
            out = torch.empty_like(scaled)
            log_z = scaled.new_empty(scaled.shape[:3], dtype=torch.float32) if want_log_z else None
            for block in self.blocks:
                out[block.where], part = block.attend(scaled[block.where], window, want_log_z)
                if want_log_z:
                    log_z[block.where] = part
        if want_log_z:
            self._correct(q, out.view(rows, self.n_heads, -1, t, d), log_z.view(rows, self.n_heads, -1, t))
        if live is not None and t > 1:
            live.evict(self)
        return out.view(rows, hq, t, d)

    def _correct(self, q: Tensor, out: Tensor, log_z: Tensor) -> None:
        """Mix the evicted part's estimate into out [R, Hkv, g, T, d], in place."""
        rows = self._corrected
        part = out[rows]
        mixed = self._correction.apply(q.reshape(out.shape)[rows], part, log_z[rows], in_place=True)
        if mixed is not part or not isinstance(rows, slice):
            out[rows] = mixed

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, renumbered 0, 1, ...; the others leave memory."""
        h = self.n_heads
        renumber = {old * h + head: new * h + head for new, old in enumerate(rows) for head in range(h)}
        self.blocks = [block for block in (b.only(renumber) for b in self.blocks) if block is not None]
        self.corrections = {new: self.corrections[old] for new, old in enumerate(rows) if old in self.corrections}
        self.n_rows = len(rows)
        self.stack()

    def row(self, row: int) -> list[tuple[Block, int]]:
        """Where the heads of a row stand: (block, number in the block) of head 0, 1, ..."""
        found = {}
        for block in self.blocks:
            for i, number in enumerate(block.numbers):
                if number // self.n_heads == row:
                    found[number % self.n_heads] = (block, i)
        return [found[h] for h in range(self.n_heads)]

    @property
    def bytes(self) -> int:
        """Bytes held, room for new tokens included."""
        return sum(b.bytes for b in self.blocks)


class RowCache:
    """The caches of several policies over one prompt, layer by layer; also the attention pass that decodes with them.

    Args:
        rows: what each policy kept.
        room: tokens that will be read.
        live: evict while decoding; the rows of policies that can be evicted then need room for `live.every` tokens only.
        state: the prompt's, needed with `live`.
    """

    def __init__(
        self, rows: list[Retained], room: int, live: Live | None = None, state: PromptState | None = None
    ) -> None:
        self.position = rows[0].n_tokens
        """Tokens that the rows have read so far: the next token's true position."""
        self.layers: list[LayerCache] = []
        self.lives: list[LayerLive | None] = []
        for i in range(len(rows[0].layers)):
            parts = [row.layers[i] for row in rows]
            layer_live = None
            if live is not None and not parts[0].sliding:
                layer_live = LayerLive(live, state, i, rows)
            evicting = layer_live.rows if layer_live else {}
            rooms = [min(room, evicting[r].room + live.room) if r in evicting else room for r in range(len(rows))]
            segments = [
                part
                if _stays(row, part) and r not in evicting
                else _segments(part, getattr(evicting.get(r), "mass", None))
                for r, (row, part) in enumerate(zip(rows, parts, strict=True))
            ]
            like = parts[0].keys if isinstance(parts[0].keys, Tensor) else parts[0].keys.scale
            layer = LayerCache(segments, rooms, like, parts[0].sliding)
            for r, (row, part) in enumerate(zip(rows, parts, strict=True)):
                if part.moments is not None and row.policy.correction is not None:
                    layer.corrections[r] = part.moments.finalise(row.policy.correction, row.policy.partition)
            layer.stack()
            self.layers.append(layer)
            self.lives.append(layer_live)
        self._queries: list[list[Tensor]] | None = None

    def attend(self, layer, q, k, v, scaling, window):
        if self._queries is not None:
            self._queries[layer].append(q[0].clone())
        return self.layers[layer].attend(q, k, v, scaling, window, self.lives[layer]).transpose(1, 2)

    def record(self) -> None:
        """From now on keep the queries of the first row."""
        self._queries = [[] for _ in self.layers]

    def recorded(self) -> list[Tensor]:
        """The queries [Hq, P, d] of the first row since `record`, layer by layer."""
        return [torch.cat(pieces, dim=1) for pieces in self._queries if pieces]

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        for layer, live in zip(self.layers, self.lives, strict=True):
            layer.select(rows)
            if live is not None:
                live.select(rows)

    def entries(self, row: int) -> float:
        """Entries a head that a row holds now, averaged over the layers that can be evicted."""
        counts = [block.length for layer in self.layers if not layer.sliding for block, _ in layer.row(row)]
        return sum(counts) / len(counts)

    def held(self, row: int) -> Tensor:
        """True positions that a row which evicts while decoding holds, those of all heads of all its layers together."""
        return torch.cat([part for live in self.lives if live is not None for part in live.positions(row)])

    def row_bytes(self, row: int) -> int:
        """Bytes of the keys and values that a row holds now, without the room for new ones."""
        return sum(block.used // len(block.numbers) for layer in self.layers for block, _ in layer.row(row))

    def moments_bytes(self, row: int) -> int:
        """Bytes of the statistics with which a row that evicts while decoding corrects its output."""
        rows = [live.rows[row] for live in self.lives if live is not None and row in live.rows]
        return sum(r.moments.bytes for r in rows if r.moments is not None and r.policy.correction is not None)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, room for new tokens included."""
        return sum(layer.bytes for layer in self.layers)


def _stays(row: Retained, layer: RetainedLayer) -> bool:
    """Whether a layer is all of the prompt's, as the state holds it: then it is read there, and not copied."""
    return row.budget >= row.n_tokens and isinstance(layer.keys, Tensor)


def _segments(layer: RetainedLayer, mass: list[Tensor] | None) -> dict[int, Segment]:
    parts = (layer.keys.split(layer.counts), layer.values.split(layer.counts), mass or [None] * len(layer.counts))
    return {head: Segment(*each) for head, each in enumerate(zip(*parts, strict=True))}
