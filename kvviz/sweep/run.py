"""Runs a sweep: reads each prompt once, and writes all its rows in large batches, the full cache once."""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
import transformers

from kvviz.engine import Engine
from kvviz.events import Compared, Doing, Event, Finished, Token
from kvviz.exceptions import OutOfMemory, memory_advice
from kvviz.metrics import first_difference
from kvviz.prefill import Progress
from kvviz.prompts import check_length
from kvviz.runs import Row
from kvviz.state import PromptState
from kvviz.sweep.batches import split
from kvviz.sweep.follow import follow
from kvviz.sweep.pace import Pace, in_words
from kvviz.sweep.request import FULL, Case, Cell, Sweep
from kvviz.sweep.rows import VERSION, SweepRow
from kvviz.sweep.store import Store
from kvviz.tasks import Example


@dataclass(frozen=True)
class Sweeping(Doing):
    """How far a sweep is: rows done of all, and an estimate of the seconds left (None before there is one)."""

    done: int = 0
    total: int = 0
    seconds_left: float | None = None


@dataclass(frozen=True)
class Scored:
    """A row is done, and saved."""

    row: SweepRow


def run(sweep: Sweep, engine: Engine, progress: Progress) -> Iterator[Event]:
    """See `Sweep.run`."""
    _check(sweep, engine)
    store = Store(sweep.folder, config(sweep, engine), sweep.resume)
    known = {row.key: row for row in store.rows}
    work = [(case, [cell for cell in sweep.cells(case) if cell.key not in known]) for case in sweep.cases]
    work = [(case, cells) for case, cells in work if cells]
    runner = _Runner(sweep, engine, progress, store, work)
    for case, cells in work:
        yield from runner.case(case, cells, known.get(Cell(case, FULL).key))
    yield Finished(store.result)


def config(sweep: Sweep, engine: Engine) -> dict[str, Any]:
    """What was asked for and of what model, as plain values."""
    loaded = engine.loaded
    return {
        "version": VERSION,
        "model": loaded.name,
        "revision": loaded.revision,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": sweep.n_rows,
        "max_new_tokens": sweep.max_new_tokens,
        "compare": sweep.compare,
        "evict_every": sweep.evict_every,
        "command": sweep.command(),
    }


def _check(sweep: Sweep, engine: Engine) -> None:
    """Everything that can be known to fail fails now, before the first prompt is read."""
    for task in sweep.tasks:
        for length in sweep.lengths:
            check_length(length, _new_tokens(sweep, task), engine.loaded.positions)
            for seed in {min(sweep.seeds), max(sweep.seeds)}:
                task.make(seed, length, engine.tokenizer)


def _new_tokens(sweep: Sweep, about) -> int:
    """Tokens that a row of a task, or of an example of it, writes at most."""
    return sweep.max_new_tokens or about.max_new_tokens


