"""The main path in a real browser: the first preset runs, streams, is compared and exported; links, sessions, Cancel."""

from __future__ import annotations

import re
import time

import pytest
from playwright import sync_api

from kvviz import report
from tests.browser import driver

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow]


def test_the_first_preset_streams_and_is_compared(open_tab):
    tab = open_tab().open()
    assert "Needle in a licence, 1,372 tokens, budget 256 entries a head" in tab.words()
    tab.press("Run")
    seen = watch(tab)
    assert len({text for text in seen["capkv"]}) >= 3, "the text came at once"
    tab.finish()
    cards = tab.cards()
    assert list(cards) == ["full", "capkv", "momentkv"]
    assert "60494" in cards["full"]
    assert tab.page.locator(".kv-card .kv-first").count() == 2
    facts = tab.page.locator(".kv-card footer").all_inner_texts()
    assert "256 entries a head" in facts[1] and "mean KL" in facts[1] and "tokens/s" in facts[1]
    tab.page.locator(".js-plotly-plot").first.wait_for()
    assert tab.page.get_by_test_id("kv-costs").locator("tbody tr").count() >= 10

    tab.press("Export")
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="JSON").click()
    run = report.from_json(download.value.path().read_bytes())
    assert [row.policy for row in run.rows] == list(cards)
    assert run.rows[1].text.split() == cards["capkv"].replace("■", "").split()
    assert "python -m kvviz generate" in tab.page.get_by_test_id("stCode").first.inner_text()


def watch(tab: driver.Tab) -> dict[str, list[str]]:
    """The cards' texts as they grow, until the results stand there."""
    seen: dict[str, list[str]] = {}
    end = time.monotonic() + driver.RUN / 1000
    while not tab.page.get_by_test_id("kv-costs").count():
        assert time.monotonic() < end
        for policy, text in tab.cards().items():
            if text.strip():
                seen.setdefault(policy, []).append(text)
        tab.page.wait_for_timeout(150)
    return seen


def test_nothing_moves_while_it_streams(open_tab):
    tab = open_tab().open("/?tokens=8")
    before = tab.page.locator(".kv-card").nth(1).bounding_box()
    tab.press("Run")
    tab.page.locator(".kv-card footer", has_text="entries").first.wait_for(timeout=driver.RUN)
    during = tab.page.locator(".kv-card").nth(1).bounding_box()
    tab.finish()
    after = tab.page.locator(".kv-card").nth(1).bounding_box()
    for box in (during, after):
        assert abs(box["x"] - before["x"]) < 2 and abs(box["height"] - before["height"]) < 8
        assert abs(box["y"] - before["y"]) < 8


def test_a_link_opens_the_same_view_elsewhere(open_tab):
    one = open_tab().open("/?tokens=16")
    one.page.get_by_test_id("stSidebar").get_by_role("button", name="KeyDiff").first.click()
    one.settle()
    one.page.locator("[class*='st-key-stop']").get_by_text("128", exact=True).click()
    one.settle()
    assert "budget=128" in one.page.url and "policies=keydiff" in one.page.url
    two = open_tab().open(one.page.url.removeprefix(one.server.url))
    assert two.words() == one.words() and "budget 128" in two.words()
    assert one.run().cards() == two.run().cards()


def test_two_sessions_at_once(open_tab):
    one = open_tab().open("/?preset=story&policies=sink&budget=64&tokens=16")
    two = open_tab().open("/?preset=code&policies=keydiff&policies=snapkv&budget=128&tokens=16")
    one.press("Run")
    two.press("Run")
    assert list(one.finish().cards()) == ["full", "sink"]
    assert list(two.finish().cards()) == ["full", "keydiff", "snapkv"]
    assert "64 entries" in one.page.locator(".kv-card footer").nth(1).inner_text()
    assert "128 entries" in two.page.locator(".kv-card footer").nth(1).inner_text()


def test_cancel_while_it_writes(open_tab):
    tab = open_tab().open("/?preset=essay&tokens=512")
    tab.press("Run")
    tab.page.get_by_text(re.compile(r"Writing token \d+ of at most 512")).first.wait_for(timeout=driver.RUN)
    tab.press("Cancel")
    tab.page.get_by_text("Cancelled").wait_for()
    tab.settle()
    assert tab.page.get_by_role("button", name="Run").first.is_enabled()
    assert tab.cards()["full"].strip()


def test_a_closed_tab_frees_its_job(open_tab, browser, server):
    other = open_tab().open("/?tokens=8")
    with driver.tab(browser, server) as tab:
        tab.open("/?preset=essay&tokens=512").press("Run")
        tab.page.get_by_text(re.compile(r"Writing token \d+")).first.wait_for(timeout=driver.RUN)
    started = time.monotonic()
    other.run()
    assert time.monotonic() - started < 120, "the other session's job went on"


