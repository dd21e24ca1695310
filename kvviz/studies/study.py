"""What a study is: a figure or table of a paper, measured again on the loaded model, with a sentence on what came out.

A study says what the paper found, its settings, how its rows are measured, how they are drawn, and how they are judged. Its rows
are plain values, one dictionary each; everything else is derived from them.
"""

from __future__ import annotations

import csv
import io
import json
import platform
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import plotly.graph_objects as go
import torch
import transformers

from kvviz.engine import Engine
from kvviz.events import Event, Finished
from kvviz.exceptions import KvvizError
from kvviz.figures import studies as figures
from kvviz.figures.studies import Chart
from kvviz.host import ModelSpec
from kvviz.jobs import Prompt
from kvviz.models import DEFAULT
from kvviz.prefill import Progress

VERSION = 1

Row = dict[str, Any]

AGREES, PARTLY, DIFFERS, OPEN = "Agrees with the paper", "Agrees in part", "Does not agree with the paper", "Undecided"
"""How a finding begins."""


HELP = {
    "task": "What the samples are made of: text that is read on, or a task of which the full cache writes the answer.",
    "tasks": "Tasks, with spaces between them.",
    "tokens": "Length of a prompt, N.",
    "new_tokens": "Tokens that are read or written after it. For task scores 0 is what each task takes.",
    "samples": "How many samples, or examples of each task, from consecutive seeds.",
    "seed": "The first of them.",
    "shares": "Shares of the prompt's entries that are removed, 0 to 1, with commas between them.",
    "policies": "Methods with their options, with spaces between them: capkv:tau=2 h2o.",
    "policy": "A method with its options: h2o, capkv:tau=2.",
    "budget": "Entries a head, L, on average over the model.",
    "budgets": "Entries a head, L, with commas between them.",
    "lengths": "Prompt lengths, N, with commas between them.",
    "layer": "Counted from 0.",
    "head": "Query head, counted from 0.",
    "taus": "Values of τ, with commas between them.",
    "variant": "published (the authors' code) or paper (the printed equations).",
    "allocation": "uniform, pyramid or adaptive: the same for all four settings.",
    "every": "Evict every so many tokens.",
    "question": "after (asked after eviction) or seen (part of the prompt that eviction sees).",
    "repeats": "Timed runs, after one that is thrown away; the median is shown.",
    "timed_tokens": "Tokens that are written in a timed run.",
    "rules": "Eviction rules to which each order of the correction is added.",
}
"""Setting -> what it is, in a sentence."""


class StudyError(KvvizError):
    """A study that cannot run so; the message says what to change."""


