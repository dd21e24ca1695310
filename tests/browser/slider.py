"""`make slider`: seconds of a start and milliseconds of a move of the budget's slider in Chromium, by the wall clock."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.browser import driver
from tests.browser.test_values import SEEN, VIEW, budget

MOVES = 24


def main() -> None:
    """Move the slider to and fro on the page Values, and print the times."""
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
            began = time.perf_counter()
            tab.page.goto(server.url)
            tab.page.get_by_text("Starting kvviz").or_(tab.page.locator(".kv-title")).first.wait_for()
            visible = time.perf_counter() - began
            tab.page.locator(".kv-title").wait_for()
            drawn = time.perf_counter() - began
            tab.page.locator(".kv-legend").wait_for(timeout=driver.FIRST_LOAD)
            ready = time.perf_counter() - began
            print(
                f"the server answers after {answers:.1f} s; once it is opened, the page is visible after {visible:.1f} s,"
            )
            print(f"its controls after {drawn:.1f} s, and the model is ready after {ready:.1f} s")
            times = moves(tab.open("/values" + VIEW).read())
        browser.close()
    for what, which in (("points on their new side", 0), ("the server's answer, with arrows and numbers", 1)):
        taken = sorted(round(move[which]) for move in times)
        low, middle, high = statistics.quantiles(taken, n=4)
        print(f"from the key to {what}: median {middle:.0f} ms, quartiles {low:.0f} to {high:.0f} ms")
        print(f"{sum(t <= 250 for t in taken)} of {len(taken)} moves within 250 ms: {taken}")


def moves(tab: driver.Tab) -> list[tuple[float, float]]:
    """Milliseconds to both for each move, two warm-ups apart."""
    page, times = tab.page, []
    page.locator(".st-key-plane .js-plotly-plot").wait_for()
    budget(tab).focus()
    for number in range(MOVES + 2):
        page.evaluate(SEEN)
        page.keyboard.press("ArrowLeft" if number // 8 % 2 == 0 else "ArrowRight")
        page.wait_for_function("window.answer !== null")
        times.append(page.evaluate("[window.seen[0], window.answer[0]]"))
        tab.settle()
        page.wait_for_timeout(500)
    return times[2:]


if __name__ == "__main__":
    main()