def test_a_dark_first_visit_has_dark_figures(open_tab):
    open_tab().open("/values?tokens=8").read()
    tab = open_tab(scheme="dark").open("/values?tokens=8")
    tab.page.locator(".js-plotly-plot .xtick text, .js-plotly-plot .ytitle").first.wait_for()
    ink = tab.page.evaluate("getComputedStyle(document.querySelector('.js-plotly-plot .ytitle')).fill")
    assert max(int(part) for part in re.findall(r"\d+", ink)[:3]) > 120, ink


def test_bad_links_and_bad_models(open_tab):
    tab = open_tab().open("/?budget=-1&policies=capkv:tau=-2&preset=nothing")
    note = tab.page.get_by_test_id("stAlert").inner_text()
    assert "budget=-1" in note and "tau" in note and "preset=nothing" in note
    lost = open_tab()
    lost.page.goto(lost.server.url + "/?model=no-such-model")
    lost.page.get_by_role("button", name="Load", exact=True).click()
    lost.page.get_by_text("unknown model").wait_for(timeout=driver.FIRST_LOAD)


def test_options_stay_open_while_they_are_changed(open_tab):
    tab = open_tab().open()
    tab.page.locator(".st-key-options_capkv").get_by_role("button").first.click()
    tau = tab.page.get_by_role("slider", name="Tau")
    for _ in range(6):  # from 5 in steps of 0.5
        tau.press("ArrowLeft")
    tab.page.wait_for_url("**capkv%3Atau%3D2**")
    tab.settle().page.locator(".st-key-capkv-tau-undo button").first.click()
    tab.page.wait_for_url(lambda url: "tau" not in url)
    tab.settle()
    assert float(tau.input_value()) == 5
    tab.page.keyboard.press("Escape")
    tau.wait_for(state="detached")
    tab.page.get_by_role("button", name="Glossary").click()
    tab.page.get_by_placeholder("attention lost").fill("leverage")
    tab.page.keyboard.press("Enter")
    tab.page.get_by_test_id("kv-terms").locator("dt").first.wait_for()


def test_a_text_of_ones_own(open_tab):
    tab = open_tab().open("/?tokens=8")
    tab.page.get_by_role("button", name="Edit").click()
    upload = tab.page.get_by_test_id("stFileUploaderDropzoneInput")
    upload.set_input_files({"name": "x.txt", "mimeType": "text/plain", "buffer": b"\x89PNG\x00\xff\xfe"})
    tab.page.get_by_text("not UTF-8 text").wait_for()
    text = "<script>document.title = 'broken'</script> The password of the door is swordfish. " * 5
    upload.set_input_files({"name": "x.txt", "mimeType": "text/plain", "buffer": text.encode()})
    sync_api.expect(tab.page.get_by_role("textbox", name="Text", exact=True)).to_have_value(text)
    tab.settle()
    tab.page.get_by_role("button", name="Use this text").click()
    tab.page.get_by_test_id("kv-words").filter(has_text="A text of your own").wait_for(timeout=driver.RUN)
    tab.settle()
    assert "A text of your own" in tab.words() and "preset=own" in tab.page.url and "swordfish" not in tab.page.url
    tab.run()
    assert tab.page.title() == "kvviz"


LINKS = {
    "/tour?step=2": ("[data-testid=kv-step]", "2. "),
    "/values?preset=story&layer=3&head=5": ("[class*=st-key-layer] input", "3"),
    "/capacity?preset=story&layer=4": ("[class*=st-key-layer] input", "4"),
    "/heads?preset=story&measure=w_E&minus=1": ("[class*=st-key-measure] input", "Attention lost"),
    "/tokens?preset=story&token=11": (".kv-h2 >> nth=0", "Why token 11"),
    "/long?preset=story": (".kv-words", "Facts in a story"),
    "/studies?preset=story": (".kv-words", "Facts in a story"),
}
"""Links, and what stands there when they are opened."""


@pytest.mark.parametrize("link", LINKS)
def test_the_very_first_visit_may_be_to_any_link(browser, tmp_path, link):
    with driver.serving(tmp_path) as server, driver.tab(browser, server) as tab:
        tab.open(link).read()
        place, words = LINKS[link]
        there = sync_api.expect(tab.page.locator(place).first)
        there.to_have_value(words) if place.endswith("input") else there.to_contain_text(words)
        assert tab.raised() == [] and tab.errors == []
        assert tab.page.get_by_test_id("stTopNavLinkContainer").count() >= 4
        assert all(each in tab.page.url for each in link.split("?")[1].split("&"))
        assert server.complaints() == []