class _Runner:
    """Goes from prompt to prompt and keeps count."""

    def __init__(self, sweep: Sweep, engine: Engine, progress: Progress, store: Store, work: list) -> None:
        self.sweep, self.engine, self.progress, self.store = sweep, engine, progress, store
        self.total, self.done = sum(len(cells) for _, cells in work), 0
        self.pace = Pace(
            sum(case.length for case, _ in work),
            sum(len(cells) * _new_tokens(sweep, case.task) for case, cells in work),
        )

    def case(self, case: Case, cells: list[Cell], full: SweepRow | None) -> Iterator[Event]:
        """One prompt: read it, then its rows, batch after batch."""
        example = case.task.make(case.seed, case.length, self.engine.tokenizer)
        state = yield from self._read(case, example, cells)
        reference = (
            None if full is None else Row("full", full.label, full.budget, text=full.text, token_ids=[*full.token_ids])
        )
        following = self.engine.tokenizer(example.continuation, add_special_tokens=False)["input_ids"]
        new = case.length - state.n_tokens + (len(following) or _new_tokens(self.sweep, example))
        sizes = split(self.engine, state, [_entries(cell, state) for cell in cells], new)
        batches = deque(cells[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes)))
        while batches:
            batch = batches.popleft()
            began = time.perf_counter()
            self.pace.begin("write", len(batch) * _new_tokens(self.sweep, case.task))
            try:
                if following:
                    rows = yield from self._follow(case, following, state, batch)
                else:
                    rows, reference = yield from self._write(case, example, state, batch, reference)
            except OutOfMemory:
                if len(batch) == 1:
                    raise
                batches.extendleft([batch[len(batch) // 2 :], batch[: len(batch) // 2]])
                continue
            self.pace.end(time.perf_counter() - began)
            self.store.add(rows)
            self.done += len(rows)
            for row in rows:
                yield Scored(row)
            state = self.engine.latest(state)

    def _read(self, case: Case, example: Example, cells: list[Cell]) -> Iterator[Event]:
        began = time.perf_counter()
        self.pace.begin("read", case.length)
        mass = any("attention_mass" in cell.policy.scorer.needs for cell in cells)

        def progress(share: float, _: str) -> None:
            doing = self._doing(case, share, "reading")
            self.progress(doing.share, doing.text)

        yield self._doing(case, 0.0, "reading")
        state = example.prompt(case.seen).prefill(self.engine, mass, progress)
        self.pace.end(time.perf_counter() - began)
        return state

    def _write(
        self, case: Case, example: Example, state: PromptState, batch: list[Cell], reference: Row | None
    ) -> Iterator[Event]:
        """Write a batch of rows; also the full cache's where there is no `reference` yet."""
        policies = [cell for cell in batch if cell.budget is not None]
        prompt, new = example.prompt(case.seen), _new_tokens(self.sweep, example)
        written, agrees = 0, {}
        for event in self.engine.generate(
            state,
            "" if case.seen else prompt.question,
            [cell.policy for cell in policies],
            [_entries(cell, state) for cell in policies],
            new,
            answer="" if case.seen else prompt.answer,
            evict_every=self.sweep.evict_every,
            compare=self.sweep.compare,
            reference=reference,
        ):
            if isinstance(event, Token):
                written += 1
            elif isinstance(event, Doing):
                yield self._doing(case, written / (new * len(batch)), event.text[0].lower() + event.text[1:])
            elif isinstance(event, Compared):
                agrees[event.row] = event.agrees
            elif isinstance(event, Finished):
                out = event.run.rows
        cells = [Cell(case, FULL), *policies]
        rows = [
            _written(cell, example, state, row, agrees.get(number), len(batch))
            for number, (cell, row) in enumerate(zip(cells, out, strict=True))
            if cell in batch
        ]
        return rows, reference or out[0]

    def _follow(self, case: Case, ids: list[int], state: PromptState, batch: list[Cell]) -> Iterator[Event]:
        """Read what really follows with a batch of rows, the full cache among them for comparison."""
        policies = [cell for cell in batch if cell.budget is not None]
        cells = [Cell(case, FULL), *policies]
        with memory_advice("reading what follows"):
            for event in follow(self.engine, state, [(cell.policy, _entries(cell, state)) for cell in cells], ids):
                if isinstance(event, Doing):
                    yield self._doing(case, event.share, event.text[0].lower() + event.text[1:])
                else:
                    out = event
        return [_followed(cell, state, row, len(batch)) for cell, row in zip(cells, out, strict=True) if cell in batch]

    def _doing(self, case: Case, share: float, what: str) -> Sweeping:
        self.pace.at(share)
        left = self.pace.seconds_left
        text = f"Sweep, rows {self.done:,} of {self.total:,}"
        text += f", about {in_words(left)} left" if left is not None else ""
        text += f": {case.task.name}, {case.length:,} tokens, seed {case.seed}, {what}"
        return Sweeping(self.pace.share, text, self.done, self.total, left)


def _entries(cell: Cell, state: PromptState) -> int:
    return state.n_tokens if cell.budget is None else cell.budget.of(state.n_tokens)


def _asked(cell: Cell, state: PromptState) -> dict[str, Any]:
    """What a row says about what it was asked for."""
    case, chosen = cell.case, cell.policy
    task, length, seed, seen, spec, asked = cell.key
    return {
        "task": task,
        "length": length,
        "seed": seed,
        "seen": seen,
        "spec": spec,
        "asked": asked,
        "family": case.task.family,
        "kind": case.task.kind,
        "policy": chosen.name,
        "label": chosen.label,
        "tau": getattr(chosen.scorer, "tau", None),
        "prompt_tokens": state.n_tokens,
        "budget": _entries(cell, state),
    }


def _written(
    cell: Cell, example: Example, state: PromptState, row: Row, agrees: tuple[bool, ...] | None, batch_rows: int
) -> SweepRow:
    return SweepRow(
        **_asked(cell, state),
        metric=example.metric,
        share_removed=1 - row.entries / state.n_tokens,
        score=example.score(row.text),
        text=row.text,
        token_ids=tuple(row.token_ids),
        finish=row.finish,
        answers=example.answers,
        along="output" if row.kl else "",
        kl=tuple(row.kl),
        mean_kl=row.mean_kl,
        agreement=_mean(agrees),
        first_difference=row.first_difference,
        entries=row.entries,
        bytes=row.bytes,
        kv_bytes=row.kv_bytes,
        moments_bytes=row.moments_bytes,
        prefill_seconds=row.seconds.get("prefill", 0.0),
        evict_seconds=row.seconds.get("evict", 0.0),
        decode_seconds=row.seconds.get("decode", 0.0),
        batch_rows=batch_rows,
    )


def _followed(cell: Cell, state: PromptState, row, batch_rows: int) -> SweepRow:
    kept = row.kept
    return SweepRow(
        **_asked(cell, state),
        metric="loss",
        share_removed=1 - kept.entries / state.n_tokens,
        along="text",
        kl=tuple(row.kl),
        mean_kl=_mean(row.kl),
        agreement=_mean(row.agrees),
        loss=_mean(row.loss),
        first_difference=first_difference([True] * len(row.agrees), row.agrees),
        entries=kept.entries,
        bytes=kept.bytes,
        kv_bytes=kept.kv_bytes,
        moments_bytes=kept.moments_bytes,
        prefill_seconds=state.seconds,
        evict_seconds=kept.seconds,
        decode_seconds=row.seconds,
        batch_rows=batch_rows,
    )


def _mean(values) -> float | None:
    return sum(values) / len(values) if values else None
