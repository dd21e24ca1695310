"""One server and one browser for all browser tests; without a browser they are skipped, with the way to get one."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest

sync_api = pytest.importorskip("playwright.sync_api")

from tests.browser import driver  # noqa: E402


@pytest.fixture(scope="session")
def browser():
    """Chromium, headless."""
    with sync_api.sync_playwright() as playwright:
        made = driver.chromium(playwright)
        if made is None:
            if os.environ.get("KVVIZ_REQUIRE_BROWSER"):
                pytest.fail(driver.HOW)
            pytest.skip(driver.HOW)
        yield made
        made.close()


@pytest.fixture(scope="session")
def server(browser, tmp_path_factory):
    """The dashboard with the default model. At the end its log must hold no complaint of ours."""
    with driver.serving(tmp_path_factory.mktemp("server")) as running:
        yield running
        assert running.complaints() == []


@pytest.fixture
def open_tab(browser, server):
    """Opens sessions; at the end none may have met an error."""
    with ExitStack() as stack:
        tabs = []

        def make(**options) -> driver.Tab:
            tabs.append(stack.enter_context(driver.tab(browser, server, **options)))
            return tabs[-1]

        yield make
        for tab in tabs:
            assert tab.errors == [] and tab.raised() == []
