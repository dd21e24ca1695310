"""The library's front door: a loaded model, and the three stages prefill -> evict -> generate.

engine = kvviz.load()
state = engine.prefill("A long text ...")
for event in engine.generate(state, "A question?", [kvviz.policy("capkv"), kvviz.policy("momentkv")], budget=256):
    ...
"""

from __future__ import annotations

import gc
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvviz import metrics
from kvviz.cache import RowCache
from kvviz.decode import FORWARD_TOKENS, Sampling, decode, teacher_force
from kvviz.evict import Retained, evict
from kvviz.exceptions import OutOfMemory
from kvviz.live import Live
from kvviz.models import Loaded, load_model
from kvviz.policies.policy import Policy, policy
from kvviz.prefill import Progress, prefill
from kvviz.prompts import Messages, PromptError, check_length, encode, encode_question
from kvviz.runs import Row, Run
from kvviz.state import PromptState

STATE_BYTES = 2 << 30
"""Prompt states are kept up to this size together, the least recently used go first."""

TOP_WORDS = 3

RASTER_BINS, RASTER_STEPS = 300, 120
"""How finely a run notes which positions are held while it evicts: parts of the sequence, and steps."""


@dataclass(frozen=True)
class Doing:
    """What is going on, and the share done of it in [0, 1]."""

    share: float
    text: str


@dataclass(frozen=True)
class Evicted:
    """Row `row` was cut down; `facts` holds what it keeps (no output yet)."""

    row: int
    facts: Row


@dataclass(frozen=True)
class Token:
    """Row `row` wrote a token; `text` is what it adds to the readable output."""

    row: int
    id: int
    text: str


@dataclass(frozen=True)
class Compared:
    """Row `row` was measured along the full cache's output; `agrees`: at each step, whether it would write the same token."""

    row: int
    agrees: tuple[bool, ...]


@dataclass(frozen=True)
class Finished:
    """The run is complete."""

    run: Run


Event = Doing | Evicted | Token | Compared | Finished


