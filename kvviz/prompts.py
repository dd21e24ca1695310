"""From text and chat messages to token ids: where the context ends, and what a question adds to it.

In a chat the question belongs to the user's own turn, after the context. The template is therefore cut where the last
user message ends; what follows it (the end of the turn, the start of the answer) is the tail that a question carries.
"""

from __future__ import annotations

from collections.abc import Sequence

SEPARATOR = "\n\n"
"""Between the context and a question in one chat turn."""

_MARK = "\u2063kvviz\u2063"  # stands where the last user message ends; invisible separators do not occur in prompts

Messages = Sequence[dict[str, str]]


class PromptError(ValueError):
    """A prompt or question that cannot be used; the message says what to change."""


def encode(tokenizer, prompt: str | Messages) -> tuple[list[int], str]:
    """Token ids of the context, and the tail that ends the turn (empty for plain text).

    Args:
        prompt: plain text (tokenised as it is), or chat messages whose last one is the user's.

    Raises:
        PromptError: empty, not text, or messages without a template or a last user message.
    """
    if isinstance(prompt, str):
        check_text(prompt)
        return list(tokenizer(prompt)["input_ids"]), ""
    messages = [dict(message) for message in prompt]
    if not messages or messages[-1].get("role") != "user":
        raise PromptError("A chat prompt is a list of messages that ends with one of role 'user'.")
    if not tokenizer.chat_template:
        raise PromptError("This model has no chat template. Give the prompt as plain text.")
    check_text(messages[-1].get("content", ""))
    messages[-1]["content"] += _MARK
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    head, _, tail = rendered.partition(_MARK)
    return _plain(tokenizer, head), tail


def encode_question(tokenizer, question: str, tail: str, answer: str = "") -> list[int]:
    """Token ids that follow the context: the question, the end of the turn, and the answer's first words if any are given."""
    if "\x00" in question + answer:
        raise PromptError("The question holds NUL characters: it is not text.")
    lead = SEPARATOR if tail and question else ""
    text = lead + question + tail + answer
    return _plain(tokenizer, text) if text else []


def check_text(text: str) -> None:
    """Raise PromptError unless `text` is something to read."""
    if not isinstance(text, str):
        raise PromptError("The prompt is not text.")
    if not text.strip():
        raise PromptError("The prompt is empty. Type or paste a text, or choose a preset.")
    if "\x00" in text:
        raise PromptError("The prompt holds NUL characters: it looks like a binary file. Give a text file in UTF-8.")


def read_text(data: bytes) -> str:
    """The text of an uploaded file.

    Raises:
        PromptError: it is empty or not UTF-8 text.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise PromptError("The file is not UTF-8 text. Save it as plain text in UTF-8 and try again.") from None
    check_text(text)
    return text


def check_length(n_tokens: int, n_new: int, positions: int) -> None:
    """Raise PromptError when prompt, question and answer do not fit into the model's positions."""
    if n_tokens + n_new > positions:
        raise PromptError(
            f"The prompt has {n_tokens:,} tokens with its question, and {n_new:,} are to be written, but the model has "
            f"{positions:,} positions: at most {max(positions - n_new, 0):,} prompt tokens fit. Shorten the prompt or the answer."
        )


def _plain(tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
