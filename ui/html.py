"""Small pieces of HTML for st.html. Whatever comes from a prompt, a model or a link goes through `escape`, or `plain` where
Streamlit reads Markdown."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable
from html import escape

from kvviz.experiment import Experiment
from kvviz.figures.style import Line, colour
from kvviz.memory import Memory, words
from kvviz.models import Loaded
from kvviz.policies import Scorer

PAPERS = "https://arxiv.org/abs/"


def plain(text: str) -> str:
    """Text from elsewhere, for a place that reads Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|$~:&-])", r"\\\1", text)


def picture(svg: str, alt: str, height: int) -> str:
    """A drawing of our own, which must be SVG without anything from elsewhere in it."""
    source = b64encode(svg.encode()).decode()
    return f'<img class="kv-picture" alt="{escape(alt)}" src="data:image/svg+xml;base64,{source}" style="height:{height}px">'


def line_over(line: Line) -> str:
    """A vertical line over the figure that follows; ui/scrub.js moves it along its axis, and lets it be dragged."""
    left = f"calc({line.left:g}px + (100% - {line.left + line.right:g}px) * var(--at))"
    axis = f'data-low="{line.low:.6g}" data-high="{line.high:.6g}" data-log="{int(line.log)}"'
    axis += f' data-left="{line.left:g}" data-right="{line.right:g}"'
    place = f"--at:{line.at:.5f};left:{left};top:{line.top:g}px;height:{line.height:g}px"
    return f'<i class="kv-here" {axis} style="{place}"></i>'


def on_phones(key: str, height: int) -> str:
    """A container's height in pixels where the screen is narrow; what would be below is blank."""
    return (
        f"<style>@media (max-width: 640px) {{ .st-key-{key} {{ max-height: {height}px; overflow: hidden }} }}</style>"
    )


def both(policy: str) -> str:
    """A policy's colour as CSS that follows the theme."""
    return f"light-dark({colour(policy)}, {colour(policy, dark=True)})"


def model_facts(loaded: Loaded) -> str:
    """Where the model runs and how large it is: "cpu, fp32, 135 M, 8,192 positions"."""
    dtype = str(loaded.dtype).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")
    size = loaded.parameters / 1e6
    count = f"{size / 1000:.3g} B" if size >= 1000 else f"{size:.3g} M"
    return f'<div class="kv-small">{escape(str(loaded.device))}, {dtype}, {count}, {loaded.positions:,} positions</div>'


def memory_bar(memory: Memory, made: Experiment) -> str:
    """Weights | KV before | KV kept | free, as a thin bar with its numbers."""
    if not made.n_tokens or made.shape is None:
        before = kept = 0
    else:
        before = made.shape.bytes(made.n_tokens)
        kept = made.shape.bytes(min(made.budget, made.n_tokens))
    parts = [("weights", memory.weights), ("KV before", before), ("KV kept", kept), ("free", memory.free)]
    bar = "".join(
        f'<span class="kv-{name.replace(" ", "-").lower()}" style="flex-grow:{max(size, 1)}"></span>'
        for name, size in parts
    )
    facts = "".join(
        f'<span><i class="kv-{name.replace(" ", "-").lower()}"></i>{name} {words(size)}</span>' for name, size in parts
    )
    alt = ", ".join(f"{name} {words(size)}" for name, size in parts)
    return f'<div class="kv-bar" role="img" aria-label="Memory: {alt}">{bar}</div><div class="kv-legend">{facts}</div>'


def queue(length: int, place: int | None, doing: str = "") -> str:
    """Jobs of all sessions, and where mine stands."""
    jobs = "Nobody is waiting" if not length else f"{length} job{'s' * (length > 1)} in the queue"
    mine = "" if place is None else ", mine runs" if place == 0 else f", {place} before mine"
    what = f'<div class="kv-small kv-clip">{escape(doing)}</div>' if doing else ""
    return f'<div class="kv-small">{jobs}{mine}</div>{what}'


def prompt_facts(made: Experiment, shows: str) -> str:
    """What the preset shows, and how much of the model's positions the prompt takes."""
    limit = f" of {made.shape.positions:,}" if made.shape else ""
    tokens = f"{made.n_tokens:,}{limit} tokens" if made.n_tokens else f"{len(made.prompt.context):,} characters"
    form = "" if made.prompt.chat else ", plain text"
    over = " kv-over" if made.shape and made.n_tokens > made.shape.positions else ""
    return f'<div class="kv-small">{escape(shows)}</div><div class="kv-small{over}">{tokens}{form}</div>'


def pill_colours(names: Iterable[str]) -> str:
    """Style that gives each pill of the policies its colour: a dot before its name, and its ground once chosen."""
    rules = []
    for number, name in enumerate(names, start=1):
        pill = f".st-key-chosen button:nth-of-type({number})"
        rules.append(f"{pill}{{--kv-c:{both(name)}}}")
    return f"<style>{''.join(rules)}</style>"


def method(scorer: type[Scorer]) -> str:
    """What a method keeps, and where it was published."""
    paper = scorer.paper
    if paper and "/" not in paper:
        paper = f' <a href="{PAPERS}{escape(paper)}" target="_blank" rel="noopener">arXiv:{escape(paper)}</a>'
    dot = f'<span class="kv-dot" style="--kv-c:{both(scorer.name)}"></span>'
    return f'<div class="kv-small">{dot}{escape(scorer.summary)}{paper}</div>'


def heading(title: str, line: str) -> str:
    """A page's title and the experiment in words."""
    return f'<h1 class="kv-title">{escape(title)}</h1><p class="kv-words" data-testid="kv-words">{escape(line)}</p>'
