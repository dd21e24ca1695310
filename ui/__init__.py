"""The Streamlit code that pages share. A page is: experiment = ui.experiment(); state = ui.prompt_state(experiment); draw."""

from ui.controls import put_into_link, shows, start_from_link
from ui.frame import chart, head_picker, is_dark, other_picker, policy_picker
from ui.host import engine_for, host, session_id
from ui.jobs import history, prompt_state
from ui.pages import experiment, frame, header
from ui.switch import open_page

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
    "open_page",
    "other_picker",
    "policy_picker",
    "prompt_state",
    "put_into_link",
    "session_id",
    "shows",
    "start_from_link",
]