@dataclass(frozen=True)
class StudyResult:
    """What came out.

    Attributes:
        study: its name.
        config: model and revision, device, dtype, versions, seed, settings, seconds, and the command that repeats it.
        rows: plain values.
    """

    study: str
    config: dict[str, Any]
    rows: list[Row]
    version: int = VERSION

    def to_json(self) -> str:
        """The whole study as one file."""
        plain = asdict(self)
        return json.dumps({"version": plain.pop("version"), **plain}, ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> StudyResult:
        """From such a file; StudyError says what is wrong with it."""
        try:
            plain = json.loads(text)
            made = cls(plain["study"], plain["config"], plain["rows"], plain["version"])
        except (ValueError, TypeError, KeyError) as error:
            raise StudyError("The file is no study of kvviz. Run the study again.") from error
        if made.version != VERSION:
            raise StudyError(f"The study is of version {made.version}, and this kvviz reads version {VERSION}.")
        return made

    def to_csv(self) -> str:
        """The rows, one line each."""
        out = io.StringIO()
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        writer = csv.DictWriter(out, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return out.getvalue()


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study; see the module.

    Attributes:
        name, title: of the registry, and for people.
        group: of GROUPS.
        source: figures and tables, "CapKV fig. 3, fig. 6".
        paper: one sentence on what the paper found.
        settings: name -> default: numbers, text, or tuples of them. They make it finish in two minutes on two CPU cores.
        full: what the paper's size would take.
        measure: does the work on a `Bench`; see kvviz.studies.bench.
        chart: how the rows are drawn.
        judge: rows -> one sentence that begins with AGREES, PARTLY, DIFFERS or OPEN.
        doubt: where the paper's own numbers contradict each other or the arithmetic.
        on_prompt: can run on a prompt of one's own; the others write theirs from a seed.
        timings: its numbers are times, which other work on the machine disturbs.
    """

    name: str
    title: str
    group: str
    source: str
    paper: str
    settings: Mapping[str, Any]
    full: str
    measure: Callable[..., list[Row]]
    chart: Chart
    judge: Callable[[Sequence[Row]], str]
    doubt: str = ""
    on_prompt: bool = True
    timings: bool = False

    def run(
        self,
        engine: Engine,
        settings: Mapping[str, Any] | None = None,
        progress: Progress = lambda share, text: None,
        prompt: Prompt | None = None,
    ) -> StudyResult:
        """Measure.

        Args:
            settings: instead of the defaults, any of them.
            progress: told the share done and what is being done; it may raise to cancel.
            prompt: a prompt of one's own.

        Raises:
            StudyError: a setting that there is not.
            KvvizError, ValueError: of the work itself.
        """
        from kvviz.studies.bench import Bench

        request = StudyRequest(ModelSpec(engine.loaded.name), self.name, tuple((settings or {}).items()), prompt)
        chosen = self.chosen(settings or {})
        began = time.perf_counter()
        rows = self.measure(Bench(engine, chosen, progress, prompt if self.on_prompt else None))
        progress(1.0, "Done")
        return StudyResult(self.name, _config(request, chosen, engine, time.perf_counter() - began), rows)

    def chosen(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """All settings; those given are brought into the kind that the default is of."""
        for key in settings:
            if key not in self.settings:
                raise StudyError(f"{self.name} has no setting {key!r}; there are {', '.join(self.settings)}.")
        return {key: _like(key, settings.get(key, usual), usual) for key, usual in self.settings.items()}

    def figure(self, result: StudyResult, dark: bool = False, panel: int | None = None) -> go.Figure:
        """Its figure, or one panel of it alone."""
        if panel is not None:
            return figures.single(self.chart, result.rows, panel, dark)
        return figures.figure(self.chart, result.rows, dark)

    def finding(self, result: StudyResult) -> str:
        """One sentence on what came out here."""
        return self.judge(result.rows)


@dataclass(frozen=True)
class StudyRequest:
    """A study as a job for the host; its result is a `StudyResult`."""

    model: ModelSpec
    study: str
    settings: tuple[tuple[str, Any], ...] = ()
    prompt: Prompt | None = field(default=None)

    def run(self, engine: Engine, progress: Progress) -> Iterator[Event]:
        """Measure; nothing is yielded before the end, since progress is told on the way."""
        from kvviz.studies import study

        chosen = study(self.study)
        result = chosen.run(engine, dict(self.settings), progress, self.prompt)
        result.config["command"] = self.command()
        yield Finished(result)

    def paths(self) -> tuple[str, ...]:
        """The files on this machine that its tasks would read.

        Raises:
            TaskError: a task that there is not.
            StudyError: a setting that there is not.
        """
        from kvviz import tasks
        from kvviz.studies import study

        chosen = study(self.study).chosen(dict(self.settings))
        named = [chosen["task"]] if "task" in chosen else chosen.get("tasks", ())
        return tuple(filter(None, (tasks.parse(name).path for name in named)))

    def command(self) -> str:
        """The command line that repeats it; a prompt of one's own is to be saved as prompt.txt first."""
        words = ["python", "-m", "kvviz", "study", self.study]
        model = {"--model": self.model.name if self.model.name != DEFAULT else None}
        model |= {"--device": self.model.device, "--dtype": self.model.dtype}
        words += [word for flag, value in model.items() if value for word in (flag, value)]
        for key, value in self.settings:
            words += ["--set", f"{key}={setting_text(value)}"]
        if self.prompt is not None:
            words += ["--context", "prompt.txt"] + ([] if self.prompt.chat else ["--plain"])
            words += ["--seen"] if self.prompt.seen else []
            words += ["--question", self.prompt.question] if self.prompt.question else []
            words += ["--answer", self.prompt.answer] if self.prompt.answer else []
        return shlex.join([*words, "--out", "OUT"])


def setting_text(value: Any) -> str:
    """A setting as people write it: numbers with commas between them, words with spaces."""
    if not isinstance(value, tuple | list):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if any(isinstance(each, str) for each in value):
        return shlex.join(value)
    return ",".join(setting_text(each) for each in value)


def _like(key: str, value: Any, usual: Any) -> Any:
    """A value, or its text, as the kind that `usual` is of."""
    if isinstance(usual, tuple):
        words = isinstance(usual[0], str)
        parts = (
            (shlex.split(value) if words else value.replace(",", " ").split())
            if isinstance(value, str)
            else list(value)
        )
        if not parts:
            raise StudyError(f"The setting {key} is empty. Its default is {setting_text(usual)}.")
        return tuple(_like(key, part, usual[0]) for part in parts)
    if isinstance(usual, str):
        return str(value)
    try:
        number = float(value)
        if isinstance(usual, int) and number != int(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        kind = "a whole number" if isinstance(usual, int) else "a number"
        raise StudyError(f"The setting {key} takes {kind}; got {value!r}. Its default is {usual}.") from None
    return int(number) if isinstance(usual, int) else number


def _config(request: StudyRequest, chosen: dict[str, Any], engine: Engine, seconds: float) -> dict[str, Any]:
    loaded, prompt = engine.loaded, request.prompt
    digest = None if prompt is None else sha256(prompt.context.encode()).hexdigest()
    return {
        "model": loaded.name,
        "revision": loaded.revision,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "seed": chosen.get("seed", 0),
        "settings": {key: list(value) if isinstance(value, tuple) else value for key, value in chosen.items()},
        "context_sha256": digest,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "command": request.command(),
    }
