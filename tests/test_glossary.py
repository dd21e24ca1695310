"""The glossary knows every symbol that the pages show, says each thing once and shortly, and is safe to show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvviz.glossary import TERMS, find
from ui import options
from ui.glossary import listing

ROOT = Path(__file__).parents[1]
SOURCES = [
    *(ROOT / "pages").glob("*.py"),
    *(ROOT / "ui").glob("*.py"),
    *(ROOT / "kvviz" / "figures").glob("*.py"),
    *(ROOT / "kvviz" / "analysis").glob("*.py"),
    ROOT / "kvviz" / "tour.py",
]
KNOWN = " ".join(f"{term.symbol} {name}" for name, term in TERMS.items())

NAMED = """budget, sink, window, recent, head, group, layer, token, KL, K capacity, U capacity, KU capacity, leverage, residual,
share removed, lockstep, moments, score, entry, value norm, oracle, needle, nat, MiB, correction, full cache, first difference,
temperature, rank and cutoff, RoPE, sliding window, w_E, f_R, f_E, γ, log Z_E, τ, α, β, p, c"""
"""What a page calls by its name or its symbol."""


def shown_symbols() -> set[str]:
    """Greek letters and letters with an index in everything that draws."""
    found = set()
    for path in SOURCES:
        text = path.read_text(encoding="utf-8").replace(r"\u0302", "\u0302")
        found |= {f"{a}_{b}" for a, b in re.findall(r"([^\W\d]\u0302?)<sub>(\w)</sub>", text)}
        found |= set(re.findall(r"[α-ωΑ-Ω∠‖]", text))
    return found


def test_every_symbol_that_is_shown_is_explained():
    assert len(shown_symbols()) > 8
    assert [symbol for symbol in sorted(shown_symbols()) if symbol not in KNOWN] == []


def test_every_symbol_of_an_option_is_explained():
    symbols = {symbol for term in TERMS.values() for symbol in re.split(r", | ", term.symbol)}
    assert [symbol for symbol in options.SYMBOLS.values() if symbol not in symbols] == []


@pytest.mark.parametrize("name", [" ".join(name.split()) for name in NAMED.split(",")])
def test_what_pages_name_is_found(name):
    entry = find(name)
    assert entry, f"{name} is not in kvviz/glossary.py"
    first = next(iter(entry))
    assert name.lower() in f"{first} {TERMS[first].symbol}".lower()


def test_terms_are_short_and_plain():
    for name, term in TERMS.items():
        assert 20 < len(term.text) < 260, name
        assert term.text.count(". ") <= 3 and "!" not in term.text and term.text[-1] in ".", name
    assert len({term.text for term in TERMS.values()}) == len(TERMS)


def test_search():
    assert list(find("")) == list(TERMS)
    assert "tau" in find("τ") and "attention lost" in find("W_E") and find("no such thing") == {}
    assert next(iter(find("leverage"))) == "leverage"


def test_the_list_is_escaped():
    html = listing(find("w_E"))
    assert "w<sub>E</sub>" in html and html.count("<dt>") == len(find("w_E"))
    assert "&lt;" in listing({"<b>": TERMS["tau"]})
