"""kvviz: a dashboard in which a language model forgets. Run it with `make run`."""

import sys
from contextlib import nullcontext

import streamlit as st

first = "ui" not in sys.modules  # since the server was started: PyTorch and transformers take some seconds
with st.spinner("Starting kvviz: loading PyTorch and transformers, a few seconds") if first else nullcontext():
    import ui

with ui.frame() as page:
    page.run()
