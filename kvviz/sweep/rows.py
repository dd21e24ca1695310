"""A row of a sweep: one policy at one budget on one prompt, as plain values, one line of JSON each."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

VERSION = 1


@dataclass(frozen=True)
class SweepRow:
    """What came out.

    Attributes:
        task, length, seed, seen, spec, asked: what was asked for (task and policy as strings; `asked` is the budget, or "all" for
            the full cache). Together they are the row's key.
        family, kind, metric: of the task.
        policy, label, tau: of the policy.
        prompt_tokens: that eviction saw; budget: entries a head that it came to.
        share_removed: of the prompt's entries, as it really was.
        score: 0 to 100 by the task's metric; None where there is nothing to answer.
        text, token_ids, finish: the output; empty where the row read the true text instead.
        answers: the right ones.
        along: "output" (measured along the full cache's output), "text" (along the text that really follows), or "".
        kl: nats, KL(full cache || this policy) at each step; mean_kl is its mean.
        agreement: share of the steps in which both would write the same token.
        loss: nats a token, on the text that really follows.
        first_difference: first token or step in which the row differs from the full cache; None if it never does.
        entries, bytes, kv_bytes, moments_bytes: what it kept, entries a head on average.
        prefill_seconds, evict_seconds, decode_seconds: the rows of a batch write together; decode is the time until this row
            ended. batch_rows says how many they were.
    """

    task: str
    length: int
    seed: int
    seen: bool
    spec: str
    asked: str
    family: str = ""
    kind: str = ""
    metric: str = ""
    policy: str = ""
    label: str = ""
    tau: float | None = None
    prompt_tokens: int = 0
    budget: int = 0
    share_removed: float = 0.0
    score: float | None = None
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish: str = ""
    answers: tuple[str, ...] = ()
    along: str = ""
    kl: tuple[float, ...] = ()
    mean_kl: float | None = None
    agreement: float | None = None
    loss: float | None = None
    first_difference: int | None = None
    entries: float = 0.0
    bytes: int = 0
    kv_bytes: int = 0
    moments_bytes: int = 0
    prefill_seconds: float = 0.0
    evict_seconds: float = 0.0
    decode_seconds: float = 0.0
    batch_rows: int = 0

    @property
    def key(self) -> tuple:
        """What tells it from all others; that of its `Cell`."""
        return self.task, self.length, self.seed, self.seen, self.spec, self.asked

    def to_json(self) -> str:
        """One line."""
        return json.dumps({"version": VERSION, **_plain(asdict(self))}, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> SweepRow:
        """From one line; ValueError says what is wrong with it."""
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"it is not JSON ({error.msg} at character {error.pos + 1})") from None
        if not isinstance(data, dict):
            raise ValueError("it is not a JSON object")
        if data.get("version") != VERSION:
            raise ValueError(f"it is of version {data.get('version')!r}, and this kvviz reads version {VERSION}")
        names = {field.name for field in fields(cls)}
        missing = [name for name in cls.__match_args__[:6] if name not in data]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in names})


def _plain(value: Any) -> Any:
    """JSON knows no infinity; numbers that are not finite become null."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
