"""`python -m kvviz generate`: a run of several policies side by side, printed and written as JSON."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from kvviz import budget
from kvviz.engine import Engine, load
from kvviz.events import Doing, Finished
from kvviz.host import ModelSpec
from kvviz.jobs import Generate, Prompt
from kvviz.models import default_name
from kvviz.policies.policy import Policy
from kvviz.policies.spec import parse
from kvviz.prompts import read_text
from kvviz.runs import Run

HELP = "Generate under several policies side by side."


def add_model_arguments(parser: ArgumentParser) -> None:
    """Which model, and where."""
    parser.add_argument(
        "--model", help="name, Hugging Face id, local folder or .gguf file; by default the default model"
    )
    parser.add_argument("--device", help="cuda, cuda:1, mps, cpu or auto; by default the best there is")
    parser.add_argument("--dtype", help="bf16, fp16 or fp32; by default bf16 on GPUs, fp32 on the CPU")


def add_arguments(parser: ArgumentParser) -> None:
    """All of a run's settings."""
    add_model_arguments(parser)
    parser.add_argument(
        "--policy", action="append", required=True, metavar="NAME[:OPTION=VALUE,...]", help="repeatable"
    )
    parser.add_argument("--context", required=True, type=Path, metavar="FILE", help="the text, UTF-8")
    parser.add_argument("--question", default="", help="asked about the text; without one the text is continued")
    parser.add_argument(
        "--seen", action="store_true", help="eviction sees the question (by default it is asked afterwards)"
    )
    parser.add_argument("--plain", action="store_true", help="plain text, without the chat template")
    parser.add_argument("--answer", default="", help="first words of the answer")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--budget", type=int, help="entries per head, averaged over the model (default 256)")
    size.add_argument("--share-removed", type=float, help="share of the entries that is evicted, 0 to 1")
    size.add_argument("--mib", type=float, help="MiB for each policy, moment statistics counted")
    parser.add_argument("--tau", type=float, help="tau of every policy that has one")
    parser.add_argument("--sinks", type=int, help="protect as many first entries in every policy")
    parser.add_argument("--recent", type=float, help="protect as many last entries in every policy")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evict-every", type=int, metavar="N", help="also evict while decoding, every N tokens")
    parser.add_argument("--no-stop", action="store_true", help="go on after the model's end token")
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="write the run here")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def run(options: Namespace) -> None:
    """Load, run, print, write."""
    text = read_text(options.context.read_bytes())
    options.model = options.model or default_name()
    policies = tuple(read_policy(each, options) for each in options.policy)
    tell = _silent if options.quiet else _tell
    engine = load(options.model, options.device, options.dtype, tell)
    prompt = Prompt(
        text, options.question, options.seen, chat=not options.plain and engine.loaded.chat, answer=options.answer
    )
    request = Generate(
        model=ModelSpec(options.model, options.device, options.dtype),
        prompt=prompt,
        policies=policies,
        budget=_budget(options, engine, prompt),
        max_bytes=None if options.mib is None else round(options.mib * 2**20),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
        stop=not options.no_stop,
        evict_every=options.evict_every,
    )
    for event in request.run(engine, tell):
        if isinstance(event, Doing):
            tell(event.share, event.text)
        if isinstance(event, Finished):
            result = event.run
    tell(1.0, "")
    _print(result)
    if options.json:
        options.json.write_text(json.dumps(result.to_dict(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def read_policy(text: str, options: Namespace) -> Policy:
    """A policy of the command line, with the options that hold for all."""
    common = {key: getattr(options, key) for key in ("tau", "sinks", "recent") if getattr(options, key) is not None}
    return parse(text, **common)


def _budget(options: Namespace, engine: Engine, prompt: Prompt) -> int:
    if options.share_removed is not None:
        ids, _ = prompt.encode(engine)
        return budget.from_share(len(ids), options.share_removed)
    return 256 if options.budget is None else options.budget


def _tell(share: float, text: str) -> None:
    print(f"\r\033[K{share:4.0%} {text}" if text else "\r\033[K", end="", file=sys.stderr, flush=True)


def _silent(share: float, text: str) -> None:
    pass


def _print(result: Run) -> None:
    for row in result.rows:
        kl = "" if row.mean_kl is None else f", mean KL {row.mean_kl:.3g} nats"
        facts = f"{row.entries:g} entries, {row.bytes / 2**20:.3g} MiB{kl}, {row.tokens_per_second:.3g} tokens/s"
        differs = "" if row.first_difference is None else f", differs from token {row.first_difference + 1}"
        print(f"{row.label}: {facts}{differs}\n    {row.text.strip()}\n")
