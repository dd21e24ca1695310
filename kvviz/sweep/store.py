"""A sweep on disk: `config.json`, and `rows.jsonl`, to which rows are appended as they come. Both are plain and versioned.

A line that was half written when the power went is dropped; the sweep goes on with the row that it was for.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvviz.exceptions import KvvizError
from kvviz.sweep.rows import VERSION, SweepRow

CONFIG, ROWS = "config.json", "rows.jsonl"

SAME = ("model", "revision", "dtype", "max_new_tokens", "compare", "evict_every")
"""What an earlier sweep must share with the one that resumes it."""


class SweepError(KvvizError):
    """A folder that cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Result:
    """A sweep's configuration and its rows, in the order in which they came."""

    config: dict[str, Any]
    rows: tuple[SweepRow, ...]

    def frame(self) -> pd.DataFrame:
        """One line a row; columns are the attributes of `SweepRow`."""
        columns = list(SweepRow.__match_args__)
        return pd.DataFrame([asdict(row) for row in self.rows], columns=columns)

    def table(self) -> pd.DataFrame:
        """Means over the seeds: a line for each policy and budget, a column for each task, length and scenario."""
        frame = self.frame()
        if frame.empty:
            return frame
        several = [name for name in ("length", "seen") if frame[name].nunique() > 1]
        words = {"length": lambda n: f"{n:,}", "seen": lambda seen: "seen" if seen else "asked after"}
        frame["column"] = frame["task"].where(frame["loss"].isna(), frame["task"] + ", loss")
        for name in several:
            frame["column"] += ", " + frame[name].map(words[name])
        frame["value"] = frame["loss"].where(frame["score"].isna(), frame["score"])
        lines, columns = (
            list(dict.fromkeys(each)) for each in (zip(frame.label, frame.asked, strict=True), frame.column)
        )
        table = frame.pivot_table("value", ["label", "asked"], "column", aggfunc="mean", dropna=False, observed=True)
        table = table.reindex(index=pd.MultiIndex.from_tuples(lines, names=["policy", "budget"]), columns=columns)
        for name, title in (("mean_kl", "KL, nats"), ("agreement", "same token")):
            if frame[name].notna().any():
                table[title] = frame.groupby(["label", "asked"])[name].mean().reindex(table.index)
        table.columns.name = None
        return table


def load(folder: str | Path) -> Result:
    """What a folder holds, whether its sweep is over or not.

    Raises:
        SweepError: it holds no sweep, or a line is broken; the message names it.
    """
    folder = Path(folder).expanduser()
    return Result(_config(folder), tuple(_rows(folder)[0]))


class Store:
    """Where a sweep puts its rows: a folder, or nothing but memory."""

    def __init__(self, folder: str | None, config: dict[str, Any], resume: bool = False) -> None:
        """Raises SweepError: the folder holds another sweep, or holds one and is not to be resumed."""
        self.config, self.rows = config, []
        self.folder = None if folder is None else Path(folder).expanduser()
        if self.folder is None:
            return
        if (self.folder / ROWS).exists():
            if not resume:
                raise SweepError(f"{self.folder} holds a sweep already. Resume it, or name another folder.")
            _check_same(_config(self.folder), config, self.folder)
            self.rows, end = _rows(self.folder)
            with (self.folder / ROWS).open("r+b") as file:
                file.truncate(end)
        self.folder.mkdir(parents=True, exist_ok=True)
        written = json.dumps(config, ensure_ascii=False, indent=1) + "\n"
        (self.folder / CONFIG).write_text(written, encoding="utf-8")
        (self.folder / ROWS).touch()

    def add(self, rows: list[SweepRow]) -> None:
        """Keep rows; on disk at once."""
        self.rows += rows
        if self.folder is not None:
            with (self.folder / ROWS).open("a", encoding="utf-8") as file:
                file.writelines(row.to_json() + "\n" for row in rows)

    @property
    def result(self) -> Result:
        """What there is so far."""
        return Result(self.config, tuple(self.rows))


def _check_same(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    for name in SAME:
        if old.get(name) != new[name]:
            raise SweepError(
                f"{folder} holds a sweep with {name.replace('_', ' ')} {old.get(name)!r}, and this one has {new[name]!r}. "
                "Use the same setting, or name another folder."
            )


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except OSError:
        raise SweepError(
            f"{folder} holds no sweep ({CONFIG} cannot be read). Name the folder that a sweep wrote."
        ) from None
    except ValueError:
        raise SweepError(f"{folder / CONFIG} is not JSON. Restore it, or start the sweep in another folder.") from None
    if not isinstance(config, dict) or config.get("version") != VERSION:
        raise SweepError(f"{folder / CONFIG} is not of version {VERSION}. Load it with the kvviz that wrote it.")
    return config


def _rows(folder: Path) -> tuple[list[SweepRow], int]:
    """The rows, and the byte at which the last whole line ends."""
    try:
        data = (folder / ROWS).read_bytes()
    except OSError:
        raise SweepError(f"{folder} holds no {ROWS}. Name the folder that a sweep wrote.") from None
    end = data.rfind(b"\n") + 1
    rows = []
    for number, line in enumerate(data[:end].split(b"\n")[:-1], 1):
        try:
            rows.append(SweepRow.from_json(line.decode("utf-8")))
        except ValueError as error:
            raise SweepError(
                f"{folder / ROWS}, line {number}: {error}. Remove the line; its row will run again."
            ) from None
    return rows, end
