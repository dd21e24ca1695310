"""Long generation in a real browser: text streams, figures follow, Cancel ends it, and a short run shows its numbers."""

from __future__ import annotations

import pytest

from tests.browser import driver

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow]


def test_cancel_and_then_a_short_run(open_tab):
    tab = open_tab().open("/long?preset=harbour&budget=64&length=400&every=16")
    page = tab.page
    tab.press("Run")
    page.locator(".kv-card[data-policy=capkv] .kv-text", has_text="a").wait_for(timeout=driver.RUN)
    page.get_by_text("What each policy holds").wait_for(timeout=driver.RUN)
    tab.press("Cancel")
    page.get_by_text("Cancelled.").wait_for()
    page.get_by_role("spinbutton", name="New tokens").fill("24")
    page.get_by_role("spinbutton", name="New tokens").press("Enter")
    tab.settle()
    tab.press("Run")
    page.get_by_test_id("kv-long").wait_for(timeout=driver.RUN)
    tab.settle()
    assert page.locator(".js-plotly-plot").count() == 3
    assert "length=24" in page.url and "every=16" in page.url
    assert tab.fits()
