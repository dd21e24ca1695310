"""The page Studies in a real browser: a study runs with its bar, is drawn, judged and taken along; another is cancelled."""

from __future__ import annotations

import pytest

from kvviz.studies import STUDIES, StudyResult
from tests.browser import driver

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow]


def card(tab: driver.Tab, name: str):
    """The study's card, open."""
    found = tab.page.locator(f".st-key-card_{name}")
    button = found.locator(f".st-key-run_{name} button").first
    if not button.is_visible():
        found.locator("summary").first.click()
    button.wait_for(state="visible")
    return found


def change(tab: driver.Tab, name: str, **settings: str) -> None:
    """Open the settings, write, and close them."""
    button = tab.page.locator(f".st-key-settings_{name} button").first
    button.click()
    for key, value in settings.items():
        box = tab.page.locator(f".st-key-{name}_{key} input")
        box.fill(value)
        box.press("Enter")
        tab.settle()
    tab.page.keyboard.press("Escape")
    tab.settle()


def test_a_study_is_run_drawn_and_taken_along(open_tab):
    tab = open_tab().open("/studies")
    mine = card(tab, "capacity_kept")
    change(tab, "capacity_kept", tokens="320")
    mine.locator(".st-key-run_capacity_kept button").first.click()
    mine.get_by_text("Here:").wait_for(timeout=driver.RUN)
    mine.locator(".js-plotly-plot").nth(2).wait_for()
    words = mine.inner_text()
    assert STUDIES["capacity_kept"].paper in words and "--set tokens=320" in words
    with tab.page.expect_download() as download:
        mine.get_by_role("button", name="JSON").click()
    result = StudyResult.from_json(download.value.path().read_text(encoding="utf-8"))
    assert result.config["settings"]["tokens"] == 320 and result.rows
    assert STUDIES["capacity_kept"].finding(result) in words
    tab.page.set_viewport_size(dict(zip(("width", "height"), driver.SIZES["phone"], strict=True)))
    tab.page.wait_for_timeout(1500)
    assert tab.fits() and tab.raised() == []


def test_a_study_can_be_cancelled(open_tab):
    tab = open_tab().open("/studies")
    mine = card(tab, "capacity_quality")
    mine.locator(".st-key-run_capacity_quality button").first.click()
    mine.locator(".st-key-cancel_capacity_quality button").first.click()
    mine.get_by_text("Cancelled.").wait_for(timeout=driver.RUN)
    assert mine.locator(".st-key-run_capacity_quality button").first.is_enabled()
