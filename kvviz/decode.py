"""The third stage: many policies write side by side, as rows of one batch, each from what it kept.

Weights are read once a step for all rows. Positions are true ones and go on from the prompt's length. Rows stop on their
own and leave the batch, and memory, when they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvviz.attention import running
from kvviz.cache import RowCache
from kvviz.metrics import kl_divergence

COMPARED_TOKENS = 32
"""Tokens of all rows that are compared at once: their logits, several times over, are in memory together."""

FORWARD_TOKENS = 256
"""Tokens of a row that go through one forward (a long question, or teacher forcing); bounds the logits held at once."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: greedy at temperature 0, otherwise sampled with the same seed for every row."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < 100:
            raise ValueError(f"The temperature is 0 (greedy) or a positive number; got {self.temperature}.")

    def start(self) -> Callable[[Tensor], Tensor]:
        """A chooser: logits [R, V] -> tokens [R]. One uniform number a step serves all rows (inverse transform), so that
        equal logits give equal tokens."""
        if self.temperature == 0:
            return lambda logits: logits.argmax(dim=-1)
        generator = torch.Generator().manual_seed(self.seed)

        def choose(logits: Tensor) -> Tensor:
            mass = (logits.double() / self.temperature).softmax(dim=-1).cumsum(dim=-1)
            point = torch.rand((), generator=generator, dtype=torch.float64).to(logits.device) * mass[:, -1:]
            return torch.searchsorted(mass, point).squeeze(-1).clamp_max(logits.shape[-1] - 1)

        return choose


GREEDY = Sampling()


def forward(model: PreTrainedModel, cache: RowCache, tokens: Tensor, *, all_logits: bool = False) -> Tensor:
    """Send tokens [R, T] through the model with every row's own cache.

    Returns:
        float32 logits [R, V] of the last token, or [R, T, V] of all.
    """
    parts = []
    total = tokens.shape[1]
    for start in range(0, total, FORWARD_TOKENS):
        piece = tokens[:, start : start + FORWARD_TOKENS]
        positions = torch.arange(cache.position, cache.position + piece.shape[1], device=tokens.device)
        with running(model, cache):
            logits = model(
                input_ids=piece,
                position_ids=positions.expand(len(piece), -1),
                use_cache=False,
                logits_to_keep=0 if all_logits else 1,
            ).logits
        cache.position += piece.shape[1]
        if all_logits:
            parts.append(logits)
    return torch.cat(parts, dim=1).float() if all_logits else logits[:, -1].float()


@dataclass(frozen=True)
class Step:
    """One step of all rows.

    Attributes:
        tokens: row -> the token that it wrote, for the rows that are still writing.
        kl: row -> nats, KL(row 0 || shadow) of the distributions that this step's tokens were drawn from.
        active: the row that each row of the cache is, now.
    """

    tokens: dict[int, int]
    kl: dict[int, float]
    active: tuple[int, ...]


def decode(
    model: PreTrainedModel,
    cache: RowCache,
    question: list[int],
    first_logits: Tensor,
    *,
    max_new_tokens: int,
    eos: frozenset[int],
    sampling: Sampling = GREEDY,
    shadows: int = 0,
) -> Iterator[Step]:
    """Write from every row's cache in lockstep.

    Args:
        cache: of rows of one prompt, with room for question and answer; rows leave it when they end.
        question: ids that every row reads after eviction; empty if the prompt holds the question already.
        first_logits: [V] after the prompt's last token, used where there is no question.
        eos: ids that end a row; the ending id is part of the row's output.
        shadows: the last rows do not write: they read what row 0 writes, to be compared with it step by step. They go when
            it ends.

    Yields:
        one Step after another. The cache then is as it was when these tokens were chosen.
    """
    if max_new_tokens < 1:
        return
    choose = sampling.start()
    active = list(range(cache.layers[0].n_rows))
    first_shadow = len(active) - shadows
    if question:
        logits = forward(model, cache, torch.tensor([question], device=model.device).expand(len(active), -1))
    else:
        logits = first_logits[None].to(model.device).expand(len(active), -1)
    for step in range(max_new_tokens):
        writing = [i for i, row in enumerate(active) if row < first_shadow]
        tokens = choose(logits[writing] if shadows else logits)
        written = dict(zip([active[i] for i in writing], tokens.tolist(), strict=True))
        yield Step(written, _divergence(logits, active, first_shadow), tuple(active))
        following = {row: written.get(row if row < first_shadow else 0) for row in active}
        going = [i for i, row in enumerate(active) if following[row] is not None and following[row] not in eos]
        if all(active[i] >= first_shadow for i in going) or step == max_new_tokens - 1:
            return
        if len(going) < len(active):
            cache.select(going)
            active = [active[i] for i in going]
        logits = forward(model, cache, torch.tensor([[following[row]] for row in active], device=model.device))


def _divergence(logits: Tensor, active: list[int], first_shadow: int) -> dict[int, float]:
    shadows = [i for i, row in enumerate(active) if row >= first_shadow]
    if not shadows or active[0] != 0:
        return {}
    values = kl_divergence(logits[:1], logits[shadows]).tolist()
    return {active[i]: value for i, value in zip(shadows, values, strict=True)}


def teacher_force(
    model: PreTrainedModel, cache: RowCache, question: list[int], first_logits: Tensor, answer: list[int]
) -> Iterator[Tensor]:
    """Read `answer` with every row's cache: what would each have written next at every step?

    Args:
        cache: fresh, with room for question and answer.

    Yields:
        float32 logits [R, t, V] for consecutive pieces of the answer: [:, i] is the distribution of its token i.
    """
    rows = cache.layers[0].n_rows
    if question:
        yield forward(model, cache, torch.tensor([question], device=model.device).expand(rows, -1))[:, None]
    else:
        yield first_logits[None, None].to(model.device).expand(rows, 1, -1)
    piece = max(1, COMPARED_TOKENS // rows)
    for start in range(0, len(answer) - 1, piece):
        tokens = torch.tensor([answer[start : min(start + piece, len(answer) - 1)]], device=model.device)
        yield forward(model, cache, tokens.expand(rows, -1), all_logits=True)
