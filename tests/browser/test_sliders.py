"""What the browser draws by itself while a slider moves is what the server answers, on every page and for both sliders."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from tests.browser.test_values import VIEW, budget

CATCH = """key => { const plot = document.querySelector(`.st-key-${key} .js-plotly-plot`); 
    const pairs = text => [...text.matchAll(/(-?[\\d.e-]+),(-?[\\d.e-]+)/g)].map(m => [+m[1], +m[2]]);
    const drawn = () => { const found = {};
        for (const trace of plot.querySelectorAll('.scatterlayer .trace')) {
            const points = [...trace.querySelectorAll('path.point')].filter(p => p.style.visibility !== 'hidden');
            found[trace.__data__[0].trace.index] = {
                line: pairs([...trace.querySelectorAll('.js-line')].map(p => p.getAttribute('d')).join('')),
                points: points.flatMap(p => pairs(p.getAttribute('transform')).slice(0, 1)),
                open: points.map(p => getComputedStyle(p).fill === 'none') } }
        const cells = [...plot.querySelectorAll('.kv-scrub rect')].map(r => getComputedStyle(r).fill);
        return { found, cells } };
    const watch = new MutationObserver(() => {
        window.caught[key] = { plot, layout: plot._fullLayout, traces: plot._fullData, ...drawn() };
        watch.disconnect() });
    watch.observe(plot, { attributes: true, attributeFilter: ['data-kv-moved'] }) }"""
"""Keep what a figure shows, in pixels, as soon as the browser has changed it."""

ANSWER = """key => { const before = window.caught[key], plot = document.querySelector(`.st-key-${key} .js-plotly-plot`);
    const axis = name => before.layout[name.replace(/^(.)/, '$1axis')];
    return plot === before.plot || !plot?._fullData?.length ? null : plot._fullData.map((t, i) => ({
        type: t.type, mode: t.mode ?? '', shape: t.line?.shape,
        cells: t.z, scale: before.traces[i].colorscale, low: before.traces[i].zmin, high: before.traces[i].zmax,
        open: Array.isArray(t.marker?.symbol) ? t.marker.symbol.map(s => s.endsWith('-open')) : null,
        at: t.type !== 'scatter' ? [] : t.x.map((x, j) => [axis(t.xaxis).c2p(x), axis(t.yaxis).c2p(t.y[j])]) })) }"""
"""The server's answer, in pixels of the figure before and with its colours."""

FIGURES = {
    ("values", "budget"): ["plane"],
    ("values", "tau"): ["plane", "strip"],
    ("heads", "budget"): ["map"],
    ("heads", "tau"): ["map"],
    ("tokens", "budget"): ["profile", "why_map"],
    ("tokens", "tau"): ["profile", "why_map"],
    ("capacity", "tau"): ["one_K", "all_KU"],
}
"""Figures that change with a slider; the budget moves nothing but lines on Capacity."""

CLOUDS = 3  # the plane's points, which tests/browser/test_values.py looks at, come before its arrows


@pytest.mark.parametrize(("page", "slider"), FIGURES)
def test_the_browser_draws_what_the_server_answers(open_tab, page, slider):
    tab = open_tab().open(f"/{page}{VIEW}&token=690").read()
    if slider == "tau":
        tab.page.locator(".st-key-options_capkv").get_by_role("button").first.click()
    handle = tab.page.get_by_role("slider", name="Tau") if slider == "tau" else budget(tab)
    handle.focus()
    keys = FIGURES[page, slider]
    for _ in range(5):  # a slow machine may not have got so far
        tab.settle()
        tab.page.wait_for_timeout(4000)  # the server works ahead
        tab.settle()
        tab.page.evaluate("window.caught = {}")
        for key in keys:
            tab.page.evaluate(CATCH, key)
        tab.page.keyboard.press("ArrowLeft")
        tab.settle()
        if len(tab.page.evaluate("Object.keys(window.caught)")) == len(keys):
            break
    assert sorted(tab.page.evaluate("Object.keys(window.caught)")) == sorted(keys)
    for key in keys:
        tab.page.wait_for_function(f"key => ({ANSWER})(key) !== null", arg=key)
        drawn = tab.page.evaluate("key => ({ found: window.caught[key].found, cells: window.caught[key].cells })", key)
        assert compare(drawn, tab.page.evaluate(ANSWER, key), key) > 0


def compare(drawn: dict, answer: list[dict], key: str) -> int:
    """How many traces the browser has drawn as the answer has them; fails where it has drawn others."""
    compared = 0
    for index, trace in enumerate(answer):
        there = [place for place in trace["at"] if None not in place]
        own = drawn["found"].get(str(index))
        if trace["cells"] and drawn["cells"]:
            wanted = [colour(trace, value) for row in trace["cells"] for value in row]
            if len(wanted) == len(drawn["cells"]):  # of two maps in a figure one moves
                for cell, rgb in zip(drawn["cells"], wanted, strict=True):
                    assert [float(n) for n in re.findall(r"[\d.]+", cell)[-3:]] == pytest.approx(rgb, abs=0.02)
                compared += 1
        elif own and there and (key != "plane" or index >= CLOUDS):
            marked = "markers" in trace["mode"]
            mine = own["points"] if marked else own["line"][:: 3 if trace["shape"] == "hvh" else 1]
            assert len(mine) == len(there), f"{key}, trace {index}"
            for one, other in zip(mine, there, strict=True):
                assert one == pytest.approx(other, abs=0.6), f"{key}, trace {index}, in pixels"
            if marked and trace["open"]:
                assert own["open"] == trace["open"]
            compared += 1
    return compared


def colour(trace: dict, value: float) -> list[float]:
    """A value's colour on a scale, red, green and blue from 0 to 1."""
    share = min(max((value - trace["low"]) / (trace["high"] - trace["low"]), 0), 1)
    stops = [(at, [int(n) / 255 for n in re.findall(r"\d+", text)]) for at, text in trace["scale"] if "rgb" in text]
    stops = stops or [(at, [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]) for at, text in trace["scale"]]
    (a, low), (b, high) = next(pair for pair in pairwise(stops) if pair[1][0] >= share)
    return [x + (y - x) * (share - a) / (b - a) for x, y in zip(low, high, strict=True)]
