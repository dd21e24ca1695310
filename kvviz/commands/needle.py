"""`python -m kvviz needle`: what every method answers to the needle prompt, as a Markdown table.

One sentence with a number stands inside a licence text, and the question asks for the number. Every method answers at
several budgets, with the question asked after eviction and with the question seen by it. It is one prompt, one place,
greedy: a demonstration, not a benchmark.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from kvviz.commands.generate import add_model_arguments
from kvviz.engine import Engine, load
from kvviz.events import Doing, Finished
from kvviz.host import ModelSpec
from kvviz.jobs import Generate, Prompt
from kvviz.models import default_name
from kvviz.policies import names
from kvviz.policies.policy import Policy
from kvviz.policies.spec import parse, spec
from kvviz.presets import PRESETS
from kvviz.runs import Row

HELP = "Ask for a number hidden in a licence text, under every method; print a Markdown table."

NEEDLE = re.compile(r"The special magic number for Cairo is (\d+)\.")
SCENARIOS = {False: "asked after", True: "seen"}
"""Whether eviction sees the question -> the words for it."""

BEGIN, END = "<!-- needle:begin -->", "<!-- needle:end -->"
SHOWN = 12
"""Characters of a wrong answer that the table shows."""

Answers = dict[tuple[bool, int], dict[str, Row]]
"""(seen, budget) -> spec of the policy -> its row."""


def add_arguments(parser: ArgumentParser) -> None:
    """Model, budgets, methods, and where the table goes."""
    add_model_arguments(parser)
    parser.add_argument("--budget", type=int, action="append", help="repeatable; 128, 256 and 512 by default")
    parser.add_argument(
        "--policy", action="append", metavar="NAME[:OPTION=VALUE,...]", help="repeatable; by default every method"
    )
    parser.add_argument("--max-new-tokens", type=int, default=12, help="of each answer (default 12)")
    parser.add_argument("--update", type=Path, metavar="FILE.md", help=f"replace what stands between {BEGIN} and {END}")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def run(options: Namespace) -> None:
    """Load, ask, print, and update the file where one is named."""
    budgets = tuple(options.budget or (128, 256, 512))
    policies = tuple(parse(each) for each in options.policy or names())
    if options.update:  # a file without the markers fails before the run
        replace_between(options.update.read_text(encoding="utf-8"), "")
    model = ModelSpec(options.model or default_name(), options.device, options.dtype)
    engine = load(model.name, model.device, model.dtype)
    preset = PRESETS["needle"]
    number = needle(preset.context)
    prompts = {
        seen: Prompt(preset.context, preset.question, seen, preset.chat and engine.loaded.chat, preset.answer)
        for seen in SCENARIOS
    }
    answers = ask(engine, model, prompts, policies, budgets, options.max_new_tokens, quiet=options.quiet)
    lengths = {seen: len(prompt.encode(engine)[0]) for seen, prompt in prompts.items()}
    text = "\n\n".join((table(answers, policies, number), caption(engine, lengths, options)))
    print(text)
    if options.update:
        page = options.update.read_text(encoding="utf-8")
        options.update.write_text(replace_between(page, text), encoding="utf-8")


def needle(context: str) -> str:
    """The number that is hidden in a text; ValueError where none is."""
    found = NEEDLE.search(context)
    if found is None:
        raise ValueError("the text of the preset 'needle' hides no number: put its sentence back into kvviz/presets")
    return found[1]


def ask(
    engine: Engine,
    model: ModelSpec,
    prompts: dict[bool, Prompt],
    policies: tuple[Policy, ...],
    budgets: tuple[int, ...],
    max_new_tokens: int,
    quiet: bool = False,
) -> Answers:
    """All policies side by side, once for each scenario and budget. The engine reads each prompt once and remembers it."""
    answers: Answers = {}
    for seen, prompt in prompts.items():
        for budget in budgets:
            request = Generate(model, prompt, policies, budget, max_new_tokens=max_new_tokens)
            for event in request.run(engine, lambda share, text: None):
                if isinstance(event, Doing) and not quiet:
                    _tell(f"{SCENARIOS[seen]}, budget {budget}: {event.text}")
                if isinstance(event, Finished):
                    rows = {row.label: row for row in event.run.rows}
            answers[seen, budget] = {spec(p): rows[p.label] for p in policies}
    if not quiet:
        _tell("")
    return answers


def _tell(text: str) -> None:
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def table(answers: Answers, policies: tuple[Policy, ...], number: str) -> str:
    """A row for each policy, a column for each budget and scenario."""
    columns = sorted(answers, key=lambda column: (column[1], column[0]))
    lines = ["| method | " + " | ".join(f"{budget}, {SCENARIOS[seen]}" for seen, budget in columns) + " |"]
    lines.append("| --- |" + " --- |" * len(columns))
    for policy in policies:
        cells = [cell(answers[column][spec(policy)].text, number) for column in columns]
        lines.append(f"| {policy.label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(text: str, number: str) -> str:
    """An answer as a cell: the number where it is right, or else what was written instead, cut short."""
    if re.search(rf"(?<!\d){number}(?!\d)", text):
        return f"**{number} (right)**"
    words = " ".join(text.split())
    short = words[:SHOWN].strip() + ("..." if len(words) > SHOWN else "")
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", short) or "(nothing)"


def caption(engine: Engine, lengths: dict[bool, int], options: Namespace) -> str:
    """What the table was made with: the model, the prompt's tokens, and the command."""
    loaded = engine.loaded
    dtype = str(loaded.dtype).removeprefix("torch.")
    words = ["python -m kvviz needle"]
    for flag in ("model", "device", "dtype"):
        if getattr(options, flag):
            words.append(f"--{flag} {getattr(options, flag)}")
    words += [f"--budget {budget}" for budget in options.budget or ()]
    words += [f"--policy {each}" for each in options.policy or ()]
    if options.max_new_tokens != 12:
        words.append(f"--max-new-tokens {options.max_new_tokens}")
    if options.update:
        words.append(f"--update {options.update.name}")
    return (
        f"Model {loaded.name}, {dtype} on {loaded.device.type}; the prompt has {lengths[False]:,} tokens, "
        f"{lengths[True]:,} with the question; greedy. Made with `{' '.join(words)}`."
    )


def replace_between(page: str, text: str) -> str:
    """The page with `text` between the two markers; ValueError where they are missing."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the file has no place for the table: put {BEGIN} and {END} on lines of their own")
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"
