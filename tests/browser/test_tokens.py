"""Tokens in a real browser: a click and the arrow keys choose, the box scrolls to what is chosen, the link holds it."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow]


def chosen(tab) -> str:
    return tab.page.locator(".kv-strip > .kv-chosen").get_attribute("title").split(":")[0]


def test_a_token_is_chosen_by_click_key_and_search(open_tab):
    tab = open_tab().open("/tokens?token=5&preset=harbour").read()
    page = tab.page
    assert chosen(tab) == "5"
    page.locator(".kv-strip > *").nth(12).click()
    page.locator("h2", has_text="Why token 12").wait_for()
    assert "token=12" in page.url
    for token in (13, 14):
        tab.settle()
        page.keyboard.press("ArrowRight")
        page.locator("h2", has_text=f"Why token {token}").wait_for()
    for _ in range(5):  # faster than the answers
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(60)
    page.locator("h2", has_text="Why token 19").wait_for()
    page.get_by_role("textbox", name="Find").fill("Falcon")
    page.get_by_role("textbox", name="Find").press("Enter")
    page.locator(".kv-strip > .kv-chosen", has_text="Fal").wait_for()
    tab.settle()
    box, token = page.locator(".st-key-strip").bounding_box(), page.locator(".kv-strip > .kv-chosen").bounding_box()
    assert box["y"] <= token["y"] <= box["y"] + box["height"]
    other = open_tab().open(page.url.removeprefix(tab.server.url)).read()
    assert chosen(other) == chosen(tab)


def test_two_policies_differ_in_shape_and_colour(open_tab):
    tab = open_tab().open("/tokens?preset=harbour").read()
    assert tab.page.locator(".kv-strip del").count() > 0
    tab.page.get_by_role("combobox", name="Compared with").click()
    tab.page.get_by_role("option", name="MomentKV").click()
    tab.page.locator(".kv-key", has_text="MomentKV does").wait_for()
    assert tab.page.locator(".kv-strip [class^=m]").count() and tab.page.locator(".kv-strip [class^=f]").count()


SHADES = "() => [...document.querySelector('.kv-strip').children].map(t => t.className.replace(' kv-space', ''))"

SHADE = f"""() => {{ const before = ({SHADES})().join();
    const told = document.querySelector('.kv-strip'), start = performance.now();
    window.seen = null; window.answer = null;
    const look = () => {{ const strip = document.querySelector('.kv-strip');
        const now = () => [performance.now() - start, ({SHADES})()];
        if (!window.seen && strip === told && ({SHADES})().join() !== before) window.seen = now();
        !strip || strip === told ? setTimeout(look, 1) : (window.answer = now()); }};
    look(); }}"""
"""Watch a move: milliseconds and classes of the tokens, first as the browser changes them, then with the server's text."""


@pytest.mark.parametrize("minus", ["", "&minus=1"])
def test_shades_follow_the_slider_before_the_answer(open_tab, minus):
    tab = open_tab().open("/tokens?preset=harbour&policies=capkv&policies=keydiff" + minus).read()
    page, times = tab.page, []
    page.locator("[class*='st-key-budget'] input[type=range]").focus()
    for key in ("ArrowLeft", "ArrowLeft", "ArrowRight"):
        tab.settle()
        page.evaluate(SHADE)
        page.keyboard.press(key)
        page.wait_for_function("window.answer !== null")
        (seen, drawn), (answer, wanted) = page.evaluate("[window.seen, window.answer]")
        assert [set(a.split()) for a in drawn] == [set(b.split()) for b in wanted] and seen < answer
        times.append((round(seen), round(answer)))
    print("ms from the key to the new shades, and to the server's answer:", times)


def compares(tab, label: str) -> bool:
    """Whether a policy comes to stand in the box."""
    box = tab.page.locator(f"[class*='st-key-minus'] input[value='{label}']")
    box.wait_for()
    return tab.settle() and box.count() == 1


def test_what_is_compared_goes_along_and_stands_in_the_link(open_tab):
    """Opened by a link on one page, it is the same on the other, and in the link that this one gives."""
    tab = open_tab().open("/heads?preset=harbour&minus=1&policies=capkv&policies=momentkv&policies=keydiff").read()
    assert compares(tab, "MomentKV")
    tab.go("Tokens")
    assert compares(tab, "MomentKV") and tab.page.locator(".kv-key", has_text="MomentKV does").count()
    tab.page.get_by_role("combobox", name="Compared with").click()
    tab.page.get_by_role("option", name="KeyDiff").click()
    tab.page.locator(".kv-key", has_text="KeyDiff does").wait_for()
    tab.settle().go("Heads")
    assert compares(tab, "KeyDiff")
    tab.page.locator(".st-key-measure").get_by_role("combobox").click()
    tab.page.get_by_role("option", name="Directional gap (cosine)").click()
    tab.settle()
    other = open_tab().open(tab.page.url.removeprefix(tab.server.url)).read()
    assert compares(other, "KeyDiff")
    assert "Directional gap" in other.page.locator(".st-key-measure input").input_value()
