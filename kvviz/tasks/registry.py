"""All tasks by name, and a task as a short string: `niah_single_2`, `niah_multikey_1:keys=8,depth=0.5`, `longbench:FILE`."""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from kvviz.tasks.aggregates import aggregate_tasks
from kvviz.tasks.documents import longbench_documents, ruler_documents
from kvviz.tasks.fewshot import fewshot_tasks
from kvviz.tasks.longbench import longbench_files
from kvviz.tasks.minutes import minutes_tasks
from kvviz.tasks.needles import needle_tasks
from kvviz.tasks.passages import passage_tasks
from kvviz.tasks.task import Task, TaskError

TASKS: dict[str, Task] = {
    each.name: each
    for each in (
        *needle_tasks(),
        *aggregate_tasks(),
        *ruler_documents(),
        *longbench_documents()[:2],
        *minutes_tasks(),
        *fewshot_tasks(),
        *longbench_documents()[2:],
        *passage_tasks(),
        *longbench_files(),
    )
}


def names(family: str | None = None) -> tuple[str, ...]:
    """The tasks that are written here, of all families or of one ("RULER", "LongBench", "text")."""
    return tuple(t.name for t in TASKS.values() if t.name != "longbench" and family in (None, t.family))


def task(name: str, **options: Any) -> Task:
    """A task by name; options that are left out are as published.

    Raises:
        TaskError: unknown name or option, or a value out of range; the message says what is allowed.
    """
    if name not in TASKS:
        close = get_close_matches(name.lower().replace("-", "_"), TASKS)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise TaskError(f"There is no task {name!r}. {hint}All of them: {', '.join(TASKS)}.")
    known = TASKS[name].option_names()
    for option in options:
        if option not in known:
            has = f"its options are {', '.join(known)}" if known else "it has none"
            raise TaskError(f"{name} has no option {option!r}; {has}.")
    return replace(TASKS[name], **options)


def parse(text: str) -> Task:
    """The task of a string `name` or `name:option=value,...`; a value alone is that of the first option.

    Raises:
        TaskError: it cannot be read, or names an unknown task or option.
    """
    name, _, rest = text.strip().partition(":")
    chosen = task(name)
    options = {}
    for part in filter(None, re.split(r",(?=\w+=)", rest)):
        key, _, value = part.partition("=") if re.match(r"\w+=", part) else (None, "", part)
        key = key or next(iter(chosen.option_names()), "value")
        options[key] = _value(value, chosen.options.get(key), text)
    return task(name, **options)


def _value(value: str, usual: Any, text: str) -> Any:
    """A value of the kind that the usual one is of; None stands for an option that is a number or nothing."""
    if isinstance(usual, str):
        return value
    if value.lower() == "none":
        return None
    try:
        return int(value) if isinstance(usual, int) else float(value)
    except ValueError:
        raise TaskError(f"{value!r} in {text!r} is not a {'whole ' if isinstance(usual, int) else ''}number.") from None
