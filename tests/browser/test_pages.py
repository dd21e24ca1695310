"""Every page opens on real data, at a desk and on a phone, in light and dark; the pictures are kept in screenshots/."""

from __future__ import annotations

import pytest

from tests.browser import driver

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow]

PICTURES = driver.ROOT / "screenshots"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_at_every_size(open_tab, scheme):
    tab = open_tab(scheme=scheme).open("/?tokens=32")
    tab.run()
    PICTURES.mkdir(exist_ok=True)
    for title, path in driver.PATHS.items():
        if not (driver.ROOT / "pages" / f"{path or 'compare'}.py").exists():
            continue
        tab.go(title).read()
        assert tab.raised() == []
        for size, (width, height) in driver.SIZES.items():
            tab.page.set_viewport_size({"width": width, "height": height})
            tab.page.wait_for_timeout(1500)
            assert tab.fits(), f"{title} is wider than the {size}"
            tab.page.screenshot(path=PICTURES / f"{path or 'compare'}-{scheme}-{size}.png")
        tab.page.set_viewport_size(dict(zip(("width", "height"), driver.SIZES["desktop"], strict=True)))
