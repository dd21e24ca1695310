"""Results of many studies as one Markdown page: what each paper found, what came out, the numbers, the command."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from pathlib import Path

from kvviz.figures.studies import Chart, Panel, means
from kvviz.figures.style import number
from kvviz.studies import GROUPS, STUDIES
from kvviz.studies.study import AGREES, DIFFERS, OPEN, PARTLY, Row, Study, StudyResult

WIDEST = 8
"""Values of x that a table has columns for; with more, it shows the means."""

INTRODUCTION = """# The papers' figures and tables, measured again

Every study of the page *Studies*, run once at its default setting on the default model, SmolLM2-135M-Instruct. This page is
written by `python -m kvviz study --out DIR --report docs/results.md` from the results, which
`python -m kvviz study --all --out DIR` measures.

**How to read it.** The papers use models of 4 to 14 billion parameters, thousands of examples and GPUs. Here one of 135
million reads one to six samples of about a thousand tokens on two CPU cores. What is said about a *mechanism* (capacities,
directions, errors) is measured exactly and for the same formulas. What is said about *scores* rests on a handful of answers: a
difference of a few points means nothing, and none of it shows that a paper is wrong about its own models. Nothing was tuned to
bring out a ranking; every method runs as it was published, with its own protected entries, which differ from method to method
(CapKV protects 4 sinks and nothing recent, SnapKV and MomentKV the last 32) and matter much at small budgets: another protection
is a setting away, `--set policies="capkv:recent=32 snapkv"`.

Quality is mostly the divergence from the full cache, KL(full || evicted) in nats a token along the text that really follows: it
needs no labels and says something on a small model, where task scores are mostly noise.
"""


def report(results: Sequence[StudyResult], images: Path | None = None, beside: Path | None = None) -> str:
    """The page; of several results of one study the first is its own, and the others follow below it.

    Args:
        images: folder of NAME.png; those that are there are shown.
        beside: the folder that the page lies in, for relative links.
    """
    known: dict[str, StudyResult] = {}
    further: dict[str, list[StudyResult]] = {}
    for result in results:
        if known.setdefault(result.study, result) is not result:
            further.setdefault(result.study, []).append(result)
    parts = [INTRODUCTION, _setting(list(known.values())), _summary(known)]
    for group in GROUPS:
        mine = [STUDIES[name] for name in STUDIES if name in known and STUDIES[name].group == group]
        if mine:
            parts.append(f"## {group.capitalize()}")
            for each in mine:
                parts.append(_section(each, known[each.name], images, beside))
                parts += [_again(each, result) for result in further.get(each.name, ())]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _setting(results: Sequence[StudyResult]) -> str:
    if not results:
        return "No results yet."
    config = results[0].config
    versions = ", ".join(f"{name} {version}" for name, version in config["versions"].items())
    longest = max(results, key=lambda result: result.config["seconds"])
    total = sum(result.config["seconds"] for result in results)
    return (
        f"Model {config['model']}, revision `{config['revision']}`, {config['dtype']} on {config['device']} with "
        f"{config['threads']} thread(s); {versions}; {_count(results)} in {total / 60:.0f} minutes, the longest, "
        f"{STUDIES[longest.study].title.lower()!r}, in {longest.config['seconds']:.0f} s."
    )


def _count(results: Sized) -> str:
    return "1 study" if len(results) == 1 else f"{len(results)} studies"


def _summary(known: dict[str, StudyResult]) -> str:
    lines = ["| study | of the papers | finding |", "| --- | --- | --- |"]
    for name, study in STUDIES.items():
        if name in known:
            verdict = study.finding(known[name]).partition(":")[0]
            lines.append(f"| [{study.title}](#{name.replace('_', '-')}) | {study.source} | {verdict} |")
    counts = {words: sum(words in line for line in lines) for words in (AGREES, PARTLY, DIFFERS, OPEN)}
    said = ", ".join(f"{words.lower()}: {count}" for words, count in counts.items() if count)
    return "\n".join(["## In short", "", *lines, "", f"Of {_count(known)}, {said}."])


def _section(study: Study, result: StudyResult, images: Path | None, beside: Path | None) -> str:
    parts = [
        f'<a id="{study.name.replace("_", "-")}"></a>\n### {study.title}',
        f"*{study.source}.* The paper: {study.paper}",
        f"**Here.** {study.finding(result)}",
    ]
    image = None if images is None else images / f"results-{study.name}.png"
    if image is not None and image.exists():
        parts.append(f"![{study.title}]({image.relative_to(beside) if beside else image})")
    parts += tables(study.chart, result.rows)
    if study.doubt:
        parts.append(f"**Doubts about the paper's own numbers, or about this comparison.** {study.doubt}")
    return "\n\n".join([*parts, *_how(study, result)])


def _again(study: Study, result: StudyResult) -> str:
    """A further run of a study, with another model or other settings."""
    parts = [f"**Once more, {result.config['model']}.** {study.finding(result)}", *tables(study.chart, result.rows)]
    return "\n\n".join([*parts, *_how(study, result)])


def _how(study: Study, result: StudyResult) -> list[str]:
    """Settings, time and command."""
    noisy = " The numbers are times: other work on the machine disturbs them." if study.timings else ""
    settings = ", ".join(f"{key} {_words(value)}" for key, value in result.config["settings"].items())
    return [
        f"Settings: {settings}. It took {result.config['seconds']:.0f} s.{noisy} Full size: {study.full}",
        f"```bash\n{result.config['command']}\n```",
    ]


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def tables(chart: Chart, rows: Sequence[Row]) -> list[str]:
    """The numbers behind a chart as Markdown: label by x for curves, means for points and for curves with many x."""
    wide = [
        panel
        for panel in chart.panels
        if panel.kind == "points" or len({r[panel.x] for r in panel.rows(rows)}) > WIDEST
    ]
    made = [_pivot(chart, panel, rows) for panel in chart.panels if panel not in wide and panel.rows(rows)]
    if wide:
        made.insert(0, _averages(chart, wide, rows))
    return made


def _pivot(chart: Chart, panel: Panel, rows: Sequence[Row]) -> str:
    mine = panel.rows(rows)
    columns = [x for x, _ in means([(row[panel.x], row[panel.y]) for row in mine])]
    lines = [
        f"| {panel.y_title} | " + " | ".join(_cell(x) for x in columns) + " |",
        "| --- |" + " ---: |" * len(columns),
    ]
    for label in dict.fromkeys(row[chart.label] for row in mine):
        found = dict(means([(row[panel.x], row[panel.y]) for row in mine if row[chart.label] == label]))
        lines.append(f"| {label} | " + " | ".join(_cell(found.get(x)) for x in columns) + " |")
    title = f"{panel.title[:1].upper()}{panel.title[1:]}, by" if panel.title else "By"
    return f"{title} {panel.x_title}:\n\n" + "\n".join(lines)


def _averages(chart: Chart, panels: Sequence[Panel], rows: Sequence[Row]) -> str:
    columns: dict[str, str] = {}
    for panel in panels:
        if panel.kind == "points":
            columns[panel.x] = panel.x_title
        columns[panel.y] = panel.y_title
    lines = ["| mean | " + " | ".join(columns.values()) + " |", "| --- |" + " ---: |" * len(columns)]
    for label in dict.fromkeys(row[chart.label] for row in rows):
        mine = [row for row in rows if row[chart.label] == label]
        found = [[row[key] for row in mine if row.get(key) is not None] for key in columns]
        lines.append(f"| {label} | " + " | ".join(_cell(sum(v) / len(v) if v else None) for v in found) + " |")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else number(value, 3)
