"""Values, Capacity and Heads in a real browser: points change sides as the budget moves, a click on a cell opens its head."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow]

VIEW = "?policies=capkv&policies=momentkv&policies=keydiff&tokens=24&layer=17&head=4"

SIDES = """() => { const d = document.querySelector('.st-key-plane .js-plotly-plot')?._fullData ?? [];
    return [d[0], d[2]].map(t => t?.x.length) }"""
"""How many points are evicted and kept, as Plotly has them."""

AXES = """() => { const l = document.querySelector('.st-key-plane .js-plotly-plot')._fullLayout;
    return [l.xaxis.range, l.yaxis.range].flat().map(v => Math.round(v * 1e4)) }"""

POINT = """() => { const plot = document.querySelector('.st-key-strip .js-plotly-plot'), trace = plot._fullData[0];
    const area = plot.querySelector('.nsewdrag').getBoundingClientRect(), axes = plot._fullLayout;
    return [area.x + axes.xaxis.l2p(Math.log10(trace.x[3])), area.y + axes.yaxis.l2p(Math.log10(trace.y[3])), trace.x[3]] }"""
"""Where the fourth point of the first curve of the strip is on the screen, and its budget."""


SHOWN = f"() => +(document.querySelector('.st-key-plane g.kv-scrub')?.dataset.kept ?? ({SIDES})()[1])"
"""How many points stand on the kept side, by the browser's own doing or by the server's answer."""

QUICK = 250
"""Milliseconds from the key to points on their new side, on a machine that does nothing else."""


@pytest.fixture
def values(open_tab):
    return open_tab().open("/values" + VIEW).read()


def budget(tab):
    return tab.page.locator("[class*='st-key-budget'] input[type=range]").first


def test_moving_the_budget_moves_points_and_nothing_else(values):
    page = values.page
    page.locator(".st-key-plane .js-plotly-plot").wait_for()
    evicted, kept = page.evaluate(SIDES)
    axes, total = page.evaluate(AXES), evicted + kept
    assert kept == 256
    budget(values).focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
        page.wait_for_function(f"kept => ({SIDES})()[1] !== kept", arg=kept)
        before, (evicted, kept) = kept, page.evaluate(SIDES)
        assert kept < before and evicted + kept == total
        assert page.evaluate(AXES) == axes
    assert f"budget {kept} entries" in values.words()
    assert f"budget={kept}" in page.url


def test_points_change_sides_at_once(values):
    """Timed in the page's own processor time, from the key to points on their new side: other programs do not count."""
    page = values.page
    clock = page.context.new_cdp_session(page)
    clock.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> float:
        metrics = {m["name"]: m["value"] for m in clock.send("Performance.getMetrics")["metrics"]}
        return 1000 * metrics["TaskDuration"]

    page.locator(".st-key-plane .js-plotly-plot").wait_for()
    budget(values).focus()
    times = []
    for _ in range(6):
        kept, before = page.evaluate(SIDES)[1], spent()
        page.keyboard.press("ArrowLeft")
        page.wait_for_function(f"kept => ({SHOWN})() !== kept", arg=kept)
        times.append(round(spent() - before))
        shown = page.evaluate(SHOWN)
        values.settle()
        assert page.evaluate(SIDES)[1] == page.evaluate(SHOWN) == shown < kept
    print("ms of the page's time for each move of the budget:", times)
    assert min(times) < QUICK


SEEN = f"""() => {{ const start = performance.now(), kept = ({SIDES})()[1]; window.seen = null; window.answer = null;
    const look = () => {{ const drawn = document.querySelector('.st-key-plane g.kv-scrub');
        if (!window.seen && drawn) window.seen = [performance.now() - start, +drawn.dataset.kept];
        const now = ({SIDES})()[1];
        now === kept || !now ? setTimeout(look, 1) : (window.answer = [performance.now() - start, now]); }};
    look(); }}"""
