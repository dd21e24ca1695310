"""What the measurements share: the model, a prompt of 2,048 tokens, and the peer."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

import kvviz
from kvviz.bench.peer import Peer
from kvviz.engine import Engine
from kvviz.host import ModelSpec
from kvviz.jobs import Prompt
from kvviz.models import default_name
from kvviz.models.names import locate
from kvviz.prefill import prefill
from kvviz.prompts import encode_question
from kvviz.state import PromptState

QUESTION = "What does the licence say about trademarks?"


@dataclass
class Setting:
    """A loaded engine and what is run on it.

    Attributes:
        text: a long text; the prompt is its first `n_tokens` tokens.
        new_tokens: written in every run.
        repeats: rounds that count.
        peer_python: the peer's Python, or "" to leave the peer out.
    """

    engine: Engine
    spec: ModelSpec
    text: str
    n_tokens: int = 2048
    new_tokens: int = 32
    repeats: int = 3
    peer_python: str = ""

    @classmethod
    def load(cls, text: str, model: str = "", device: str | None = None, dtype: str | None = None, **more) -> Setting:
        """Load the model (the default one if none is named)."""
        name = model or default_name()
        return cls(kvviz.load(name, device, dtype), ModelSpec(name, device, dtype), text, **more)

    @cached_property
    def ids(self) -> list[int]:
        """The prompt's tokens."""
        return self.engine.encode(self.prompt.source)[0]

    @cached_property
    def prompt(self) -> Prompt:
        """A chat prompt of about `n_tokens` tokens."""
        tokenizer = self.engine.tokenizer
        extra = len(self.engine.encode([{"role": "user", "content": "x"}])[0]) - 1
        body = tokenizer(self.text, add_special_tokens=False)["input_ids"][: self.n_tokens - extra]
        return Prompt(tokenizer.decode(body), QUESTION)

    @cached_property
    def follow(self) -> list[int]:
        """The question's tokens."""
        _, tail = self.engine.encode(self.prompt.source)
        return encode_question(self.engine.tokenizer, QUESTION, tail)

    @cached_property
    def state(self) -> PromptState:
        """The prompt, read."""
        return prefill(self.engine.model, self.ids)

    @cached_property
    def folder(self) -> str:
        """The model's safetensors."""
        return str(locate(self.spec.name, lambda share, text: None).folder)

    @cached_property
    def context_file(self) -> Path:
        """The prompt's text in a file, for other processes."""
        file = Path(tempfile.mkdtemp()) / "context.txt"
        file.write_text(self.prompt.context, encoding="utf-8")
        return file

    @cached_property
    def peer(self) -> Peer | None:
        """kvpress with the same model and prompt."""
        if not self.peer_python:
            return None
        return Peer(self.peer_python, self.folder, self.prompt.context, QUESTION, torch.get_num_threads())
