"""The model host: one worker thread that owns the device, one queue that every session shares.

A job is a frozen request and a stream of plain events, so that the same jobs could be sent elsewhere. The worker takes
sessions in turn, loads the model that a job names (freeing the other one first), and goes on whatever a job does: a bad
prompt, a full memory or a vanished session ends that job with a message, and no other.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kvviz.engine import STATE_BYTES, Engine
from kvviz.events import Doing, Event, Finished
from kvviz.exceptions import Cancelled, KvvizError, OutOfMemory
from kvviz.models import load_model
from kvviz.prefill import Progress

log = logging.getLogger("kvviz")

QUEUED, RUNNING, DONE, FAILED, CANCELLED = "queued", "running", "done", "failed", "cancelled"

MAX_WAITING = 64
"""Jobs that may wait; further ones are refused."""


@dataclass(frozen=True)
class ModelSpec:
    """Which model a job wants, and where."""

    name: str
    device: str | None = None
    dtype: str | None = None


class Request(Protocol):
    """What a job asks for: the model, and how it runs on the engine. Frozen; it holds plain values only."""

    model: ModelSpec

    def run(self, engine: Engine, progress: Progress) -> Iterator[Event]:
        """Yield events. `progress` may be called at any time between them; it raises Cancelled to stop the work."""
        ...


class Busy(KvvizError):
    """Too many jobs are waiting."""


WAITING = Doing(0.0, "Waiting")


@dataclass
class Job:
    """A request on its way. Any thread may read it and call `cancel`.

    Attributes:
        status: "queued", "running", "done", "failed" or "cancelled".
        events: everything it has yielded so far, in order, but for Doing, of which only the latest is kept, in `doing`.
        error: what went wrong and what to do, when it failed.
        alive: asked now and then whether anybody still wants the job.
    """

    id: int
    session: str
    request: Request
    alive: Callable[[], bool]
    status: str = QUEUED
    events: list[Event] = field(default_factory=list)
    doing: Doing = WAITING
    error: str = ""
    submitted: float = field(default_factory=time.monotonic)
    started: float = 0.0
    stage_started: float = 0.0
    ended: float = 0.0
    _cancel: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Ask it to stop; it does between layers of a prefill and between tokens."""
        self._cancel.set()

    def check(self) -> None:
        """Raise Cancelled if it was cancelled or nobody is left who wants it."""
        if self._cancel.is_set() or not self.alive():
            raise Cancelled("Cancelled.")

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is over; False if `timeout` seconds passed first."""
        return self._over.wait(timeout)

    @property
    def active(self) -> bool:
        """Queued or running."""
        return self.status in (QUEUED, RUNNING)

    @property
    def result(self) -> Any:
        """The run of a finished job, or None."""
        return next((e.run for e in reversed(self.events) if isinstance(e, Finished)), None)

    def seconds_left(self) -> float | None:
        """An estimate for the present stage from its pace so far, or None before there is one."""
        share = self.doing.share
        if self.status != RUNNING or share < 0.05 or share >= 1:
            return None
        return (time.monotonic() - self.stage_started) / share * (1 - share)

    def take(self, event: Event) -> None:
        """Note an event of the worker's, or raise Cancelled."""
        if isinstance(event, Doing):
            if event.share < self.doing.share or event.text[:12] != self.doing.text[:12]:
                self.stage_started = time.monotonic()
            self.doing = event
        else:
            self.events.append(event)
        self.check()


class Host:
    """Owns the model. `submit` from any thread; read `engine` for work on states that needs no forward."""

    def __init__(self, state_bytes: int = STATE_BYTES) -> None:
        self.state_bytes = state_bytes
        self.engine: Engine | None = None
        self.spec: ModelSpec | None = None
        self.running: Job | None = None
        self._waiting: deque[Job] = deque()
        self._served: dict[str, int] = {}
        self._turn = itertools.count(1)
        self._ids = itertools.count(1)
        self._changed = threading.Condition()
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="kvviz-worker", daemon=True)
        self._worker.start()

    def submit(self, request: Request, session: str = "", alive: Callable[[], bool] = lambda: True) -> Job:
        """Queue a request.

        Args:
            session: whose it is; sessions are served in turn.
            alive: answers whether the session still exists; a job whose session is gone is cancelled.

        Raises:
            Busy: too many are waiting.
        """
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                raise Busy(f"{MAX_WAITING} jobs are waiting. Try again in a minute.")
            job = Job(next(self._ids), session, request, alive)
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def place(self, job: Job) -> int:
        """How many jobs come before this one, the running one included; 0 when it runs or is over."""
        with self._changed:
            if job.status != QUEUED:
                return 0
            order, served = list(self._waiting), dict(self._served)
            ahead = 1 if self.running is not None else 0
            for turn in itertools.count(10**9):
                following = _next(order, served)
                if following is job or following is None:
                    return ahead
                order.remove(following)
                served[following.session] = turn
                ahead += 1
        return 0

    @property
    def queue_length(self) -> int:
        """Jobs waiting or running."""
        return len(self._waiting) + (self.running is not None)

    def close(self) -> None:
        """Cancel everything and end the worker."""
        with self._changed:
            self._closed = True
            for job in [*self._waiting, *([self.running] if self.running else [])]:
                job.cancel()
            self._changed.notify_all()
        self._worker.join(timeout=30)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting, timeout=None)
                if self._closed:
                    for job in self._waiting:
                        _end(job, CANCELLED)
                    return
                job = _next(self._waiting, self._served)
                self._waiting.remove(job)
                self._served[job.session] = next(self._turn)
                self.running = job
                job.status, job.started, job.stage_started = RUNNING, time.monotonic(), time.monotonic()
            try:
                self._run(job)
            finally:
                with self._changed:
                    self.running = None
                    while len(self._served) > 1000:
                        self._served.pop(next(iter(self._served)))

    def _run(self, job: Job) -> None:
        status = FAILED
        try:
            job.check()
            engine = self._engine(job)
            for event in job.request.run(engine, lambda share, text: job.take(Doing(share, text))):
                job.take(event)
            status = DONE
        except Cancelled:
            status = CANCELLED
        except (KvvizError, ValueError) as error:  # bad input: the message says the remedy
            job.error = str(error)
        except Exception as error:
            log.exception("job %d failed", job.id)
            job.error = f"The worker met an error ({type(error).__name__}: {error}). Try again; if it stays, report it."
        _end(job, status)

    def _engine(self, job: Job) -> Engine:
        """The engine that the job asks for; another model is freed before its successor is loaded."""
        spec = job.request.model
        if self.engine is not None and self.spec == spec:
            return self.engine
        self.engine, self.spec = None, None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        progress = lambda share, text: job.take(Doing(share, text))  # noqa: E731
        try:
            loaded = load_model(spec.name, device=spec.device, dtype=spec.dtype, progress=progress)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise OutOfMemory(f"The memory does not hold {spec.name}. Choose a smaller model.") from error
        self.engine, self.spec = Engine(loaded, self.state_bytes), spec
        return self.engine


def _next(waiting, served: dict[str, int]) -> Job | None:
    """The first job of the session that was served longest ago."""
    return min(waiting, key=lambda job: (served.get(job.session, 0), job.id), default=None)


def _end(job: Job, status: str) -> None:
    job.status, job.ended = status, time.monotonic()
    job._over.set()
