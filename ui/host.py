"""The one model host of the process, and whose session this is."""

from __future__ import annotations

import gc
import threading
import time
from collections import OrderedDict

import streamlit as st
from streamlit.runtime import Runtime
from streamlit.runtime.scriptrunner import get_script_run_ctx

from kvviz.engine import Engine
from kvviz.exceptions import KvvizError
from kvviz.host import Host, Job, ModelSpec
from kvviz.jobs import Load, Prompt
from kvviz.models import default_name

GRACE = 8.0
"""Seconds for which a session may be out of reach (a reload, a slow network) before its jobs are given up."""


@st.cache_resource(show_spinner=False)
def host() -> Host:
    """The host, made once a process.

    Streamlit collects garbage after every run of a script or fragment, and walking the half million objects of the imported
    libraries takes half a second, in which the worker stands still. What is there now stays, so it is left out from here on.
    """
    gc.collect()
    gc.freeze()
    return Host()


def preload() -> Job | None:
    """Ask for the usual model before anybody opens the page; None where there is none, which the page then says."""
    try:
        return host().submit(Load(ModelSpec(default_name())))
    except KvvizError:
        return None


def loading_for_all(model: ModelSpec) -> Job | None:
    """The load of this model that `preload` began, while it goes on."""
    job = host().running
    return job if job and not job.session and isinstance(job.request, Load) and job.request.model == model else None


def session_id() -> str:
    """Which browser tab this is."""
    context = get_script_run_ctx()
    return context.session_id if context else ""


class Alive:
    """Answers, for the host's worker, whether a session still exists. A short absence is forgiven."""

    def __init__(self, session: str) -> None:
        self.session, self._gone_since, self._lock = session, None, threading.Lock()

    def __call__(self) -> bool:
        """True while the tab is open."""
        if not Runtime.exists() or Runtime.instance().is_active_session(self.session):
            self._gone_since = None
            return True
        with self._lock:
            self._gone_since = self._gone_since or time.monotonic()
            return time.monotonic() - self._gone_since < GRACE


def engine_for(model: ModelSpec) -> Engine | None:
    """The host's engine, if it is the one that is asked for."""
    shared = host()
    engine, spec = shared.engine, shared.spec
    return engine if spec == model else None


_encoded: OrderedDict[tuple, tuple[tuple[int, ...], str]] = OrderedDict()
_encoding = threading.Lock()


def encoded(engine: Engine, prompt: Prompt) -> tuple[tuple[int, ...], str]:
    """A prompt's ids and tail; the last few are remembered. Raises PromptError."""
    key = (id(engine), prompt)
    with _encoding:
        if key not in _encoded:
            ids, tail = prompt.encode(engine)
            _encoded[key] = (tuple(ids), tail)
            while len(_encoded) > 32:
                _encoded.popitem(last=False)
        return _encoded[key]