"""Watch a move: milliseconds and kept points of what the browser draws by itself, and of the server's answer."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_points_follow_the_slider_before_the_answer(open_tab, scheme):
    tab = open_tab(scheme=scheme).open("/values" + VIEW).read()
    page, times = tab.page, []
    page.locator(".st-key-plane .js-plotly-plot").wait_for()
    budget(tab).focus()
    for key in ("ArrowLeft", "ArrowLeft", "ArrowRight", "ArrowRight"):
        tab.settle()
        page.evaluate(SEEN)
        page.keyboard.press(key)
        page.wait_for_function("window.answer !== null")
        (seen, drawn), (answer, kept) = page.evaluate("[window.seen, window.answer]")
        assert drawn == kept and seen < answer
        times.append((round(seen), round(answer)))
    print("ms from the key to points on their new side, and to the server's answer:", times)
    tab.settle()
    page.wait_for_function("!document.querySelector('.st-key-plane g.kv-scrub')")  # it went with the old figure


def test_points_follow_tau(values):
    page = values.page
    page.locator(".st-key-options_capkv").get_by_role("button").first.click()
    tau = page.get_by_role("slider", name="Tau")
    tau.focus()
    values.settle()
    kept = page.evaluate(SIDES)[1]
    page.evaluate(
        "new MutationObserver(() => { window.seen ??= document.querySelector('g.kv-scrub')?.dataset.kept })"
        ".observe(document.querySelector('.st-key-plane'), {subtree: true, childList: true, attributes: true})"
    )
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("window.seen !== undefined")
    assert int(page.evaluate("window.seen")) == kept  # others, but as many
    page.wait_for_url("**capkv%3Atau%3D4.5**")


AT = "document.querySelector('.kv-here').style.getPropertyValue('--at')"


def test_lines_follow_the_slider_before_the_answer(open_tab):
    tab = open_tab().open("/capacity" + VIEW).read()
    page, before = tab.page, float(tab.page.evaluate(AT))
    watch = f"() => {{ window.moved ??= {AT} }}"
    page.evaluate(f"new MutationObserver({watch}).observe(document.querySelector('.kv-here'), {{attributes: true}})")
    budget(tab).press("ArrowLeft")
    page.wait_for_function("window.moved !== undefined")
    moved = float(page.evaluate("window.moved"))
    page.wait_for_url("**budget=215**")
    tab.settle()
    assert before < moved == pytest.approx(float(page.evaluate(AT)), abs=1e-4)


@pytest.mark.parametrize(("page", "figure"), [("values", "strip"), ("capacity", "all_KU")])
def test_the_line_at_the_budget_can_be_dragged(open_tab, page, figure):
    """Figures follow at once; when it is let go its place is the budget everywhere."""
    tab = open_tab().open(f"/{page}{VIEW}").read()
    line = tab.page.locator(f".st-key-under_{figure} .kv-here")
    line.scroll_into_view_if_needed()
    tab.settle()
    box = line.bounding_box()
    tab.page.mouse.move(box["x"], box["y"])
    tab.page.mouse.down()
    towards = -60 if page == "values" else 40  # fewer entries: to the left, or more of them removed
    for part in range(1, 7):
        tab.page.mouse.move(box["x"] + towards * part / 6, box["y"] + 5)
    moved = line.bounding_box()["x"] - box["x"]
    assert moved * towards > 0 and abs(moved - towards) < 30, "it stands at the nearest budget of the slider"
    assert "budget=" not in tab.page.url
    if page == "values":
        kept = int(tab.page.locator(".st-key-plane g.kv-scrub").get_attribute("data-kept"))
        assert kept < 256
    tab.page.mouse.up()
    tab.page.wait_for_url("**budget=**")
    tab.settle()
    assert line.bounding_box()["x"] - box["x"] == pytest.approx(moved, abs=1.5)
    chosen = int(budget(tab).get_attribute("aria-valuetext").replace(",", ""))
    assert chosen < 256 and f"budget={chosen}" in tab.page.url and f"budget {chosen} entries" in tab.words()
    if page == "values":
        assert chosen == kept and tab.page.evaluate(SIDES)[1] == kept


LINES = """() => [...document.querySelectorAll('[class*=st-key-under_]')].map(under => {
    const plot = under.querySelector('.js-plotly-plot'), axis = plot._fullLayout.xaxis;
    const area = plot.querySelector('.nsewdrag').getBoundingClientRect(), line = under.querySelector('.kv-here');
    const box = line.getBoundingClientRect();
    return [axis.p2d(box.x + box.width / 2 - area.x), Math.round(box.y - area.y), Math.round(box.height - area.height)] })"""
"""For every figure with a line at the budget: where the line stands on its axis, and how it fits the plot's height."""


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_the_line_at_the_budget_stands_where_it_should(open_tab, size):
    tab = open_tab(size=size).open("/values" + VIEW + "&budget=128").read()
    page = tab.page
    page.locator(".st-key-strip .js-plotly-plot").wait_for()
    page.evaluate("document.querySelector('.st-key-strip .js-plotly-plot').mark = 1")
    ((at, *fit),) = page.evaluate(LINES)
    assert at == pytest.approx(128, rel=0.02) and fit == [0, 0]
    if size == "desktop":
        page.locator("[class*='st-key-stop'] button", has_text="512").click()
        page.get_by_text("budget 512 entries").wait_for()
        tab.settle()
        assert page.evaluate(LINES)[0][0] == pytest.approx(512, rel=0.02)
        assert page.evaluate("document.querySelector('.st-key-strip .js-plotly-plot').mark") == 1  # not drawn anew
        tab.go("Capacity")
        page.locator(".st-key-one_KU .js-plotly-plot").wait_for()
        found, tokens = page.evaluate(LINES), int(tab.words().split(" tokens")[0].split()[-1].replace(",", ""))
        assert len(found) == 6 and page.get_by_text("full cache", exact=True).first.is_visible()
        for at, *fit in found:
            assert at == pytest.approx(100 * (1 - 512 / tokens), abs=1) and fit == [0, 0]


