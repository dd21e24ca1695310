"""Histories in a real browser: look at a run again, pin one, export it and open it in another session."""

from __future__ import annotations

import pytest

from tests.browser import driver

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow]

SHORT = "/?preset=code&policies=sink&policies=keydiff&tokens=8&budget="


def choose(tab: driver.Tab, label: str, option: str) -> None:
    """Choose in a box of the popover Runs."""
    tab.page.get_by_test_id("stPopoverBody").get_by_role("combobox", name=label).click()
    tab.page.get_by_role("option").filter(has_text=option).first.click()
    tab.settle()


def test_pin_compare_export_and_open(open_tab, tmp_path):
    tab = open_tab().open(SHORT + "64").run()
    tab.press("Runs")
    choose(tab, "Pinned beside it", "1: ")
    tab.page.keyboard.press("Escape")
    tab.page.locator("[class*='st-key-stop']").get_by_text("128", exact=True).click()
    tab.settle().press("Run")
    tab.page.get_by_test_id("kv-pinned").wait_for(timeout=driver.RUN)
    tab.settle()
    table = tab.page.get_by_test_id("kv-pinned").inner_text()
    assert "run 1" in table and "run 2" in table and "KeyDiff" in table
    tab.press("Export")
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="JSON").click()
    file = tmp_path / "mine.json"
    file.write_bytes(download.value.path().read_bytes())

    other = open_tab().open("/")
    other.press("Runs")
    other.page.get_by_test_id("stFileUploaderDropzoneInput").set_input_files(file)
    other.finish()
    assert "opened from the file mine.json" in other.page.get_by_test_id("stMain").inner_text()
    assert other.cards()["keydiff"] == tab.cards()["keydiff"]
    bad = {
        "name": "bad.json",
        "mimeType": "application/json",
        "buffer": b'{"version": 1, "config": {}, "rows": ["<script>"]}',
    }
    other.page.get_by_test_id("stFileUploaderDropzoneInput").set_input_files(bad)
    other.page.get_by_text("Row 0 of the file is not a row of a run.").wait_for()
