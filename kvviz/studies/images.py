"""Figures as PNG files, drawn by a browser through Playwright; it is a tool for the documentation, not part of the app."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvviz.studies import STUDIES, StudyError, StudyResult

CHROMIUM = Path("/usr/bin/chromium")
WIDTH = 1100


def images(results: Sequence[StudyResult], folder: Path) -> list[Path]:
    """Draw every result's figure as `results-NAME.png`.

    Raises:
        StudyError: Playwright or a browser is missing.
    """
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        raise StudyError(
            "Images need Playwright: pip install -r requirements-dev.txt, or leave --images out."
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    path = {"executable_path": str(CHROMIUM)} if CHROMIUM.exists() else {}
    made = []
    with sync_playwright() as play:
        try:
            browser = play.chromium.launch(args=["--no-sandbox", "--disable-gpu"], **path)
        except Error as error:
            raise StudyError("Images need a browser: playwright install chromium, or leave --images out.") from error
        page = browser.new_page(viewport={"width": WIDTH + 20, "height": 900}, device_scale_factor=1.5)
        for result in results:
            figure = STUDIES[result.study].figure(result).update_layout(width=WIDTH, paper_bgcolor="white")
            page.set_content(figure.to_html(include_plotlyjs=True, config={"staticPlot": True}))
            page.wait_for_selector(".main-svg")
            made.append(folder / f"results-{result.study}.png")
            page.locator(".plotly-graph-div").screenshot(path=str(made[-1]))
        browser.close()
    return made
