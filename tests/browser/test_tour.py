"""The tour in a real browser: every step by keyboard and by links; the way from the first page to why the needle is lost;
and one view that all pages and their links share."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest

from kvviz import tour
from tests.browser import driver

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow]


def step(tab: driver.Tab, number: int) -> driver.Tab:
    """Wait until a step and its figure stand there."""
    tab.page.get_by_test_id("kv-step").filter(has_text=f"{number}. ").wait_for(timeout=driver.RUN)
    figures = ", ".join(f"[data-testid=stMain] .{kind}" for kind in ("js-plotly-plot", "kv-picture", "kv-passage"))
    tab.page.locator(figures).first.wait_for(timeout=driver.RUN)
    return tab.settle()


def test_from_the_first_page_to_why_the_needle_is_lost(open_tab):
    tab = open_tab().open()
    tab.page.get_by_role("button", name="Why does SnapKV lose the needle").click()
    tab.page.locator(".kv-title", has_text="Tour").wait_for()
    assert "step=4" in tab.page.url
    step(tab.settle().read(), 4)
    told = " ".join(tab.page.locator(".kv-told").all_inner_texts())
    assert "none of the 90 heads keeps a digit" in told and "KeyDiff asks nobody" in told
    answer = tab.page.get_by_role("button", name="Let both answer")
    if answer.count():  # another session has read the prompt already, so that this one had nothing to run
        answer.click()
        tab.page.locator(".kv-card[data-policy=keydiff] .kv-text", has_text="60494").wait_for(timeout=driver.RUN)
        tab.settle()
    cards = tab.cards()
    assert "60494" in cards["full"] and "60494" in cards["keydiff"] and "60494" not in cards["snapkv"]
    tab.page.get_by_role("button", name="Open this in Tokens").click()
    tab.page.locator(".kv-title", has_text="Tokens").wait_for()
    tab.settle()
    query = parse_qs(urlsplit(tab.page.url).query)
    assert query["policies"] == ["snapkv", "keydiff"]
    assert tab.page.locator(".kv-strip > .kv-chosen").inner_text() == "6"
    tab.go("Compare")
    assert "60494" in tab.cards()["keydiff"]


def test_all_steps_by_the_keyboard(open_tab):
    tab = open_tab().open("/tour?step=1").read()
    step(tab, 1)
    for number in range(2, len(tour.STEPS) + 1):
        tab.page.keyboard.press("Shift+ArrowRight")
        step(tab, number)
        assert f"step={number}" in tab.page.url and tab.raised() == []
    assert tab.page.get_by_role("button", name="Next").is_disabled()
    tab.page.keyboard.press("Shift+ArrowLeft")
    step(tab, 7)
    toggle = tab.page.get_by_role("switch", name="Correct with the statistics")
    for _ in range(60):
        if toggle.evaluate("node => node === document.activeElement"):
            break
        tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Space")
    tab.page.locator(".legendtext", has_text="with correction").first.wait_for()


def test_a_link_to_a_step_opens_it_on_a_phone(open_tab):
    tab = open_tab(size="phone", scheme="dark").open("/tour?step=5").read()
    step(tab, 5)
    assert tab.fits()
    (driver.ROOT / "screenshots").mkdir(exist_ok=True)
    tab.page.screenshot(path=driver.ROOT / "screenshots" / "tour-5-dark-phone.png")


VIEW = "/?preset=needle&policies=snapkv&policies=capkv:tau=2&budget=128&policy=1&layer=7&head=4&tokens=8"
SAME = ("preset", "policies", "budget", "policy", "layer", "head", "tokens")


def test_one_view_on_every_page_and_in_every_link(open_tab):
    tab = open_tab().open(VIEW).run()
    wanted = parse_qs(urlsplit(VIEW).query)
    tab.go("Tokens").read()
    tab.page.get_by_label("Token", exact=True).fill("302")
    tab.page.keyboard.press("Enter")
    tab.settle()
    for title in ("Values", "Capacity", "Heads", "Long generation", "Studies", "Compare", "Tokens"):
        tab.go(title)
        assert tab.raised() == []
        query = parse_qs(urlsplit(tab.page.url).query)
        assert {key: query.get(key) for key in SAME} == wanted, title
        if title not in ("Long generation", "Studies"):
            assert "1,372 tokens, budget 128" in tab.words()
    tab.read()
    assert tab.page.get_by_label("Token", exact=True).input_value() == "302", "the token is lost between pages"
    tab.page.get_by_test_id("stMain").get_by_role("button", name="Link").click()
    link = tab.page.get_by_test_id("stPopoverBody").get_by_test_id("stCode").inner_text().strip()
    assert "token=302" in link and "tau" in link
    other = open_tab().open(link.removeprefix(tab.server.url)).read()
    assert other.words() == tab.words()
    assert other.page.get_by_label("Token", exact=True).input_value() == "302"
    facts = "[data-testid=kv-why] td"
    other.page.locator(facts).first.wait_for(timeout=driver.RUN)
    assert other.page.locator(facts).all_inner_texts()[:4] == tab.page.locator(facts).all_inner_texts()[:4]
