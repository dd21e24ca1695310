"""Figures as PNG files, drawn by a browser through Playwright; it is a tool for the documentation, not part of the app."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plotly.offline import get_plotlyjs

from kvviz.studies import STUDIES, StudyError, StudyResult

CHROMIUM = Path("/usr/bin/chromium")
WIDTH = 1100
DRAW = "json => { const f = JSON.parse(json); return Plotly.react('figure', f.data, f.layout, {staticPlot: true}); }"


def images(results: Sequence[StudyResult], folder: Path) -> list[Path]:
    """Draw every result's figure as `results-NAME.png`; of several results of one study the first.

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
        page.set_content(f"<script>{get_plotlyjs()}</script><div id='figure'></div>")
        for result in {each.study: each for each in reversed(results)}.values():
            figure = STUDIES[result.study].figure(result).update_layout(width=WIDTH, paper_bgcolor="white")
            page.evaluate(DRAW, figure.to_json())
            made.append(folder / f"results-{result.study}.png")
            page.locator("#figure .svg-container").screenshot(path=str(made[-1]))
        browser.close()
    return made
