"""What studies have in common: reading samples once, following text under many policies, running tasks, and progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvviz import analysis, budget, tasks
from kvviz.analysis import Analysis
from kvviz.cache import RowCache
from kvviz.decode import teacher_force
from kvviz.engine import Engine
from kvviz.errors import Decomposition, decompose
from kvviz.events import Doing, Finished
from kvviz.evict import evict
from kvviz.host import ModelSpec
from kvviz.jobs import Prompt
from kvviz.policies.policy import Policy, policy
from kvviz.policies.spec import parse
from kvviz.prefill import Progress
from kvviz.prompts import encode_question
from kvviz.state import PromptState
from kvviz.studies.study import Row, StudyError
from kvviz.sweep import Sweep
from kvviz.sweep.batches import split
from kvviz.sweep.follow import Followed, follow
from kvviz.tasks import Example

FULL = policy("full")


@dataclass(frozen=True)
class Reading:
    """A sample that has been read.

    Attributes:
        state: with probes, the queries of what follows.
        ids: what follows: the text itself, or the question and the full cache's answer.
        first: of `ids`, where measuring begins (after the question).
        true: what follows is the text's own words, so that the loss on it means something.
    """

    number: int
    state: PromptState
    ids: list[int]
    first: int
    true: bool

    @property
    def numbers(self) -> Analysis:
        """Everything that the state tells without a forward."""
        return analysis.of(self.state)

    @property
    def layers(self) -> list[int]:
        """The layers that can be evicted."""
        return self.numbers.open_layers

    def errors(self, chosen: Policy, entries: int, layer: int) -> Decomposition:
        """The error of a layer taken apart, [Hq, P], with the correction of order 1 or the policy's own."""
        own = self.state.layers[layer]
        return decompose(
            self.numbers.probes(own),
            own.keys,
            own.values,
            self.numbers.mask(chosen, entries, layer),
            scaling=own.scaling,
            order=1 if chosen.correction is None else chosen.correction,
            partition=chosen.partition,
        )


class Bench:
    """The engine, the settings and the progress of one study that runs."""

    def __init__(
        self, engine: Engine, settings: dict[str, Any], progress: Progress, prompt: Prompt | None = None
    ) -> None:
        self.engine, self.settings, self.prompt = engine, settings, prompt
        self._progress, self._low, self._high, self._told = progress, 0.0, 1.0, 0.0

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]

    @property
    def policies(self) -> list[Policy]:
        """Those of the setting `policies`."""
        return [parse(text) for text in self["policies"]]

    @property
    def model(self) -> ModelSpec:
        """The loaded model's name."""
        return ModelSpec(self.engine.loaded.name)

    def tell(self, share: float, text: str) -> None:
        """Progress within the present part; it never goes back."""
        self._told = max(self._told, self._low + (self._high - self._low) * min(max(share, 0.0), 1.0))
        self._progress(self._told, f"Measuring: {text}")

    def parts(self, items: Iterable[Any], low: float = 0.0, high: float = 1.0) -> Iterator[Any]:
        """Items one by one, each with its equal part of the progress between low and high of the present part."""
        items = list(items)
        outer = self._low, self._high
        start, size = outer[0] + low * (outer[1] - outer[0]), (high - low) * (outer[1] - outer[0])
        for number, item in enumerate(items):
            self._low = start + size * number / len(items)
            self._high = start + size * (number + 1) / len(items)
            yield item
        self._low, self._high = outer

    def finish(self, events: Iterable[Any]) -> Any:
        """Drive a stream of events to its end, with progress; the last thing that is no news."""
        last = None
        for event in events:
            if isinstance(event, Doing):
                self.tell(event.share, event.text[:1].lower() + event.text[1:])
            else:
                last = event.run if isinstance(event, Finished) else event
        return last

    def examples(self, tokens: int | None = None) -> list[Example]:
        """The samples: of the setting `task` from consecutive seeds, or made of one's own prompt."""
        tokens = tokens or self["tokens"]
        if self.prompt is not None:
            return own_examples(self.engine, self.prompt, tokens, self["new_tokens"], self["samples"])
        task = tasks.parse(self["task"])
        seeds = range(self["seed"], self["seed"] + self["samples"])
        return [task.make(seed, tokens, self.engine.tokenizer) for seed in seeds]

    def readings(
        self, tokens: int | None = None, policies: Sequence[Policy] = (), share: float = 0.3
    ) -> Iterator[Reading]:
        """Every sample, read once; the first `share` of its part of the progress goes to reading."""
        for number, example in enumerate(self.parts(self.examples(tokens))):
            for _ in self.parts([0], high=share):
                reading = self._read(number, example, policies)
            low, self._low = self._low, self._low + share * (self._high - self._low)
            yield reading
            self._low = low

    def read(
        self, example: Example, policies: Sequence[Policy] = (), share: float = 1.0
    ) -> tuple[PromptState, str, str]:
        """Prefill an example; its state, and the question and first words of the answer that are still to be read."""
        mass = any("attention_mass" in each.scorer.needs for each in policies)
        seen = self.prompt is not None and self.prompt.seen
        state = example.prompt(seen).prefill(
            self.engine, mass, lambda part, text: self.tell(share * part, f"reading {text}")
        )
        return state, *(("", "") if seen else (example.question, example.answer_prefix))

    def _read(self, number: int, example: Example, policies: Sequence[Policy]) -> Reading:
        state, question, answer = self.read(example, policies, share=0.7)
        if example.continuation:
            ids = self.engine.tokenizer(example.continuation, add_special_tokens=False)["input_ids"][
                : self["new_tokens"]
            ]
            return Reading(number, self._with_probes(state, ids), ids, 0, True)
        new = min(self["new_tokens"], example.max_new_tokens) if example.metric else self["new_tokens"]
        run = self.finish(self.engine.generate(state, question, [], state.n_tokens, new, answer=answer, compare=False))
        asked = encode_question(self.engine.tokenizer, question, state.tail, answer)
        ids = asked + run.reference.token_ids
        return Reading(number, self._with_probes(state, ids), ids, len(asked), False)

    def _with_probes(self, state: PromptState, ids: list[int]) -> PromptState:
        """The state with the queries of what follows."""
        cache = RowCache([evict(state, FULL, state.n_tokens)], len(ids))
        cache.record()
        for _ in teacher_force(self.engine.model, cache, [], state.logits, ids):
            self.tell(0.9, "reading what follows")
        return state.with_probes(cache.recorded())

    def follow(self, reading: Reading, chosen: Sequence[tuple[Policy, int]]) -> list[Row]:
        """Read on under every (policy, entries): how far from the full cache, and at what cost. The full cache's row is first."""
        rows: list[Row] = []
        sizes = split(self.engine, reading.state, [entries for _, entries in chosen], len(reading.ids))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        for start, size in self.parts(zip(starts, sizes, strict=True)):
            batch = [(FULL, reading.state.n_tokens), *chosen[start : start + size]]
            found = self.finish(follow(self.engine, reading.state, batch, reading.ids))
            rows += [_fidelity(reading, each) for each in found[1 if rows else 0 :]]
        return rows

    def sweep(self, task_names: Sequence[str], length: int, policies: Sequence[Policy], **more: Any) -> list[Row]:
        """Tasks under policies, as a sweep; the rows in short."""
        sweep = Sweep(
            model=self.model,
            tasks=tuple(tasks.parse(name) for name in task_names),
            lengths=(length,),
            policies=tuple(policies),
            **more,
        )
        return [_scored(row) for row in self.finish(sweep.run(self.engine, self.tell_sweep)).rows]

    def task_state(self, task: str, length: int, seed: int, mass: bool) -> PromptState:
        """The state of a task's prompt; a sweep has just left it in memory."""
        prompt = tasks.parse(task).make(seed, length, self.engine.tokenizer).prompt()
        return prompt.prefill(self.engine, mass, lambda share, text: self.tell(share, f"reading {text}"))

    def tell_sweep(self, share: float, text: str) -> None:
        """A sweep's own progress."""
        self.tell(share, text[:1].lower() + text[1:])