def load(
    name: str = "smollm2-135m-instruct",
    device: str | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Engine:
    """Load a model.

    Args:
        name: the default model, a Hugging Face id, a local folder, or a .gguf file.
        device: "cuda", "mps", "cpu", ...; by default the best there is.
        dtype: "bf16", "fp16", "fp32"; by default bf16 on GPUs and fp32 on the CPU.
        progress: told the share done and what is being done.

    Raises:
        ModelError: it cannot be loaded or is of an unsupported family; the message says why and what to do.
    """
    return Engine(load_model(name, device=device, dtype=dtype, progress=progress))


class Engine:
    """A loaded model with its prompt states. Not thread-safe: one worker owns it (see kvviz.host)."""

    def __init__(self, loaded: Loaded, state_bytes: int = STATE_BYTES) -> None:
        self.loaded, self.model, self.tokenizer = loaded, loaded.model, loaded.tokenizer
        self.state_bytes = state_bytes
        self._states: OrderedDict[tuple, PromptState] = OrderedDict()

    def encode(self, prompt: str | Messages, question: str | None = None, answer: str = "") -> tuple[list[int], str]:
        """Prompt ids and tail; with a question, it and the tail are part of the ids (eviction will see them)."""
        ids, tail = encode(self.tokenizer, prompt)
        if question is not None:
            ids, tail = ids + encode_question(self.tokenizer, question, tail, answer), ""
        return ids, tail

    def prefill(
        self,
        prompt: str | Messages,
        attention_mass: bool = False,
        *,
        question: str | None = None,
        answer: str = "",
        progress: Progress | None = None,
    ) -> PromptState:
        """Read a prompt once; a prompt that was read already comes from memory.

        Args:
            prompt: plain text, or chat messages that end with the user's.
            attention_mass: sum the attention every key receives, for H2O and observed attention.
            question: make it part of the prompt, so that eviction sees it; generate then takes no question.
            answer: first words of the answer, after such a question.
            progress: told after every layer; it may raise to cancel.

        Raises:
            PromptError: empty, not text, or longer than the model's positions.
            OutOfMemory: with the remedy; what it held is freed.
        """
        ids, tail = self.encode(prompt, question, answer)
        check_length(len(ids), 0, self.loaded.positions)
        key = (tuple(ids), tail)
        state = self._states.get(key)
        if state is None or (attention_mass and not any(layer.attention_mass is not None for layer in state.layers)):
            with _memory("reading the prompt"):
                state = prefill(self.model, ids, want_mass=attention_mass, progress=progress)
            state = replace(state, tail=tail, model=self.loaded.name, key=key)
        return self._remember(state)

    def find(self, ids: Sequence[int], tail: str = "") -> PromptState | None:
        """The state of a prompt that was read (`encode` gives its ids and tail), if it is still in memory; from any thread."""
        return self._states.get((tuple(ids), tail))

    def forget(self) -> None:
        """Drop all prompt states."""
        self._states.clear()

    def latest(self, state: PromptState) -> PromptState:
        """The same prompt with what later runs added to it (probes), if it is still in memory."""
        return self._states.get(state.key, state)

    def evict(self, state: PromptState, policy: Policy, budget: int) -> Retained:
        """What `policy` keeps of a prompt under `budget` entries a head; see kvviz.evict."""
        return evict(state, policy, budget)

    def generate(
        self,
        state: PromptState,
        question: str,
        policies: Sequence[Policy],
        budget: int | Sequence[int],
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        answer: str = "",
        stop: bool = True,
        evict_every: int | None = None,
        compare: bool = True,
        reference: Row | None = None,
    ) -> Iterator[Event]:
        """Write side by side under every policy. The full cache is always row 0, for comparison.

        Args:
            state: of the prompt.
            question: read after eviction; empty when the prompt holds it, or to continue plain text.
            policies: any number; "full" among them is row 0.
            budget: entries per head, averaged over the model; one for all, or one for each of `policies`.
            max_new_tokens: tokens to write, at most.
            temperature, seed: 0 is greedy; a seed serves all rows alike.
            answer: first words of the answer, read with the question.
            stop: rows end with the model's end token (False: always write max_new_tokens).
            evict_every: also evict while decoding, back to the budget every so many tokens. The divergence is then measured
                while writing, by a shadow of each policy that reads the full cache's output.
            compare: measure the divergence, which takes another reading of the output.
            reference: the full cache's row of an earlier run of the same prompt and question: it is not written again. (With
                evict_every it is, since the shadows read it.)

        Yields:
            Doing, Evicted, Token, Compared and at last Finished. Closing the iterator cancels.
        """
        if max_new_tokens < 1:
            raise PromptError(f"At least one token is to be written; got {max_new_tokens}.")
        follow = encode_question(self.tokenizer, question, state.tail, answer)
        check_length(state.n_tokens + len(follow), max_new_tokens, self.loaded.positions)
        budgets = [budget] * len(policies) if isinstance(budget, int) else list(budget)
        chosen = [(policy("full"), state.n_tokens)]
        chosen += [(p, b) for p, b in zip(policies, budgets, strict=True) if p != chosen[0][0]]
        if evict_every is not None:
            Live(evict_every)
            [p.scorer.while_decoding(evict_every) for p, _ in chosen]
        sampling = Sampling(temperature, seed)
        with _memory("writing"):
            if any("probes" in p.scorer.needs for p in policies) and state.layers[0].probes is None:
                state = yield from self._with_probes(state, follow, max_new_tokens)
            kept, rows = [], []
            for number, (each, entries) in enumerate(chosen):
                yield Doing(number / len(chosen), f"Evicting with {each.title}")
                kept.append(evict(state, each, entries))
                rows.append(self._row(state, kept[-1], entries))
                yield Evicted(number, rows[-1])
            eos = self.loaded.eos_ids if stop else frozenset()
            live, known = None, 0
            if evict_every is not None:
                live = Live(evict_every, tuple(b for _, b in chosen), min(max(len(follow), 1), FORWARD_TOKENS))
            elif reference is not None:
                rows[0], known = replace(reference, kl=[], top=[]), 1
            shadows = kept[1:] if live and compare else []
            yield from self._write(state, kept, rows, follow, max_new_tokens, eos, sampling, live, shadows, known)
            for row in rows:
                row.first_difference = metrics.first_difference(rows[0].token_ids, row.token_ids)
            if live is None and compare:
                yield from self._compare(state, kept, rows, follow)
        config = self._config(state, question, answer, budgets, max_new_tokens, sampling)
        yield Finished(Run(config | {"evict_every": evict_every}, rows))

    def _with_probes(self, state, follow, max_new_tokens):
        """The oracle looks at the queries of the full cache's own continuation, which must be written first."""
        yield Doing(0.0, "Writing the full cache's output for the oracle")
        full = evict(state, policy("full"), state.n_tokens)
        room = len(follow) + max_new_tokens
        eos = self.loaded.eos_ids
        steps = decode(self.model, RowCache([full], room), follow, state.logits, max_new_tokens=max_new_tokens, eos=eos)
        answer = [step.tokens[0] for step in steps]
        cache = RowCache([full], room)
        cache.record()
        for _ in teacher_force(self.model, cache, follow, state.logits, answer):
            pass
        return self._remember(state.with_probes(cache.recorded()))

    def _row(self, state: PromptState, kept: Retained, budget: int) -> Row:
        row = Row(kept.policy.name, kept.policy.label, budget, kept.policy.settings())
        row.keeps(kept)
        row.seconds = {"prefill": state.seconds, "evict": kept.seconds, "decode": 0.0}
        return row

    def _write(self, state, kept, rows, follow, max_new_tokens, eos, sampling, live, shadows, known) -> Iterator[Event]:
        """Write the rows from number `known` on; `shadows` read what row 0 writes."""
        if not kept[known:]:
            return
        began = time.perf_counter()
        shown = ["" for _ in rows]
        yield Doing(0.0, "Reading the question" if follow else "Writing")
        if shadows:
            live = replace(live, budgets=live.budgets + live.budgets[1:])
        cache = RowCache(kept[known:] + shadows, len(follow) + max_new_tokens, live, state)
        steps = decode(
            self.model,
            cache,
            follow,
            state.logits,
            max_new_tokens=max_new_tokens,
            eos=eos,
            sampling=sampling,
            shadows=len(shadows),
        )
        for number, step in enumerate(steps):
            for index, token in step.tokens.items():
                row_number = index + known
                row = rows[row_number]
                row.seconds["decode"] = time.perf_counter() - began
                row.token_ids.append(token)
                row.finish = "end" if token in eos else "length" if len(row.token_ids) == max_new_tokens else ""
                yield Token(row_number, token, self._readable(row, shown, row_number))
            for shadow, value in step.kl.items():
                rows[shadow - len(shadows)].kl.append(value)
            if live:
                self._note_cache(
                    cache, step, number, rows, state.n_tokens + len(follow) + max_new_tokens, max_new_tokens
                )
            yield Doing((number + 1) / max_new_tokens, f"Writing token {number + 1} of at most {max_new_tokens}")

    def _readable(self, row: Row, shown: list[str], number: int) -> str:
        """What the newest token adds to the text that can be read (a character may take several tokens)."""
        row.text = self.tokenizer.decode(row.token_ids, skip_special_tokens=True)
        row.pieces.append(self.tokenizer.decode([row.token_ids[-1]]))
        ready = row.text.rstrip("\ufffd")
        new = ready[len(shown[number]) :]
        shown[number] += new
        return new

    def _note_cache(self, cache, step, number, rows, total, max_new_tokens) -> None:
        """What each row that is writing holds now."""
        bins = min(RASTER_BINS, total)
        for index, which in enumerate(step.active):
            if which not in step.tokens:
                continue
            row = rows[which]
            row.entries_by_step.append(cache.entries(index))
            row.bytes_by_step.append(cache.row_bytes(index))
            if which > 0 and number % max(1, max_new_tokens // RASTER_STEPS) == 0:
                held = cache.held(index)
                heads = sum(len(live.positions(index)) for live in cache.lives if live is not None)
                counts = torch.bincount(held * bins // total, minlength=bins)
                size = torch.bincount(torch.arange(total) * bins // total, minlength=bins).to(counts.device)
                row.raster_steps.append(number)
                row.raster.append([round(share, 3) for share in (counts / (size * heads)).tolist()])

    def _compare(self, state, kept, rows, follow) -> Iterator[Event]:
        """Measure every row along the full cache's own output, and keep the full cache's queries as probes."""
        answer = rows[0].token_ids
        cache = RowCache(kept, room=len(follow) + len(answer))
        cache.record()
        done, agrees = 0, [() for _ in rows]
        for logits in teacher_force(self.model, cache, follow, state.logits, answer):
            likeliest = logits.argmax(dim=-1)
            agrees = [a + tuple(same) for a, same in zip(agrees, (likeliest == likeliest[:1]).tolist(), strict=True)]
            kl = metrics.kl_divergence(logits[:1], logits).tolist()
            words, chances = (t.tolist() for t in metrics.top_words(logits, TOP_WORDS))
            for row, values, ids, ps in zip(rows, kl, words, chances, strict=True):
                row.kl += values
                row.top += [
                    [(self.tokenizer.decode([i]), p) for i, p in zip(*step, strict=True)]
                    for step in zip(ids, ps, strict=True)
                ]
            done += logits.shape[1]
            yield Doing(done / len(answer), "Comparing with the full cache")
        for number, same in enumerate(agrees):
            yield Compared(number, same)
        self._remember(state.with_probes(cache.recorded()))

    def _config(self, state, question, answer, budgets, max_new_tokens, sampling) -> dict:
        return {
            "model": self.loaded.name,
            "revision": self.loaded.revision,
            "device": str(self.loaded.device),
            "dtype": str(self.loaded.dtype).removeprefix("torch."),
            "prompt_tokens": state.n_tokens,
            "question": question,
            "answer": answer,
            "budget": budgets[0] if len(set(budgets)) == 1 else budgets,
            "max_new_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
        }

    def _remember(self, state: PromptState) -> PromptState:
        self._states[state.key] = state
        self._states.move_to_end(state.key)
        while len(self._states) > 1 and sum(s.bytes for s in self._states.values()) > self.state_bytes:
            self._states.popitem(last=False)
        return state


class _memory:
    """Turn the device's out-of-memory errors into one that says the remedy, with what was held freed."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "allocate memory" not in str(error):
            return
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise OutOfMemory(
            f"Out of memory while {self.what}. Use a shorter prompt, fewer policies, a shorter answer, or a smaller model."
        ) from None
