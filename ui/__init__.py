"""The Streamlit code that pages share. A page is: experiment = ui.experiment(); state = ui.prompt_state(experiment); draw."""

from ui.frame import chart, head_picker, header, is_dark, policy_picker
from ui.host import engine_for, host, session_id
from ui.jobs import history, prompt_state
from ui.pages import experiment, frame

__all__ = [
    "chart",
    "engine_for",
    "experiment",
    "frame",
    "head_picker",
    "header",
    "history",
    "host",
    "is_dark",
    "policy_picker",
    "prompt_state",
    "session_id",
]
