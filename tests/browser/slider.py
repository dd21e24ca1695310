"""`make slider`: seconds of a start, and milliseconds from a move of a slider to each figure, in Chromium on 2,048 tokens.

By the wall clock: from the key to the first change of what is drawn, by the browser itself from what was worked out before, or by
the server's answer where that comes first.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.browser import driver
from tests.browser.test_values import VIEW, budget

MOVES = 16

CHARACTERS = 9_000
"""Of a text, some 2,048 tokens."""

REST, PAUSE = 3000, 300
"""Milliseconds that the hand rests before the first move, and between moves."""

BUDGET, TAU = "budget", "tau"
PLANE = {"points, arrows": ".st-key-plane svg", "angle, numbers": ".st-key-facts"}
TEXT = {"text": ".st-key-strip .kv-strip", "profile": ".st-key-profile svg"}
FIGURES = {
    ("Values", BUDGET): PLANE | {"line": ".st-key-under_strip .kv-here"},
    ("Values", TAU): PLANE | {"error curve": ".st-key-strip svg"},
    ("Heads", BUDGET): {"map": ".st-key-map svg"},
    ("Heads", TAU): {"map": ".st-key-map svg"},
    ("Tokens", BUDGET): TEXT,
    ("Tokens", TAU): TEXT,
    ("Capacity", BUDGET): {"lines": ".st-key-under_all_KU .kv-here"},
    ("Capacity", TAU): {"one head's curves": ".st-key-one_KU svg", "mean curves": ".st-key-all_KU svg"},
}
"""Page and slider -> what follows there, and where it stands."""

WATCH = """figures => {
    window.follow?.disconnect(); window.seen = {};
    const start = performance.now(), element = node => node.nodeType === 1 ? node : node.parentElement;
    const look = ({ target }) => { for (const [name, place] of Object.entries(figures))
        if (element(target)?.closest(place)) window.seen[name] ??= performance.now() - start; };
    window.follow = new MutationObserver(changes => changes.forEach(look));
    window.follow.observe(document.body, { subtree: true, childList: true, attributes: true });
}"""


def main() -> None:
    """Start, load, and move both sliders to and fro on every page that has figures of its own; print the times."""
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        sync_playwright() as playwright,
        driver.serving(Path(folder)) as server,
    ):
        answers = time.perf_counter() - began
        browser = driver.chromium(playwright)
        if browser is None:
            sys.exit(driver.HOW)
        with driver.tab(browser, server) as tab:
            start(tab, answers)
            tab.open("/" + VIEW)
            write(tab)
            for (page, slider), figures in FIGURES.items():
                tab.go(page)
                for figure, times in moves(tab, slider, figures).items():
                    report(f"{page}, {slider}: {figure}", times)
        browser.close()


def start(tab: driver.Tab, answers: float) -> None:
    """What a fresh server's first visitor waits for."""
    began = time.perf_counter()
    tab.page.goto(tab.server.url)
    tab.page.get_by_text("Starting kvviz").or_(tab.page.locator(".kv-title")).first.wait_for()
    visible = time.perf_counter() - began
    tab.page.locator(".kv-title").wait_for()
    drawn = time.perf_counter() - began
    tab.page.locator(".kv-legend").wait_for(timeout=driver.FIRST_LOAD)
    ready = time.perf_counter() - began
    print(f"the server answers after {answers:.1f} s; once it is opened, the page is visible after {visible:.1f} s,")
    print(f"its controls after {drawn:.1f} s, and the model is ready after {ready:.1f} s")


def write(tab: driver.Tab) -> None:
    """Make a text of some 2,048 tokens the prompt, and say how many it has."""
    page, text = tab.page, (Path(__file__).parents[1] / "texts" / "gpl-3.txt").read_bytes()[:CHARACTERS]
    page.get_by_role("button", name="Edit").click()
    page.get_by_test_id("stFileUploaderDropzoneInput").set_input_files(
        {"name": "long.txt", "mimeType": "text/plain", "buffer": text}
    )
    expect(page.get_by_role("textbox", name="Text", exact=True)).to_have_value(text.decode())
    tab.settle()
    page.get_by_role("button", name="Use this text").click()
    page.get_by_test_id("kv-words").filter(has_text="A text of your own").wait_for(timeout=driver.RUN)
    tab.settle().go("Values").read()
    print(tab.words())


def moves(tab: driver.Tab, slider: str, figures: dict[str, str]) -> dict[str, list[float]]:
    """Milliseconds to each figure's first change, move by move."""
    page, times = tab.page, {name: [] for name in figures}
    if slider == TAU:
        page.locator(".st-key-options_capkv").get_by_role("button").first.click()
    handle = page.get_by_role("slider", name="Tau") if slider == TAU else budget(tab)
    handle.wait_for()
    page.wait_for_timeout(REST)
    handle.focus()
    for number in range(MOVES):
        tab.settle()
        page.wait_for_timeout(PAUSE)
        page.evaluate(WATCH, figures)
        page.keyboard.press("ArrowLeft" if number // 4 % 2 == 0 else "ArrowRight")
        page.wait_for_function("many => Object.keys(window.seen).length === many", arg=len(figures))
        for name, taken in page.evaluate("window.seen").items():
            times[name].append(taken)
    if slider == TAU:
        page.keyboard.press("Escape")
    return times


def report(what: str, times: list[float]) -> None:
    """A line for each figure."""
    taken = sorted(map(round, times))
    within = sum(t <= 200 for t in taken)
    print(
        f"{what:38} median {statistics.median(taken):4.0f} ms, {within} of {len(taken)} within 200 ms: {taken}",
        flush=True,
    )


if __name__ == "__main__":
    main()
