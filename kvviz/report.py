"""A run as a file: JSON (and back, checked), CSV, a table, and the command that repeats it."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from hashlib import sha256
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from kvviz.exceptions import KvvizError
from kvviz.experiment import MIB, SHARE, Experiment, to_query
from kvviz.host import ModelSpec
from kvviz.models import DEFAULT
from kvviz.policies.spec import spec
from kvviz.presets import PRESETS, TEXTS
from kvviz.runs import VERSION, Row, Run

MAX_BYTES = 16 << 20
MAX_ROWS = 32
MAX_TOKENS = 100_000
MAX_KEYS = 64


class ReportError(KvvizError):
    """A file is no run of kvviz; the message says what is wrong with it."""


def to_json(run: Run, experiment: Experiment | None = None) -> str:
    """The run as design.md has it: version, config, rows. With its experiment the config also names the prompt."""
    plain = run.to_dict()
    if experiment is not None:
        digest = sha256(experiment.prompt.context.encode()).hexdigest()
        plain["config"] |= {"link": to_query(experiment), "context_sha256": digest, "command": command(experiment)}
    return json.dumps({"version": plain.pop("version"), **plain}, ensure_ascii=False, indent=1) + "\n"


def from_json(text: str | bytes) -> Run:
    """A run from a file that anybody may have written: every field is checked, nothing is executed.

    Raises:
        ReportError: it is too large, not JSON, of another version, or a field is not what it should be.
    """
    if len(text) > MAX_BYTES:
        raise ReportError(f"The file is larger than {MAX_BYTES >> 20} MiB. A run is smaller; choose another file.")
    try:
        plain = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ReportError("The file is not JSON. Choose a file that was exported here.") from error
    if not isinstance(plain, dict) or plain.get("version") != VERSION:
        raise ReportError(f"The file is no run of version {VERSION}. Export it again with this version of kvviz.")
    rows, config = plain.get("rows"), plain.get("config")
    if not isinstance(config, dict) or not isinstance(rows, list) or not 1 <= len(rows) <= MAX_ROWS:
        raise ReportError(f"The file has no configuration, or not from 1 to {MAX_ROWS} rows.")
    made = [_row(row, number) for number, row in enumerate(rows)]
    if not any(row.policy == "full" for row in made):
        raise ReportError("The file has no row of the full cache, with which the others are compared.")
    run = Run(_config(config), made)
    for number, row in enumerate(made):
        if fault := _contradiction(row, run.reference):
            raise ReportError(f"Row {number} of the file contradicts itself: {fault}.")
    return run


def _config(config: dict) -> dict:
    """The configuration, if it holds plain values, lists of them, and the link's."""
    plain = lambda value: _fits(value, Any) or _fits(value, list[Any])  # noqa: E731
    link = config.get("link", {})
    rest = {key: value for key, value in config.items() if key != "link"}
    if len(config) > MAX_KEYS or not isinstance(link, dict) or len(link) > MAX_KEYS:
        raise ReportError("The file's configuration is not that of a run.")
    if wrong := [key for part in (rest, link) for key, value in part.items() if not plain(value)]:
        raise ReportError(f"The file's configuration has something else in {wrong[0][:40]!r} than a run has.")
    for key in ("evict_every", "raster_tokens", "prompt_tokens"):
        if not _fits(config.get(key), int | None):
            raise ReportError(f"The file's configuration has something else in {key!r} than a run has.")
    return config


def _contradiction(row: Row, reference: Row) -> str:
    """What does not go together in a row, or nothing."""
    widths = {len(each) for each in row.raster}
    checks = {
        "it has not one piece of text for each token": len(row.pieces) == len(row.token_ids),
        "it has more divergences than the full cache has tokens": len(row.kl) <= len(reference.pieces),
        "it has more likeliest words than divergences": not row.kl or len(row.top) <= len(row.kl),
        "its first difference lies beyond the text": (row.first_difference or 0)
        <= max(len(row.pieces), len(reference.pieces)),
        "its end is none of a run's": row.finish in ("", "end", "length"),
        "a layer has no heads": all(row.head_counts),
        "its numbers by step have not one length": len(row.entries_by_step) == len(row.bytes_by_step),
        "its raster is not even": len(widths) <= 1 and len(row.raster) == len(row.raster_steps) and 0 not in widths,
    }
    return next((fault for fault, holds in checks.items() if not holds), "")


def table(run: Run) -> list[dict[str, Any]]:
    """What every policy kept and what it cost, with units in the names of the columns."""
    return [_facts(row, row is run.reference) for row in run.rows]