def test_arrow_keys_go_from_head_to_head(values):
    values.page.locator(".kv-h2").click()
    values.page.keyboard.press("Shift+ArrowDown")
    values.page.get_by_text("Error of layer 18, head 4").wait_for()
    values.page.keyboard.press("Shift+ArrowLeft")
    values.page.get_by_text("Error of layer 18, head 3").wait_for()
    values.settle()
    assert "layer=18" in values.page.url and "head=3" in values.page.url


def test_a_click_on_the_strip_sets_the_budget(values):
    page = values.page
    page.locator(".st-key-strip .js-plotly-plot").scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    x, y, wanted = page.evaluate(POINT)
    page.mouse.click(x, y)
    page.get_by_text(f"budget {wanted} entries").wait_for()
    values.settle()
    assert page.evaluate(SIDES)[1] == wanted and f"budget={wanted}" in page.url


def test_the_page_shows_the_librarys_numbers(values, default_engine):
    """The same prompt, head and budget in the library give what stands in the table."""
    from kvviz import analysis, policy
    from kvviz.figures.style import number
    from kvviz.presets import PRESETS

    engine, prompt = default_engine, PRESETS["needle"].prompt()
    state = prompt.prefill(engine)
    for _ in engine.generate(state, prompt.question, [], 256, 24, answer=prompt.answer):
        pass
    view = analysis.of(state := engine.latest(state)).head(policy("capkv"), 256, 17, 4)
    shown = values.page.get_by_test_id("kv-facts").inner_text()
    for text in (
        f"{view.angle:.0f}°",
        f"{number(100 * view.w_E)}%",
        number(view.gamma),
        f"{number(view.log_z_gap)} nats",
    ):
        assert text in shown


def test_a_click_on_a_cell_opens_its_head(open_tab):
    tab = open_tab().open("/heads" + VIEW).read()
    page = tab.page
    page.locator(".st-key-map .js-plotly-plot").wait_for()
    area = page.locator(".st-key-map .nsewdrag").first.bounding_box()
    page.mouse.click(area["x"] + area["width"] * 5.5 / 9, area["y"] + area["height"] * 11.5 / 30)
    page.get_by_text("Error of layer 11, head 5").wait_for()
    tab.settle()
    assert "layer=11" in page.url and "head=5" in page.url
    assert "CapKV" in page.locator("[class*='st-key-policy'] input").input_value()


