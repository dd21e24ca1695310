"""`python -m kvviz bench`: the table of docs/performance.md, on this machine."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from kvviz.bench import growth, report
from kvviz.bench.measures import ALL
from kvviz.bench.operations import profiles
from kvviz.bench.setting import Setting
from kvviz.prompts import read_text

HELP = "Measure speed and memory: ratios in one run, beside kvpress where it is installed."


def add_arguments(parser: ArgumentParser) -> None:
    """What to run, and where the results go."""
    parser.add_argument("--model", default="")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--context", type=Path, required=True, help="a long text, UTF-8")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", default="", metavar="PYTHON", help="a Python with kvpress 0.5.5 installed")
    parser.add_argument("--only", action="append", choices=[f.__name__ for f in ALL] + ["growth"], help="repeatable")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder for table.md and results.json")


def run(options: Namespace) -> None:
    """Measure, print and write."""
    text = read_text(options.context.read_bytes())
    setting = Setting.load(
        text,
        options.model,
        options.device,
        options.dtype,
        n_tokens=options.tokens,
        repeats=options.repeats,
        peer_python=options.peer,
    )
    where, results = report.machine(setting.engine), {}
    for function in ALL:
        if not options.only or function.__name__ in options.only:
            print(f"measuring {function.__name__.replace('_', ' ')} ...", file=sys.stderr, flush=True)
            results |= function(setting)
            _write(options.out, where, results, {})
    growths = {}
    if not options.only or "growth" in options.only:
        print("measuring growth ...", file=sys.stderr, flush=True)
        ids = setting.engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids *= max(growth.LENGTHS) // len(ids) + 1  # a text that is too short is read again
        growths = {"lengths": growth.by_length(setting.engine, ids), "rows": growth.by_rows(setting.engine, ids)}
        growths["profiles"] = profiles(setting.engine, ids)
    if setting.peer:
        setting.peer.close()
    print(_write(options.out, where, results, growths))


def _write(folder: Path, where: dict, results: dict, growths: dict) -> str:
    """Write table.md and results.json, as far as they go; the table."""
    markdown = f"{', '.join(f'{name} {value}' for name, value in where.items())}\n\n{report.table(results)}\n\n"
    markdown += report.parts(results) + "\n"
    if growths:
        markdown += "\n" + report.growth_tables(growths["lengths"], growths["rows"]) + "\n"
        markdown += "\n" + report.profile_table(growths["profiles"]) + "\n"
    plain = {key: {"value": value, "spread": spread, "parts": parts} for key, (value, spread, parts) in results.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(markdown, encoding="utf-8")
    (folder / "results.json").write_text(json.dumps({"machine": where, "results": plain, **growths}, indent=1) + "\n")
    return markdown
