"""The library's front door: a loaded model, and the three stages prefill -> evict -> generate.

engine = kvviz.load()
state = engine.prefill("A long text ...")
for event in engine.generate(state, "A question?", [kvviz.policy("capkv"), kvviz.policy("momentkv")], budget=256):
    ...
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvviz.decode import Sampling
from kvviz.events import Event, Finished
from kvviz.evict import Retained, evict
from kvviz.exceptions import memory_advice
from kvviz.generate import Generation
from kvviz.limits import Limits
from kvviz.live import Live
from kvviz.models import Loaded, load_model
from kvviz.policies.policy import Policy, policy
from kvviz.prefill import Progress, prefill
from kvviz.prompts import Messages, PromptError, check_length, encode, encode_question
from kvviz.runs import Row, Run
from kvviz.state import PromptState

STATE_BYTES = 2 << 30
"""Prompt states are kept up to this size together, the least recently used go first."""


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

    def __init__(self, loaded: Loaded, state_bytes: int = STATE_BYTES, limits: Limits | None = None) -> None:
        self.loaded, self.model, self.tokenizer = loaded, loaded.model, loaded.tokenizer
        self.limits = Limits.from_environment() if limits is None else limits
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
        self.limits.check_prompt(len(ids))
        self.limits.check_kv(len(ids) * self.entry_bytes, "The prompt")
        key = (tuple(ids), tail)
        state = self._states.get(key)
        if state is None or (attention_mass and not any(layer.attention_mass is not None for layer in state.layers)):
            with memory_advice("reading the prompt"):
                state = prefill(self.model, ids, want_mass=attention_mass, progress=progress)
            state = replace(state, tail=tail, model=self.loaded.name, key=key)
        return self._remember(state)

    @property
    def entry_bytes(self) -> int:
        """Bytes that one token takes in the full cache, over all layers and heads."""
        facts = self.loaded
        return 2 * facts.n_layers * facts.n_kv_heads * facts.head_dim * facts.dtype.itemsize

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
        self.limits.check_run(max_new_tokens, len(policies))
        budgets = [budget] * len(policies) if isinstance(budget, int) else list(budget)
        chosen = [(policy("full"), state.n_tokens)]
        chosen += [(p, b) for p, b in zip(policies, budgets, strict=True) if p != chosen[0][0]]
        if evict_every is not None:
            Live(evict_every)
            [p.scorer.while_decoding(evict_every) for p, _ in chosen]
        run = Generation(
            loaded=self.loaded,
            state=state,
            follow=follow,
            chosen=chosen,
            max_new_tokens=max_new_tokens,
            eos=self.loaded.eos_ids if stop else frozenset(),
            sampling=Sampling(temperature, seed),
            evict_every=evict_every,
            compare=compare,
            reference=reference,
            limits=self.limits,
        )
        with memory_advice("writing"):
            yield from run.events()
        self._remember(run.state)
        yield Finished(Run(self._config(state, question, answer, budgets, run), run.rows))

    def _config(self, state, question, answer, budgets, run: Generation) -> dict:
        return {
            "model": self.loaded.name,
            "revision": self.loaded.revision,
            "device": str(self.loaded.device),
            "dtype": str(self.loaded.dtype).removeprefix("torch."),
            "prompt_tokens": state.n_tokens,
            "question": question,
            "answer": answer,
            "budget": budgets[0] if len(set(budgets)) == 1 else budgets,
            "max_new_tokens": run.max_new_tokens,
            "temperature": run.sampling.temperature,
            "seed": run.sampling.seed,
            "evict_every": run.evict_every,
            "raster_tokens": run.total_tokens,
        }

    def _remember(self, state: PromptState) -> PromptState:
        self._states[state.key] = state
        self._states.move_to_end(state.key)
        while len(self._states) > 1 and sum(s.bytes for s in self._states.values()) > self.state_bytes:
            self._states.popitem(last=False)
        return state
