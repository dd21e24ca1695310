"""Export: a run as JSON, as CSV, as a command, as a link."""

from __future__ import annotations

import streamlit as st

from kvviz import report
from kvviz.experiment import OWN
from kvviz.presets import PRESETS
from ui.frame import link
from ui.jobs import Record


def export(record: Record | None) -> None:
    """A button that opens the ways to take a run along."""
    with st.popover("Export", icon=":material/download:", disabled=record is None, key="export"):
        if record is None:
            return
        name, experiment = f"kvviz-run-{record.number}", record.experiment
        with st.container(horizontal=True):
            data = report.to_json(record.run, experiment)
            st.download_button(
                "JSON",
                data,
                f"{name}.json",
                "application/json",
                key="json",
                on_click="ignore",
                help="Configuration, text, tokens, KL and costs of every policy.",
            )
            st.download_button(
                "CSV",
                report.to_csv(record.run),
                f"{name}.csv",
                "text/csv",
                key="csv",
                on_click="ignore",
                help="One line for each policy and step.",
            )
            if experiment.preset not in PRESETS:
                st.download_button(
                    "Prompt",
                    experiment.prompt.context,
                    "prompt.txt",
                    "text/plain",
                    key="text",
                    on_click="ignore",
                    help="Your text, which the command below reads.",
                )
        st.caption("The command that repeats this run, from the repository:")
        st.code(report.command(experiment), language="bash", wrap_lines=True)
        st.caption("The link to this view" + (", without your text:" if experiment.preset == OWN else ":"))
        st.code(link(experiment), language=None, wrap_lines=True)
