"""The text of the page Tokens as one piece of HTML, its legend, the facts about one token, and the clicks and arrow keys on it.

Every token is escaped. The text stands in a box that scrolls. A small component of our own, which shows nothing, tells the page
which token was clicked or reached with the arrow keys, and keeps the chosen one in view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np
import streamlit as st

from kvviz.analysis.tokens import Shares, find
from ui.controls import put_into_link, shows, start_from_link
from ui.html import both

LEVELS = 16
"""Steps of shading."""

CLASSES = [f"{kind}{n}" for kind in "kmf" for n in range(kind != "k", LEVELS + 1)]
"""k0 ... k16: kept by so many; m1 ... m16: by more heads under the first policy; f1 ... f16: by fewer."""

GONE = 128
"""Added to a class: kept by no head."""

LINED = 4
"""From this step of difference on, tokens are underlined, too."""

STRONGEST = 62
"""Percent of the policy's colour behind a token that all heads keep; the text stays readable on it."""

MORE, FEWER = "light-dark(#542788, #b2abd2)", "light-dark(#b35806, #fdb863)"
"""PuOr's two sides: the first policy keeps it in more heads, or in fewer."""

_listener = st.components.v2.component("kvviz_tokens", js=(Path(__file__).parent / "tokens.js").read_text())


def listen(token: int, on_pick: Callable[[], None]) -> None:
    """Hear clicks and arrow keys on the text; `picked()` inside `on_pick` is the token."""
    _listener(key="strip_clicks", data={"token": token}, on_token_change=on_pick)


def picked() -> int | None:
    """The token that was clicked, in the callback."""
    found = st.session_state.strip_clicks.token
    return found if isinstance(found, int) else None