def to_csv(run: Run) -> str:
    """One line a policy and step of the full cache's output, with the facts of `table` repeated in each."""
    reference, out = run.reference, io.StringIO()
    steps = ["step", "full cache wrote", "policy wrote", "KL, nats"]
    writer = csv.DictWriter(out, [*_facts(reference, True), *steps], lineterminator="\n")
    writer.writeheader()
    for row in run.rows:
        facts = _facts(row, row is reference)
        for step in range(max(len(reference.pieces), len(row.pieces))):
            values = (step + 1, *(_at(x, step) for x in (reference.pieces, row.pieces, row.kl)))
            writer.writerow(facts | dict(zip(steps, values, strict=True)))
    return out.getvalue()


def command(experiment: Experiment) -> str:
    """The command line that repeats a run. A text of one's own is to be saved as prompt.txt first."""
    prompt, preset = experiment.prompt, experiment.preset
    file = str(TEXTS.relative_to(TEXTS.parents[2]) / f"{preset}.txt") if preset in PRESETS else "prompt.txt"
    words: list[Any] = ["python", "-m", "kvviz", "generate"]
    words += _where(experiment.model)
    words += [word for each in ("full", *map(spec, experiment.policies)) for word in ("--policy", each)]
    words += _size(experiment)
    words += ["--context", file]
    words += ["--question", prompt.question] if prompt.question else []
    words += ["--answer", prompt.answer] if prompt.answer else []
    words += [flag for flag, wanted in (("--seen", prompt.seen), ("--plain", not prompt.chat)) if wanted]
    words += ["--max-new-tokens", experiment.max_new_tokens]
    if experiment.temperature:
        words += ["--temperature", f"{experiment.temperature:g}", "--seed", experiment.seed]
    return shlex.join(map(str, [*words, "--json", "OUT.json"]))


def _where(model: ModelSpec) -> list[str]:
    parts = {"--model": model.name if model.name != DEFAULT else None, "--device": model.device, "--dtype": model.dtype}
    return [word for flag, value in parts.items() if value for word in (flag, value)]


def _size(experiment: Experiment) -> list[Any]:
    amount = experiment.size.amount
    if experiment.unit == SHARE:
        return ["--share-removed", f"{amount / 100:.6g}"]
    return ["--mib", f"{amount:.6g}"] if experiment.unit == MIB else ["--budget", int(amount)]


def _facts(row: Row, is_reference: bool) -> dict[str, Any]:
    first = row.first_difference
    return {
        "policy": row.label,
        "entries a head": row.entries,
        "MiB": row.bytes / 2**20,
        "of it moments, MiB": row.moments_bytes / 2**20,
        "sinks": row.sinks,
        "recent": row.recent,
        "prefill, s": row.seconds.get("prefill"),
        "evict, s": row.seconds.get("evict"),
        "decode, s": row.seconds.get("decode"),
        "tokens": len(row.token_ids),
        "tokens/s": row.tokens_per_second,
        "mean KL, nats": None if is_reference else row.mean_kl,
        "first difference at token": None if first is None else first + 1,
    }


def _at(values: list, index: int) -> Any:
    return values[index] if index < len(values) else ""


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _row(plain: Any, number: int) -> Row:
    if not isinstance(plain, dict) or not set(plain) <= set(_FIELDS):
        raise ReportError(f"Row {number} of the file is not a row of a run.")
    for name, value in plain.items():
        if not _fits(value, _FIELDS[name]):
            raise ReportError(f"Row {number} of the file has something else in {name!r} than a run has.")
    if missing := [name for name in ("policy", "label", "budget", "pieces", "token_ids", "kl") if name not in plain]:
        raise ReportError(f"Row {number} of the file lacks {missing[0]!r}.")
    if len(plain["pieces"]) != len(plain["token_ids"]) or not all(plain.get("head_counts", [])):
        raise ReportError(f"Row {number} of the file has lists that do not fit together.")
    top = [[(text, chance) for text, chance in step] for step in plain.get("top", [])]
    return Row(**plain | {"top": top})


_FIELDS = get_type_hints(Row)
"""Field of a Row -> its type."""


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value from JSON can be of a type: numbers finite and not negative, lists and dicts of bounded length."""
    inner = get_args(kind)
    if kind is Any:
        return value is None or any(_fits(value, each) for each in (bool, str, float))
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if kind in (int, float):
        is_kind = isinstance(value, int) or (kind is float and isinstance(value, float) and math.isfinite(value))
        return is_kind and not isinstance(value, bool) and 0 <= value < 2**63
    if get_origin(kind) is list:
        return isinstance(value, list) and len(value) <= MAX_TOKENS and all(_fits(each, inner[0]) for each in value)
    if get_origin(kind) is tuple:
        fitting = isinstance(value, (list, tuple)) and len(value) == len(inner)
        return fitting and all(map(_fits, value, inner))
    if get_origin(kind) is dict:
        fitting = isinstance(value, dict) and len(value) <= MAX_KEYS
        return fitting and all(_fits(key, inner[0]) and _fits(each, inner[1]) for key, each in value.items())
    return isinstance(value, kind)