def test_the_two_boxes_open_a_head_from_the_keyboard(open_tab):
    tab = open_tab().open("/heads" + VIEW).read()
    tab.press("Open in Values")
    tab.page.get_by_text("Error of layer 17, head 4").wait_for()
    assert "/values" in tab.settle().page.url and "layer=17" in tab.page.url and "head=4" in tab.page.url


@pytest.mark.parametrize("measure", ["Directional gap (cosine)", "Lost mass beyond its estimate"])
def test_measures_and_differences_of_the_map(open_tab, measure):
    tab = open_tab().open("/heads" + VIEW).read()
    for key, choice in (("measure", measure), ("minus", "KeyDiff")):
        tab.page.locator(f"[class*='st-key-{key}']").get_by_role("combobox").click()
        tab.page.get_by_role("option", name=choice).click()
        tab.settle()
    grid = "document.querySelector('.st-key-map .js-plotly-plot').data[0]"
    z = tab.page.evaluate(f"[{grid}.zmin, {grid}.zmax]")
    assert z[0] == -z[1] < 0


def test_capacity_has_curves_and_after_runs_the_divergence(open_tab):
    tab = open_tab().open("/" + VIEW).run().go("Capacity")
    page = tab.page
    page.locator(".st-key-divergence .js-plotly-plot").wait_for()
    for key in ("all", "one"):
        for which in ("K", "U", "KU"):
            names = page.evaluate(
                f"document.querySelector('.st-key-{key}_{which} .js-plotly-plot').data.map(t => t.name)"
            )
            assert {"CapKV", "MomentKV", "KeyDiff"} <= set(names)
    assert "over 3 outputs, Spearman's" in page.get_by_test_id("stMain").inner_text()


@pytest.mark.parametrize("page", ["values", "heads", "tokens", "capacity"])
def test_tau_can_be_dragged_on_every_page(open_tab, page):
    """Faster than the answers; the policy's name changes with it, in the lists that the pages have."""
    tab = open_tab().open(f"/{page}{VIEW}").read()
    tab.page.locator(".st-key-options_capkv").get_by_role("button").first.click()
    tau = tab.page.get_by_role("slider", name="Tau")
    tau.focus()
    for _ in range(6):
        tab.page.keyboard.press("ArrowLeft")
        tab.page.wait_for_timeout(120)
    tab.page.wait_for_url("**capkv%3Atau%3D2&**")
    if page != "capacity":
        tab.page.locator("[class*='st-key-policy'] input[value='CapKV (tau 2)']").wait_for()
    tab.settle()
    assert float(tau.input_value()) == 2 and tab.raised() == []


def test_quick_moves_are_all_kept_and_back_takes_one_back(values):
    """Faster than the answers: the last move counts, on the slider, on the page and in the address."""
    page, slider = values.page, budget(values)
    page.locator(".st-key-plane .js-plotly-plot").wait_for()
    slider.focus()
    start = int(slider.input_value())
    for _ in range(8):
        page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(90)
    page.keyboard.press("ArrowRight")
    values.settle()
    assert int(slider.input_value()) == start - 7
    kept = int(slider.get_attribute("aria-valuetext"))
    page.wait_for_function(f"kept => ({SIDES})()[1] === kept", arg=kept)
    page.wait_for_url(f"**budget={kept}**")
    assert kept < 256 and f"budget {kept} entries" in values.words()
    before = page.url
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(f"kept => ({SIDES})()[1] < kept", arg=kept)
    page.wait_for_url(lambda url: url != before)
    values.settle()
    page.go_back()
    page.wait_for_function(f"kept => ({SIDES})()[1] === kept", arg=kept)
    values.settle()
    assert int(slider.input_value()) == start - 7 and f"budget {kept} entries" in values.words() and page.url == before
