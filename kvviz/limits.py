"""Limits of a server that many people share, from the environment; none is set by default.

    KVVIZ_MAX_PROMPT_TOKENS   tokens of a prompt
    KVVIZ_MAX_NEW_TOKENS      tokens written in a run
    KVVIZ_MAX_POLICIES        policies side by side
    KVVIZ_MAX_KV_MIB          MiB of keys and values that one run may hold

Which models may be loaded is KVVIZ_MODELS, see kvviz.models.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvviz.exceptions import OutOfMemory
from kvviz.prompts import PromptError


@dataclass(frozen=True)
class Limits:
    """What one job may ask for; None is no limit."""

    prompt_tokens: int | None = None
    new_tokens: int | None = None
    policies: int | None = None
    kv_mib: int | None = None

    @classmethod
    def from_environment(cls) -> Limits:
        """Read the variables.

        Raises:
            ValueError: one of them is not a positive whole number.
        """
        names = ("KVVIZ_MAX_PROMPT_TOKENS", "KVVIZ_MAX_NEW_TOKENS", "KVVIZ_MAX_POLICIES", "KVVIZ_MAX_KV_MIB")
        return cls(*(_number(name) for name in names))

    def check_prompt(self, tokens: int) -> None:
        """Raise PromptError if the prompt is longer than this server allows."""
        if self.prompt_tokens is not None and tokens > self.prompt_tokens:
            raise PromptError(
                f"The prompt has {tokens:,} tokens and this server takes {self.prompt_tokens:,} at most. Shorten it."
            )

    def check_run(self, new_tokens: int, policies: int) -> None:
        """Raise PromptError if a run is larger than this server allows."""
        if self.new_tokens is not None and new_tokens > self.new_tokens:
            raise PromptError(
                f"This server writes {self.new_tokens:,} tokens at most in a run; {new_tokens:,} were asked for."
            )
        if self.policies is not None and policies > self.policies:
            raise PromptError(
                f"This server runs {self.policies} policies at most side by side; {policies} were asked for."
            )

    def check_kv(self, n_bytes: int, what: str) -> None:
        """Raise OutOfMemory if keys and values would take more than a job may hold."""
        if self.kv_mib is not None and n_bytes > self.kv_mib << 20:
            raise OutOfMemory(
                f"{what} needs {n_bytes / 2**20:,.0f} MiB of keys and values, and a job may hold {self.kv_mib:,} MiB here. "
                "Use a shorter prompt, fewer policies, or fewer new tokens."
            )


NO_LIMITS = Limits()


def _number(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name} is a whole number of at least 1; it is {text!r}.")
    return int(text)
