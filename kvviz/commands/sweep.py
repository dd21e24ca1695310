"""`python -m kvviz sweep`: many tasks, policies and budgets as one job, saved as it comes, with a table at the end."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable

from kvviz import tasks
from kvviz.commands.generate import _silent, _tell, add_model_arguments, read_policy
from kvviz.engine import load
from kvviz.events import Doing, Finished
from kvviz.host import ModelSpec
from kvviz.models import default_name
from kvviz.sweep import Result, Sweep

HELP = "Run policies over tasks, lengths, budgets and seeds; save every row, and print a table."

SCENARIOS = {"after": (False,), "seen": (True,), "both": (False, True)}


def add_arguments(parser: ArgumentParser) -> None:
    """All of a sweep's settings."""
    add_model_arguments(parser)
    many = {"action": "extend", "default": []}
    parser.add_argument(
        "--task",
        action="append",
        required=True,
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"repeatable; {', '.join(tasks.names())}; also longbench:FILE.jsonl, longbench:DATASET and text:FILE",
    )
    parser.add_argument("--length", type=_ints, required=True, **many, help="tokens of a prompt: 512,1024")
    parser.add_argument("--seed", type=_ints, **many, help="0:3 are 0, 1 and 2 (default 0)")
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME[:OPTION=VALUE,...]",
        help="repeatable; the full cache runs anyway",
    )
    parser.add_argument("--budget", type=_ints, **many, help="entries per head, averaged over the model: 128,256")
    parser.add_argument("--share-removed", type=_floats, **many, help="shares of the prompt's entries: 0.5,0.75")
    parser.add_argument("--tau", type=_floats, **many, help="for every policy that has a tau: 0,1,5")
    parser.add_argument("--sinks", type=int, help="protect as many first entries in every policy")
    parser.add_argument("--recent", type=float, help="protect as many last entries in every policy")
    parser.add_argument(
        "--scenario", choices=SCENARIOS, default="after", help="the question comes after eviction, or is seen by it"
    )
    parser.add_argument("--max-new-tokens", type=int, help="of every answer; by default what the task takes")
    parser.add_argument("--compare", action="store_true", help="measure the divergence from the full cache as well")
    parser.add_argument("--evict-every", type=int, metavar="N", help="also evict while writing, every N tokens")
    parser.add_argument("--out", metavar="FOLDER", help="save config.json and rows.jsonl here")
    parser.add_argument("--resume", action="store_true", help="go on with what the folder holds")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def run(options: Namespace) -> None:
    """Load, run, print."""
    sweep = request(options)
    tell = _silent if options.quiet else _tell
    engine = load(sweep.model.name, sweep.model.device, sweep.model.dtype, tell)
    for event in sweep.run(engine, tell):
        if isinstance(event, Doing):
            tell(event.share, event.text)
        if isinstance(event, Finished):
            result = event.run
    tell(1.0, "")
    _print(result)


def request(options: Namespace) -> Sweep:
    """The sweep that a command line asks for."""
    common = Namespace(tau=None, sinks=options.sinks, recent=options.recent)
    return Sweep(
        model=ModelSpec(options.model or default_name(), options.device, options.dtype),
        tasks=tuple(tasks.parse(each) for each in options.task),
        lengths=tuple(options.length),
        policies=tuple(read_policy(each, common) for each in options.policy),
        budgets=tuple(options.budget),
        shares_removed=tuple(options.share_removed),
        seeds=tuple(options.seed) or (0,),
        taus=tuple(options.tau),
        scenarios=SCENARIOS[options.scenario],
        max_new_tokens=options.max_new_tokens,
        compare=options.compare,
        evict_every=options.evict_every,
        folder=options.out,
        resume=options.resume,
    )


def _print(result: Result) -> None:
    print(result.table().to_string(float_format=lambda value: f"{value:.4g}", na_rep=""))
    seeds = len({row.seed for row in result.rows})
    print(f"\nScores from 0 to 100, losses in nats a token; means over {seeds} {'seed' if seeds == 1 else 'seeds'}.")


def _ints(text: str) -> list[int]:
    """Numbers and ranges: "0:3,7" are 0, 1, 2 and 7."""
    numbers = []
    for part in text.split(","):
        first, colon, end = part.partition(":")
        numbers += range(_number(int, first), _number(int, end)) if colon else [_number(int, part)]
    return numbers


def _floats(text: str) -> list[float]:
    return [_number(float, part) for part in text.split(",")]


def _number(kind: Callable[[str], float], text: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a {'whole ' if kind is int else ''}number") from None
