"""A run: evict under every policy, write side by side, compare with the full cache.

`Generation` holds what belongs to one run and yields its events; `Engine.generate` is the door to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvviz import metrics
from kvviz.cache import RowCache
from kvviz.decode import FORWARD_TOKENS, GREEDY, Sampling, Step, decode, teacher_force
from kvviz.events import Compared, Doing, Event, Evicted, Token
from kvviz.evict import Retained, evict, score_layers
from kvviz.limits import NO_LIMITS, Limits
from kvviz.live import Live
from kvviz.models import Loaded
from kvviz.policies.policy import Policy, policy
from kvviz.runs import Row
from kvviz.state import PromptState

TOP_WORDS = 3

RASTER_BINS, RASTER_STEPS = 300, 120
"""How finely a run notes which positions are held while it evicts: parts of the sequence, and steps."""


@dataclass
class Generation:
    """One run on one prompt.

    Attributes:
        state: of the prompt; `write` and `compare` may replace it by one with probes.
        follow: ids of the question, read after eviction.
        chosen: (policy, budget) of each row; row 0 is the full cache.
        evict_every: tokens between evictions while decoding, or None.
        reference: the full cache's row of an earlier run of the same prompt and question, which then is not written again.
        rows: what is known of each row so far.
    """

    loaded: Loaded
    state: PromptState
    follow: list[int]
    chosen: list[tuple[Policy, int]]
    max_new_tokens: int
    eos: frozenset[int]
    sampling: Sampling = GREEDY
    evict_every: int | None = None
    compare: bool = True
    reference: Row | None = None
    limits: Limits = NO_LIMITS
    kept: list[Retained] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def events(self) -> Iterator[Event]:
        """Everything, in order."""
        if any("probes" in each.scorer.needs for each, _ in self.chosen) and self.state.layers[0].probes is None:
            yield from self._find_probes()
        yield from self._evict()
        live, known = None, 0
        if self.evict_every is not None:
            piece = min(max(len(self.follow), 1), FORWARD_TOKENS)
            live = Live(self.evict_every, tuple(budget for _, budget in self.chosen), piece)
        elif self.reference is not None:
            self.rows[0], known = replace(self.reference, kl=[], top=[]), 1
        yield from self._write(live, known)
        for row in self.rows:
            row.first_difference = metrics.first_difference(self.rows[0].token_ids, row.token_ids)
        if live is None and self.compare:
            yield from self._compare()

    @property
    def total_tokens(self) -> int:
        """Prompt, question and the longest output."""
        return self.state.n_tokens + len(self.follow) + self.max_new_tokens

    def _find_probes(self) -> Iterator[Event]:
        """The oracle looks at the queries of the full cache's own continuation, which must be written first."""
        yield Doing(0.0, "Writing the full cache's output for the oracle")
        full, room = evict(self.state, policy("full"), self.state.n_tokens), len(self.follow) + self.max_new_tokens
        answer = [step.tokens[0] for step in self._decode(RowCache([full], room), GREEDY)]
        cache = RowCache([full], room)
        cache.record()
        for _ in self._forced(cache, answer):
            pass
        self.state = self.state.with_probes(cache.recorded())

    def _evict(self) -> Iterator[Event]:
        scores: dict[Policy, list[Tensor | None]] = {}  # of a policy; they serve all its budgets
        for number, (each, budget) in enumerate(self.chosen):
            yield Doing(number / len(self.chosen), f"Evicting with {each.title}")
            began = time.perf_counter()
            if each not in scores and not each.keeps_all and budget < self.state.n_tokens:
                scores[each] = score_layers(self.state, each)
            scored = time.perf_counter() - began
            kept = evict(self.state, each, budget, scores.get(each))
            row = Row(each.name, each.label, budget, each.settings())
            row.keeps(kept)
            row.seconds = {"prefill": self.state.seconds, "evict": scored + kept.seconds, "decode": 0.0}
            self.kept.append(kept)
            self.rows.append(row)
            yield Evicted(number, row)
        self.limits.check_kv(sum(kept.bytes for kept in self.kept), f"A run of {len(self.kept)} rows")

    def _decode(self, cache: RowCache, sampling: Sampling, shadows: int = 0) -> Iterator[Step]:
        return decode(
            self.loaded.model,
            cache,
            self.follow,
            self.state.logits,
            max_new_tokens=self.max_new_tokens,
            eos=self.eos,
            sampling=sampling,
            shadows=shadows,
        )

    def _forced(self, cache: RowCache, answer: list[int]) -> Iterator[Tensor]:
        return teacher_force(self.loaded.model, cache, self.follow, self.state.logits, answer)

    def _write(self, live: Live | None, known: int) -> Iterator[Event]:
        """Write the rows from number `known` on; while evicting, a shadow of each policy reads what row 0 writes."""
        if not self.kept[known:]:
            return
        began, shadows = time.perf_counter(), self.kept[1:] if live and self.compare else []
        shown = ["" for _ in self.rows]
        yield Doing(0.0, "Reading the question" if self.follow else "Writing")
        if shadows:
            live = replace(live, budgets=live.budgets + live.budgets[1:])
        cache = RowCache(self.kept[known:] + shadows, len(self.follow) + self.max_new_tokens, live, self.state)
        for number, step in enumerate(self._decode(cache, self.sampling, len(shadows))):
            for index, token in step.tokens.items():
                row = self.rows[index + known]
                row.seconds["decode"] = time.perf_counter() - began
                row.token_ids.append(token)
                row.finish = (
                    "end" if token in self.eos else "length" if len(row.token_ids) == self.max_new_tokens else ""
                )
                yield Token(index + known, token, self._readable(row, shown, index + known))
            for shadow, value in step.kl.items():
                self.rows[shadow - len(shadows)].kl.append(value)
            if live:
                self._note_cache(cache, step, number)
            yield Doing(
                (number + 1) / self.max_new_tokens, f"Writing token {number + 1} of at most {self.max_new_tokens}"
            )

    def _readable(self, row: Row, shown: list[str], number: int) -> str:
        """What the newest token adds to the text that can be read (a character may take several tokens)."""
        decode_ids = self.loaded.tokenizer.decode
        row.text = decode_ids(row.token_ids, skip_special_tokens=True)
        row.pieces.append(decode_ids([row.token_ids[-1]]))
        new = row.text.rstrip("\ufffd")[len(shown[number]) :]
        shown[number] += new
        return new

    def _note_cache(self, cache: RowCache, step: Step, number: int) -> None:
        """What each row that is writing holds now."""
        for index, which in enumerate(step.active):
            if which not in step.tokens:
                continue
            row = self.rows[which]
            row.entries_by_step.append(cache.entries(index))
            row.bytes_by_step.append(cache.row_bytes(index))
            row.moments_bytes = max(row.moments_bytes, cache.moments_bytes(index))
            if which > 0 and number % max(1, self.max_new_tokens // RASTER_STEPS) == 0:
                row.raster_steps.append(number)
                row.raster.append(_occupancy(cache, index, self.total_tokens))

    def _compare(self) -> Iterator[Event]:
        """Measure every row along the full cache's own output, and keep the full cache's queries as probes."""
        answer, decode_ids = self.rows[0].token_ids, self.loaded.tokenizer.decode
        cache = RowCache(self.kept, room=len(self.follow) + len(answer))
        cache.record()
        done, agrees = 0, [() for _ in self.rows]
        for logits in self._forced(cache, answer):
            likeliest = logits.argmax(dim=-1)
            agrees = [a + tuple(same) for a, same in zip(agrees, (likeliest == likeliest[:1]).tolist(), strict=True)]
            kl = metrics.kl_divergence(logits[:1], logits).tolist()
            words, chances = (t.tolist() for t in metrics.top_words(logits, TOP_WORDS))
            for row, values, ids, ps in zip(self.rows, kl, words, chances, strict=True):
                row.kl += values
                steps = zip(ids, ps, strict=True)
                row.top += [[(decode_ids([i]), p) for i, p in zip(*step, strict=True)] for step in steps]
            done += logits.shape[1]
            yield Doing(done / len(answer), "Comparing with the full cache")
        for number, same in enumerate(agrees):
            yield Compared(number, same)
        self.state = self.state.with_probes(cache.recorded())


def _occupancy(cache: RowCache, row: int, total: int) -> list[float]:
    """The share of heads that hold each of up to RASTER_BINS equal parts of a sequence of `total` tokens."""
    bins, held = min(RASTER_BINS, total), cache.held(row)
    heads = sum(len(live.positions(row)) for live in cache.lives if live is not None)
    counts = torch.bincount(held * bins // total, minlength=bins)
    size = torch.bincount(torch.arange(total) * bins // total, minlength=bins).to(counts.device)
    return [round(share, 3) for share in (counts / (size * heads)).tolist()]
