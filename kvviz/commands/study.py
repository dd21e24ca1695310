"""`python -m kvviz study`: a figure or table of the papers, measured again; rows as CSV, the whole as JSON, and a report."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from kvviz.commands.generate import _silent, _tell, add_model_arguments
from kvviz.engine import load
from kvviz.events import Finished
from kvviz.host import ModelSpec
from kvviz.jobs import Prompt
from kvviz.models import default_name
from kvviz.prompts import read_text
from kvviz.studies import STUDIES, StudyError, StudyRequest, StudyResult, study
from kvviz.studies.images import images
from kvviz.studies.report import report

HELP = "Measure figures and tables of the papers again, on the loaded model."


def add_arguments(parser: ArgumentParser) -> None:
    """Which studies, with which settings, on which prompt, and where the results go."""
    parser.add_argument("study", nargs="*", metavar="NAME", help=f"one or more of {', '.join(STUDIES)}")
    add_model_arguments(parser)
    parser.add_argument("--all", action="store_true", help="all studies, one after the other")
    parser.add_argument("--missing", action="store_true", help="only those that OUT does not hold yet")
    parser.add_argument("--list", action="store_true", help="list studies with their settings, and end")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting: tokens=512, shares=0.5,0.9, policies='capkv h2o'",
    )
    parser.add_argument("--context", type=Path, metavar="FILE", help="a text of your own, UTF-8")
    parser.add_argument("--question", default="", help="asked about it; without one the text itself is read on")
    parser.add_argument("--answer", default="", help="first words of the answer")
    parser.add_argument(
        "--seen", action="store_true", help="eviction sees the question (by default it is asked afterwards)"
    )
    parser.add_argument("--plain", action="store_true", help="plain text, without the chat template")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write NAME.json and NAME.csv here")
    parser.add_argument(
        "--label", default="", help="write NAME-LABEL.json: a further run of a study, shown below the first"
    )
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="write a report of all results in DIR")
    parser.add_argument(
        "--images", type=Path, metavar="DIR", help="also draw the figures, for the report (needs Playwright)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def run(options: Namespace) -> None:
    """List, measure, report, as asked."""
    if options.list:
        for each in STUDIES.values():
            print(f"{each.name}: {each.title} ({each.source})\n    {dict(each.settings)}")
        return
    names = list(STUDIES) if options.all else options.study
    if options.missing and options.out:
        names = [name for name in names if not (options.out / f"{_file(name, options.label)}.json").exists()]
    if not names and not (options.report or options.images):
        raise StudyError(f"Name a study, or --all. There are {', '.join(STUDIES)}.")
    requests = [request(options, name) for name in names]
    if requests:
        _measure(requests, options)
    found = results(options.out or Path("."))
    if options.images:
        images(found, options.images)
    if options.report:
        page = report(found, options.images, options.report.parent)
        options.report.write_text(page, encoding="utf-8")


def request(options: Namespace, name: str) -> StudyRequest:
    """The study that a command line asks for."""
    chosen = study(name)
    settings = dict(part.partition("=")[::2] for part in options.set)
    chosen.chosen(settings)
    model = ModelSpec(options.model or default_name(), options.device, options.dtype)
    prompt = None
    if options.context is not None:
        text = read_text(options.context.read_bytes())
        prompt = Prompt(text, options.question, options.seen, chat=not options.plain, answer=options.answer)
    return StudyRequest(model, name, tuple(settings.items()), prompt)


def _measure(requests: list[StudyRequest], options: Namespace) -> None:
    tell = _silent if options.quiet else _tell
    model = requests[0].model
    engine = load(model.name, model.device, model.dtype, tell)
    for each in requests:
        events = each.run(engine, tell)
        (result,) = [event.run for event in events if isinstance(event, Finished)]
        tell(1.0, "")
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            file = _file(each.study, options.label)
            (options.out / f"{file}.json").write_text(result.to_json(), encoding="utf-8")
            (options.out / f"{file}.csv").write_text(result.to_csv(), encoding="utf-8")
        print(f"{each.study}: {study(each.study).finding(result)} ({result.config['seconds']:g} s)", flush=True)


def results(folder: Path) -> list[StudyResult]:
    """The results that a folder holds, in the order of the registry, further runs of a study after the first."""
    files = [file for name in STUDIES for file in [folder / f"{name}.json", *sorted(folder.glob(f"{name}-*.json"))]]
    return [StudyResult.from_json(file.read_text(encoding="utf-8")) for file in files if file.exists()]


def _file(name: str, label: str) -> str:
    return f"{name}-{label}" if label else name