def own_examples(engine: Engine, prompt: Prompt, tokens: int, new: int, count: int) -> list[Example]:
    """Samples of one's own prompt: whole with its question, or, without one, consecutive pieces of the text and what follows."""
    if prompt.question or prompt.chat or prompt.answer:
        return [Example(prompt.context, prompt.question, answer_prefix=prompt.answer, chat=prompt.chat)]
    tokenizer = engine.tokenizer
    ids = tokenizer(prompt.context, add_special_tokens=False)["input_ids"]
    tokens = min(tokens, len(ids) - new)
    if tokens < 2:
        raise StudyError(f"The text has {len(ids):,} tokens; with {new} that follow it needs at least {new + 2}.")
    starts = range(0, len(ids) - tokens - new + 1, tokens)[:count]
    pieces = [(ids[s : s + tokens], ids[s + tokens : s + tokens + new]) for s in starts]
    return [Example(tokenizer.decode(a), chat=False, continuation=tokenizer.decode(b)) for a, b in pieces]


def shares_of(state: PromptState, shares: Sequence[float]) -> dict[float, int]:
    """Share removed -> entries a head."""
    return {share: budget.from_share(state.n_tokens, share) for share in shares}


def pairs(policies: Iterable[Policy], budgets: Iterable[int]) -> list[tuple[Policy, int]]:
    """Every policy at every budget."""
    return [(each, entries) for each in policies for entries in budgets]


def _fidelity(reading: Reading, row: Followed) -> Row:
    kept, first = row.kept, reading.first
    return {
        "sample": reading.number,
        "policy": kept.policy.name,
        "label": kept.policy.label,
        "budget": kept.budget,
        "removed": 100 * (1 - kept.entries / reading.state.n_tokens),
        "kl": mean(row.kl[first:]),
        "agreement": mean([100.0 * each for each in row.agrees[first:]]),
        "loss": mean(row.loss[first:]) if reading.true else None,
        "bytes": kept.bytes,
        "moments_bytes": kept.moments_bytes,
        "evict_ms": 1000 * kept.seconds,
    }


def _scored(row: Any) -> Row:
    return {
        "task": row.task,
        "family": row.family,
        "kind": row.kind,
        "seed": row.seed,
        "tokens": row.prompt_tokens,
        "policy": row.policy,
        "label": row.label,
        "asked": row.asked,
        "budget": row.budget,
        "spec": row.spec,
        "removed": float(round(100 * row.share_removed)),
        "score": row.score,
        "kl": row.mean_kl,
        "bytes": row.bytes,
        "text": row.text,
    }


def mean(values: Iterable[float | None]) -> float | None:
    """Of what there is; None of nothing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def by(rows: Iterable[Row], *keys: str) -> dict[Any, list[Row]]:
    """Rows in groups, by one column or several."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        key = tuple(row[k] for k in keys)
        groups.setdefault(key if len(keys) > 1 else key[0], []).append(row)
    return groups


def averages(rows: Iterable[Row], value: str, *keys: str) -> dict[Any, float]:
    """Mean of a column in every group that has it."""
    found = {key: mean(row.get(value) for row in group) for key, group in by(rows, *keys).items()}
    return {key: each for key, each in found.items() if each is not None}


def evicted(rows: Iterable[Row]) -> list[Row]:
    """Rows that are not the full cache's."""
    return [row for row in rows if row["policy"] != "full"]
