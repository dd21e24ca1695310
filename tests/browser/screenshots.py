"""`make screenshots`: the README's pictures, from the real dashboard on the default model, into docs/images/."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.browser import driver

OUT = driver.ROOT / "docs" / "images"

VIEW = "/?policies=keydiff&policies=snapkv&policies=capkv&policies=momentkv&tokens=32&policy=2&layer=12&head=4"
"""The needle, which not every policy keeps."""


def long_run(tab: driver.Tab) -> None:
    """Long generation with its figures."""
    tab.press("Run")
    tab.page.get_by_test_id("kv-long").wait_for(timeout=driver.RUN)
    tab.settle()


def study(tab: driver.Tab) -> None:
    """A study with what came out."""
    tab.page.locator(".st-key-card_capacity_kept summary").click()
    tab.page.locator(".st-key-run_capacity_kept button").first.click()
    tab.page.locator(".st-key-figure_capacity_kept_0 .js-plotly-plot").wait_for(timeout=driver.RUN)
    tab.settle().page.locator(".st-key-card_capacity_kept summary").scroll_into_view_if_needed()


SHOWN = {"long": long_run, "studies": study}
"""Pages that are pictured with something done on them."""


def main() -> None:
    """Run once in each theme, and take a picture of every page."""
    OUT.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        sync_playwright() as playwright,
        driver.serving(Path(folder)) as server,
    ):
        browser = driver.chromium(playwright)
        if browser is None:
            sys.exit(driver.HOW)
        for scheme in ("light", "dark"):
            with driver.tab(browser, server, scheme=scheme) as tab:
                tab.open(VIEW).run()
                for title, path in driver.PATHS.items():
                    if (driver.ROOT / "pages" / f"{path or 'compare'}.py").exists():
                        tab.go(title).read()
                        if path in SHOWN:
                            SHOWN[path](tab)
                        tab.page.wait_for_timeout(2500)
                        tab.page.screenshot(path=OUT / f"{path or 'compare'}-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main()
