"""The figures and tables of both papers, measured again on the loaded model and, where it makes sense, on one's own prompt.

    result = kvviz.studies.study("tau").run(engine, {"tokens": 512})
    print(kvviz.studies.study("tau").finding(result))

A new study is one `Study` in one of these files, and its name in that file's STUDIES.
"""

from __future__ import annotations

from difflib import get_close_matches

from kvviz.studies import ablations, capacity, correction, cost, error, live, method_map, scores
from kvviz.studies.study import Study, StudyError, StudyRequest, StudyResult

__all__ = ["GROUPS", "STUDIES", "Study", "StudyError", "StudyRequest", "StudyResult", "study"]

GROUPS = ("capacity", "error", "tau and ablations", "budget", "tasks", "cost")
"""In the order in which they are shown."""

STUDIES: dict[str, Study] = {
    each.name: each
    for group in GROUPS
    for module in (method_map, capacity, error, correction, ablations, live, scores, cost)
    for each in module.STUDIES
    if each.group == group
}


def study(name: str) -> Study:
    """A study by name; StudyError says which there are."""
    if name not in STUDIES:
        close = get_close_matches(name, STUDIES)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise StudyError(f"There is no study {name!r}. {hint}All of them: {', '.join(STUDIES)}.")
    return STUDIES[name]
