"""The glossary at the head of every page: a button that opens a list which can be searched."""

from __future__ import annotations

import re
from html import escape

import streamlit as st

from kvviz.glossary import Term, find


def glossary() -> None:
    """A popover with every term."""
    with st.popover(
        "Glossary",
        icon=":material/dictionary:",
        type="tertiary",
        key="glossary",
        help="Terms and symbols",
        on_change="rerun",
    ) as place:
        if not place.open:
            return
        wanted = st.text_input(
            "Find a term or symbol",
            key="term",
            placeholder="attention lost",
            help="Part of a name, a symbol or a meaning.",
        )
        found = find(wanted or "")
        st.html(listing(found) if found else '<p class="kv-small">Nothing of that name is used here.</p>')


def listing(terms: dict[str, Term]) -> str:
    """The terms as a list."""
    rows = "".join(
        f"<dt>{escape(name)} <span>{symbols(term.symbol)}</span></dt><dd>{symbols(term.text)}</dd>"
        for name, term in terms.items()
    )
    return f'{STYLE}<dl class="kv-terms" data-testid="kv-terms">{rows}</dl>'


def symbols(text: str) -> str:
    """Escaped, with w_E and the like set below the line."""
    return re.sub(r"(\w\u0302?)_(\w)\b", r"\1<sub>\2</sub>", escape(text, quote=False))


STYLE = """<style>
.kv-terms { max-height: 60vh; overflow-y: auto; margin: 0; width: min(30rem, 78vw); font-size: .9rem; line-height: 1.45 }
.kv-terms dt { font-weight: 600; margin-top: .55rem } .kv-terms dt span { font-weight: 400; opacity: .7; margin-left: .4rem }
.kv-terms dd { margin: 0 }
</style>"""