def picker(texts: list[str]) -> int:
    """Choose a token by number, by its text, step by step; a click on the text does the same."""
    count = len(texts)
    here = start_from_link("token", range(count), count // 2)
    left, middle, right = st.columns([2, 3, 4], vertical_alignment="bottom")
    token = left.number_input(
        "Token",
        0,
        count - 1,
        **shows("token", here),
        help="Position in the prompt, counted from 0. A click on the text chooses, too; so do the arrow keys on it.",
    )
    wanted = middle.text_input(
        "Find",
        key="find",
        on_change=_seek,
        args=(texts, False),
        help="Goes to the next place in the prompt where it stands.",
    )
    found = find(texts, wanted) if wanted else []
    with right.container(horizontal=True, gap="small", key="token_steps"):
        st.button(
            f"Next of {len(found):,}" if wanted else "Next match",
            key="find_next",
            disabled=not found,
            on_click=_seek,
            args=(texts, True),
            help="The next place where the text stands." if found or not wanted else "It does not stand in the prompt.",
        )
        for by, way in ((-1, "left"), (1, "right")):
            st.button(
                "",
                icon=f":material/keyboard_arrow_{way}:",
                key=f"token_{way}",
                on_click=_step,
                args=(by, count),
                shortcut=f"Shift+{way.capitalize()}",
                help=f"{'Next' if by > 0 else 'Previous'} token (Shift and the arrow key)",
            )
    put_into_link("token", token)
    return token


def _step(by: int, count: int) -> None:
    st.session_state._token = (st.session_state._token + by) % count


def _seek(texts: list[str], after: bool) -> None:
    """Go to the next place where the wanted text stands (or stay, if it stands here)."""
    found, here = find(texts, st.session_state.find), st.session_state._token
    if found:
        st.session_state._token = next((i for i in found if i > here - (not after)), found[0])


def strip(texts: Sequence[str], first: Shares, second: Shares | None = None, token: int | None = None) -> str:
    """The text, every token shaded by the share of heads that keep it, or by the difference of two policies.

    Struck through: no head keeps it (of either policy). In a comparison a solid line under a token says that the first policy
    keeps it in clearly more heads, a dotted one that the second does.
    """
    notes, parts = _notes(first, second), []
    for index, (text, code, note) in enumerate(zip(texts, codes(first, second).tolist(), notes, strict=True)):
        tag = "del" if code & GONE else "span"
        more = " kv-gone" * bool(code & GONE) + " kv-space" * text.isspace() + " kv-chosen" * (index == token)
        parts.append(f'<{tag} class="{CLASSES[code % GONE]}{more}" title="{index}: {note}">{shown(text)}</{tag}>')
    about = f"The prompt, {len(texts):,} tokens. Left and right arrow keys choose a token."
    style = f"--kv-c:{both(first.policy)}"
    return (
        f'<div class="kv-strip" role="group" tabindex="0" aria-label="{about}" style="{style}">{"".join(parts)}</div>'
    )


def shown(text: str) -> str:
    """A token as it stands in the text: escaped, with line breaks and tabs that can be seen and clicked."""
    return escape(text).replace("\r", "␍").replace("\n", "↵\n").replace("\t", "⇥\t") or "∅"


def codes(first: Shares, second: Shares | None = None) -> np.ndarray:
    """How each token is shown, [N] uint8: the place of its class in `CLASSES`, and GONE where no head keeps it."""
    if second is None:
        level, gone = np.ceil(LEVELS * first.shares), first.counts == 0
    else:
        gap = first.shares - second.shares
        level = np.ceil(LEVELS * np.abs(gap) - 1e-6)
        level += np.where(level > 0, np.where(gap > 0, LEVELS, 2 * LEVELS), 0)
        gone = (first.counts == 0) & (second.counts == 0)
    return (level + GONE * gone).astype(np.uint8)


def _notes(first: Shares, second: Shares | None) -> list[str]:
    """What pointing at a token says: how many heads keep it."""
    if second is None:
        return [f"{n} of {first.heads} heads" for n in first.counts.tolist()]
    return [
        f"{a} and {b} of {first.heads} heads"
        for a, b in zip(first.counts.tolist(), second.counts.tolist(), strict=True)
    ]


def styles() -> str:
    """Classes of the text, for light and dark."""
    rules = [
        ".st-key-strip { border: 1px solid color-mix(in srgb, currentColor 14%, transparent); border-radius: 8px;"
        " padding: .8rem 1rem; overflow-y: auto; scrollbar-gutter: stable }",
        ".kv-strip { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace; font-size: .84rem;"
        " line-height: 1.75; white-space: pre-wrap; overflow-wrap: anywhere; outline-offset: 6px }",
        ".kv-strip > * { border-radius: 2px; padding: 1px 0; cursor: pointer; text-underline-offset: 4px }",
        ".kv-strip > :hover { outline: 1px solid currentColor }",
        ".kv-strip > .kv-chosen { outline: 2px solid currentColor; outline-offset: 1px; font-weight: 700 }",
        ".kv-strip del { text-decoration: none }",
        ".kv-strip .kv-gone, .kv-key del { text-decoration: line-through; text-decoration-thickness: 1px; opacity: .62 }",
        ".kv-strip .kv-gone.kv-space { text-decoration: none; opacity: .4 }",
        ".kv-key { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; font-size: .84rem; align-items: center }",
        ".kv-key > span > :first-child { padding: 1px .45em; margin-right: .4em; border-radius: 2px;"
        " font-family: ui-monospace, Menlo, Consolas, monospace }",
        ".kv-ramp { display: inline-block; width: 7rem; height: .8rem; vertical-align: -.1rem }",
        ".kv-why { width: 100% } .kv-why th { font-weight: 600; text-align: left; font-size: .8rem; opacity: .75; border: 0 }",
        ".kv-why th:not(:first-child), .kv-why td:not(:first-child) { text-align: right; font-variant-numeric: tabular-nums;"
        " white-space: nowrap; padding-left: .8rem }",
        ".kv-quote { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 1.05rem; font-weight: 600;"
        " white-space: pre-wrap; overflow-wrap: anywhere }",
        ".kv-context { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .84rem; opacity: .8;"
        " white-space: pre-wrap; overflow-wrap: anywhere }",
    ]
    for level in range(1, LEVELS + 1):
        share = round(STRONGEST * level / LEVELS)
        rules.append(f".k{level} {{ background: color-mix(in srgb, var(--kv-c) {share}%, transparent) }}")
        line = "text-decoration: underline; text-decoration-thickness: 2px;" if level >= LINED else ""
        dots = "text-decoration: underline dotted; text-decoration-thickness: 2px;" if level >= LINED else ""
        rules.append(f".m{level} {{ background: color-mix(in srgb, {MORE} {share}%, transparent); {line} }}")
        rules.append(f".f{level} {{ background: color-mix(in srgb, {FEWER} {share}%, transparent); {dots} }}")
    return f"<style>{' '.join(rules)}</style>"


def legend(first: Shares, second: Shares | None) -> str:
    """What shading, strokes and lines mean, with the numbers of this prompt."""
    n, heads = len(first.counts), first.heads
    if second is None:
        full = f"color-mix(in srgb, {both(first.policy)} {STRONGEST}%, transparent)"
        ramp = f"background:linear-gradient(to right, transparent, {full})"
        none, every = int((first.counts == 0).sum()), int((first.counts == heads).sum())
        return _key(
            f'<i class="kv-ramp" style="{ramp}"></i>kept by 0 to {heads:,} heads (all layers)',
            f"<del>text</del>kept by no head: {none:,} of {n:,} tokens",
            f"kept by every head: {every:,} tokens",
        )
    gap = first.counts - second.counts
    none = int(((first.counts == 0) & (second.counts == 0)).sum())
    return _key(
        f'<span class="m10">text</span>{escape(first.label)} keeps it in more heads: {int((gap > 0).sum()):,} tokens',
        f'<span class="f10">text</span>{escape(second.label)} does: {int((gap < 0).sum()):,} tokens',
        f"<del>text</del>kept by no head of either: {none:,} tokens",
        f"underlined from {(LINED - 1) / LEVELS:.0%} of the heads on",
    )


def _key(*entries: str) -> str:
    return f'<div class="kv-key">{"".join(f"<span>{entry}</span>" for entry in entries)}</div>'


def quote(texts: Sequence[str], token: int, around: int = 8) -> str:
    """The chosen token with a few words around it."""
    before, after = "".join(texts[max(0, token - around) : token]), "".join(texts[token + 1 : token + 1 + around])
    line = lambda text: escape(text.replace("\n", "↵"))  # noqa: E731
    mark = f'<span class="kv-quote">{line(texts[token]) or "∅"}</span>'
    return f'<div class="kv-context">{line(before)}{mark}{line(after)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Facts in columns; everything is escaped."""
    cells = lambda tag, row: "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)  # noqa: E731
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = f"<thead><tr>{cells('th', head)}</tr></thead>"
    return f'<table class="kv-facts kv-why" data-testid="kv-why">{top}<tbody>{body}</tbody></table>'
