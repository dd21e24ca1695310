"""Figures hold exactly the numbers they are given, stay valid Plotly, and look alike in light and dark."""

from __future__ import annotations

import base64
import itertools
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import plotly.graph_objects as go
import pytest

import kvviz
from kvviz import analysis
from kvviz.figures import angle, capacity, heads, style, values
from tests.test_decode import state_of

BOTH = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
POLICIES = [kvviz.policy("capkv"), kvviz.policy("capkv", tau=1.0), kvviz.policy("momentkv", window=8)]


@pytest.fixture
def numbers(engine):
    state = state_of(engine)
    engine.kept_alive = state
    return analysis.of(state)


@pytest.fixture
def view(numbers):
    return numbers.head(POLICIES[0], 20, 1, 2)


def valid(figure: go.Figure) -> go.Figure:
    """The figure as a browser gets it, through Plotly's validation, which the fast path leaves out."""
    sent = json.loads(figure.to_json())
    assert sent["layout"]["template"]["layout"]["paper_bgcolor"] == "rgba(0,0,0,0)"
    return go.Figure(decoded(sent))


def decoded(part):
    """JSON with its base64 arrays as numpy."""
    if isinstance(part, dict) and "bdata" in part:
        shape = [int(n) for n in str(part["shape"]).split(",")] if "shape" in part else -1
        return np.frombuffer(base64.b64decode(part["bdata"]), part["dtype"]).reshape(shape)
    if isinstance(part, dict):
        return {key: decoded(value) for key, value in part.items()}
    return [decoded(value) for value in part] if isinstance(part, list) else part


def texts(figure: go.Figure) -> str:
    return " ".join(note.text or "" for note in figure.layout.annotations)


# Values


@BOTH
def test_every_value_is_on_the_plane_once_on_its_side(view, dark):
    evicted, sign, kept, *_ = valid(values.plane(view, dark=dark)).data
    assert (len(kept.x), len(evicted.x)) == (20, view.n_tokens - 20)
    assert (kept.name, sign.name) == ("kept: 20", f"evicted: {view.n_tokens - 20}")
    for trace, side in ((kept, view.kept), (evicted, ~view.kept)):
        assert np.array_equal(np.stack([trace.x, trace.y], 1), view.points[side])
        assert np.array_equal(trace.customdata, np.stack([view.positions, view.scores], 1)[side].astype(np.float32))
        assert trace.x.dtype == np.float32
    assert kept.marker.symbol == "circle" and kept.marker.color == style.colour("capkv", dark)
    assert evicted.mode == "none" and sign.marker.symbol == "x-thin-open"


def test_a_cross_stays_a_cross_on_a_flat_plane(view):
    """Both axes have one scale: a share of the height alone would be a dot where the plane is wide."""
    for height in (0.1, 0.5, 1.0, 3.0):
        one = replace(view, x_range=(-1.0, 1.0), y_range=(-height, height))
        assert values.look(one)["arm"] >= 0.007 * max(2, 2 * height)


def test_what_is_evicted_is_one_shape_with_a_cross_at_every_point(view):
    (shape,) = values.plane(view).layout.shapes
    strokes = re.findall(r"M([^,]+),([^L]+)L([^,]+),([^M]+)", shape.path)
    middles = np.array(strokes, dtype=float).reshape(-1, 2, 2, 2).mean(2)
    assert np.allclose(middles, view.points[~view.kept][:, None], atol=2e-3 * np.ptp(view.y_range))
    assert not values.plane(replace(view, kept=np.ones_like(view.kept))).layout.shapes


def test_axes_do_not_depend_on_the_budget_or_the_policy(numbers):
    figures = [values.plane(numbers.head(p, b, 1, 2)) for p in POLICIES for b in (4, 20, 60, 10_000)]
    for part in ("xaxis", "yaxis", "height"):
        assert len({json.dumps(f.to_dict()["layout"][part], default=list) for f in figures}) == 1


def test_tokens_are_on_the_hover_and_harmless(view):
    words = ["<b>&</b>", *(f"t{i}" for i in range(1, view.n_tokens))]
    evicted, _, kept, *_ = valid(values.plane(view, words)).data
    shown = dict(zip(kept.customdata[:, 0], kept.text, strict=True))
    shown |= dict(zip(evicted.customdata[:, 0], evicted.text, strict=True))
    assert shown[0] == "&lt;b&gt;&amp;&lt;/b&gt;" and shown[5] == "t5" and len(shown) == view.n_tokens


def test_long_prompts_draw_every_kept_entry_and_at_most_so_many(view, monkeypatch):
    monkeypatch.setattr(values, "MAX_POINTS", 50)
    evicted, sign, kept, *_ = values.plane(view).data
    assert len(kept.x) == 20 and len(evicted.x) <= 30 and "one in" in sign.name


@BOTH
def test_four_arrows_start_at_the_origin_and_end_where_they_should(view, dark):
    arrows = {trace.name: trace for trace in valid(values.plane(view, dark=dark)).data if trace.name in values.ARROWS}
    assert list(arrows) == ["f", "f_R", "f_E", "estimate"]
    for name, arrow in arrows.items():
        (x0, x), (y0, y) = arrow.x, arrow.y
        assert (x0, y0) == pytest.approx(tuple(view.origin))
        end = view.origin + view.scale * (view.arrows[name] - view.origin)
        if name != "estimate":
            assert (x, y) == pytest.approx(tuple(end), rel=1e-5)
        assert view.x_range[0] <= x <= view.x_range[1] and view.y_range[0] <= y <= view.y_range[1]
        assert arrow.marker.symbol == "arrow" and arrow.marker.angleref == "previous"
    assert len({arrow.line.color for arrow in arrows.values()}) == 4
    assert (f"{view.scale} times longer" in texts(values.plane(view))) == (view.scale > 1)


def test_where_nothing_is_evicted_only_f_is_drawn(numbers):
    figure = valid(values.plane(numbers.head(POLICIES[0], 10_000, 1, 2)))
    assert {trace.name for trace in figure.data if trace.name in values.ARROWS} == {"f"}
    assert len(figure.data[0].x) == 0


def test_labels_do_not_cover_each_other():
    places = values._apart(np.zeros((4, 2)))
    for a, b in itertools.combinations(places, 2):
        assert abs(a[0] - b[0]) >= values.LABEL_ROOM[0] or abs(a[1] - b[1]) >= values.LABEL_ROOM[1] - 1e-9


@BOTH
def test_the_angle_is_true(numbers, dark):
    """Read from the drawing itself: the arrows' heads stand where f_E, f_R and f end."""
    for head in range(4):
        view = numbers.head(POLICIES[0], 20, 2, head)
        drawing = ElementTree.fromstring(angle.angle(view, dark))
        moves = [part.get("transform") for part in drawing.iter() if part.get("transform")]
        drawn = (np.array(re.findall(r"-?[\d.]+", move)[:2], float) * [1, -1] for move in moves)
        ends = angle.tips(view)
        f_E, f_R, f = (ends[name] for name in ("f_E", "f_R", "f"))
        for end, pixels in zip((f_E, f_R, f), drawn, strict=True):
            assert pixels == pytest.approx(angle.UNIT * end, abs=0.051)  # a tenth of a pixel is written
        assert np.degrees(np.arctan2(f_E[1], f_E[0])) == pytest.approx(view.angle) and f_R[1] == 0
        ratio = view.lengths["f_E"] / view.lengths["f_R"]
        assert np.linalg.norm(f_E) / np.linalg.norm(f_R) == pytest.approx(ratio)
        assert f == pytest.approx(f_R + view.w_E * (f_E - f_R))
        said = "".join(drawing.itertext())
        assert f"{view.angle:.0f}°" in said and f"error {style.number(100 * view.relative_error)}%" in said
        assert style.colour("capkv", dark) in ElementTree.tostring(drawing, "unicode")
        assert f"{view.angle:.0f} degrees" in angle.angle_alt(view)


def test_labels_of_the_angle_stand_apart():
    heights = angle._apart({"f": 0.02, "f_R": 0.0, "f_E": 0.9})
    assert heights["f_R"] == 0 and heights["f"] == pytest.approx(angle.ROOM) and heights["f_E"] == 0.9


@BOTH
def test_the_strip_holds_every_policys_curve_and_the_budget(numbers, dark):
    curves = numbers.error_by_budget(POLICIES, None, 1, 2)
    figure = valid(values.strip(curves, 20, dark, looked_at="CapKV"))
    assert [d.name for d in figure.data] == ["CapKV", "CapKV (tau 1)", POLICIES[2].label, "after correction"]
    for trace in figure.data[:3]:
        there = np.isfinite(trace.y)
        assert np.array_equal(trace.x, curves.budgets)
        assert np.array_equal(trace.y[there], curves.errors[trace.name][there])
        assert (curves.errors[trace.name][~there] < values.ROUNDING).all()  # a log axis has no zero
    assert figure.layout.shapes[0].x0 == figure.layout.shapes[0].x1 == 20
    assert figure.data[0].line.color != figure.data[1].line.color and figure.data[0].line.width == 3


@BOTH
def test_a_baked_figure_has_the_look_in_its_own_layout_and_lists_for_arrays(view, dark):
    plain = values.plane(view, dark=dark)
    baked = json.loads(style.bake(values.plane(view, dark=dark), dark).to_json())
    go.Figure(baked)  # valid
    assert "template" not in baked["layout"] and baked["layout"]["datarevision"] == 1
    assert baked["layout"]["font"] == style.template(dark).layout.font.to_plotly_json()
    assert baked["layout"]["xaxis"]["title"]["font"]["color"] == style.muted(dark)
    assert baked["layout"]["xaxis"]["title"]["text"] == plain.layout.xaxis.title.text
    for before, after in zip(plain.data, style.bake(values.plane(view), dark)._data, strict=True):
        assert isinstance(after["x"], list) and np.array_equal(
            np.array(before.x, float), np.array(after["x"], float), True
        )


# Heads


@BOTH
@pytest.mark.parametrize("measure", analysis.MEASURES)
def test_the_map_holds_every_cell_and_a_marker_to_click(numbers, measure, dark):
    data = numbers.error_map(POLICIES[0], 20)
    figure = valid(heads.head_map(data, measure, dark))
    grid, markers, *_, median = figure.data
    assert np.array_equal(grid.z, data[measure])
    cells = [(y, x) for y, x in zip(markers.y, markers.x, strict=True)]
    assert cells == [tuple(place) for place in markers.customdata] == list(itertools.product(range(4), range(4)))
    assert all(type(place) is not np.ndarray for place in markers.customdata)
    assert median.x == pytest.approx(np.median(data[measure], axis=1), rel=1e-6)
    signed = analysis.MEASURES[measure].signed
    assert grid.zmax >= data[measure].max() and grid.zmin == (-grid.zmax if signed else 0)
    assert figure.layout.yaxis.range == (3.5, -0.5)  # layer 0 on top


def test_the_difference_map_is_around_zero(numbers):
    one, two = (numbers.error_map(p, 20) for p in (POLICIES[0], POLICIES[2]))
    grid = valid(heads.head_map(one, "w_E", other=two)).data[0]
    assert np.array_equal(grid.z, one["w_E"] - two["w_E"]) and grid.zmin == -grid.zmax
    assert "minus" in heads.map_alt(one, "w_E", two)


def test_sliding_layers_say_so(tiny_engine):
    state = state_of(tiny_engine("gemma3"))
    figure = valid(heads.head_map(analysis.of(state).error_map(POLICIES[0], 12)))
    assert texts(figure).count("sliding window") == 2


def test_a_map_of_nothing_evicted_can_be_drawn(numbers):
    data = numbers.error_map(POLICIES[0], 10_000)
    for measure in analysis.MEASURES:
        valid(heads.head_map(data, measure))
        assert heads.map_alt(data, measure)


# Capacity


@BOTH
@pytest.mark.parametrize("which", analysis.CAPACITIES)
def test_capacity_curves_hold_means_bands_and_one_head(numbers, which, dark):
    row = list(analysis.CAPACITIES).index(which)
    curves = numbers.capacity(POLICIES[:2])
    figure = valid(capacity.curve(curves, which, 0.8, dark))
    lines = [d for d in figure.data if d.name]
    assert [d.name for d in lines] == ["CapKV", "CapKV (tau 1)"]
    for line in lines:
        assert line.x == pytest.approx(100 * curves.removed)
        assert line.y == pytest.approx(100 * curves.mean(line.name)[row])
    low, high = curves.quantiles("CapKV")
    assert figure.data[0].y == pytest.approx(100 * low[row]) and figure.data[1].y == pytest.approx(100 * high[row])
    full, now = figure.layout.shapes
    assert full.y0 == full.y1 == 100 and now.x0 == now.x1 == pytest.approx(80)
    alone = valid(capacity.curve(numbers.head_capacity(POLICIES[:1], analysis.SHARES, 2, 1), which, 0.8, dark, (2, 1)))
    assert alone.data[0].y == pytest.approx(100 * curves.at("CapKV", 2, 1)[row])
    assert "mean over layers" in capacity.curve_alt(curves, which, 0.8)


@BOTH
def test_the_line_at_the_budget_is_all_that_moves(numbers, dark):
    """Taken out, it leaves the same figure wherever it stood, and says where that was."""
    errors, kept = numbers.error_by_budget(POLICIES, None, 1, 2), numbers.capacity(POLICIES[:2])
    for draw, low, high in (
        (lambda x: values.strip(errors, x, dark), 20, 60),
        (lambda x: capacity.curve(kept, "KU", x / 100, dark), 30, 75),
    ):
        one, two = (style.bake(draw(x), dark) for x in (low, high))
        lines = [style.lift(figure) for figure in (one, two)]
        assert one.to_json() == two.to_json() and style.HERE not in one.to_json()
        axis = one._layout["xaxis"]
        for x, line in zip((low, high), lines, strict=True):
            at = axis["range"][0] + line.at * (axis["range"][1] - axis["range"][0])
            assert (10**at if axis.get("type") == "log" else at) == pytest.approx(x)
        assert axis["fixedrange"] and not axis["automargin"] and not one._layout["yaxis"]["automargin"]
        assert lines[0].height + lines[0].top + one._layout["margin"]["b"] == one._layout["height"]
    assert style.lift(style.bake(values.plane(numbers.head(POLICIES[0], 20, 1, 2)))) is None


def test_points_left_out_are_bridged(numbers):
    curves = numbers.capacity(POLICIES)
    line = next(d for d in valid(capacity.curve(curves, "K", 0.5)).data if d.name == POLICIES[2].label)
    assert line.connectgaps and np.isnan(line.y).any()
    assert "nan" not in capacity.curve_alt(curves, "K", 0.5) and "no value" not in capacity.curve_alt(curves, "K", 0.5)


@BOTH
def test_capacity_against_divergence(dark):
    points = [
        {"policy": "capkv", "label": "CapKV", "budget": 8, "capacity": 0.5, "kl": 0.2},
        {"policy": "keydiff", "label": "KeyDiff", "budget": 8, "capacity": 0.3, "kl": 1.5},
        {"policy": "capkv", "label": "CapKV", "budget": 16, "capacity": 0.7, "kl": 0.02},
    ]
    one, two = valid(capacity.against_divergence(points, "KU", dark)).data
    assert (list(one.x), list(one.y), list(one.customdata)) == ([50, 70], [0.2, 0.02], [8, 16])
    assert two.marker.symbol == "triangle-up"
    assert "-1" in capacity.divergence_alt(points, "KU", -1.0).replace("\u2212", "-")


# Style


def oklab(hex_colour: str, vision: np.ndarray) -> np.ndarray:
    """A colour as a kind of vision sees it, in Oklab."""
    srgb = np.array([int(hex_colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_lms = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
    to_lab = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return to_lab @ np.cbrt(to_lms @ np.clip(vision @ linear, 0, 1))


VISIONS = {  # Machado, Oliveira and Fernandes (2009), severity 1
    "all cones": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}


@BOTH
@pytest.mark.parametrize("vision", VISIONS)
def test_main_colours_differ_for_every_eye(vision, dark):
    main = ("full", "capkv", "momentkv", "snapkv", "keydiff", "expected_attention", "h2o")
    seen = {name: oklab(style.colour(name, dark), VISIONS[vision]) for name in main}
    for a, b in itertools.combinations(main, 2):
        assert np.linalg.norm(seen[a] - seen[b]) > 0.05, (a, b, np.linalg.norm(seen[a] - seen[b]))


@BOTH
def test_every_method_has_its_own_colour_dash_and_marker(dark):
    names = kvviz.policies.names()
    assert set(names) <= set(style.COLOURS) == set(style.DASHES) == set(style.SYMBOLS)
    assert len({style.colour(n, dark) for n in names}) == len(names)
    assert len({(style.dash(n), style.symbol(n)) for n in names}) == len(names)
    assert style.colour("new_method").startswith("#") and style.dash("new_method") and style.symbol("new_method")


def test_dark_colours_are_lighter_tints():
    for name in style.COLOURS:
        pairs = zip(*(bytes.fromhex(style.colour(name, dark)[1:]) for dark in (False, True)), strict=True)
        assert all(dark >= light for light, dark in pairs)


@BOTH
def test_settings_of_one_method_look_different(dark):
    looks = style.looks({"CapKV": "capkv", "CapKV (tau 1)": "capkv", "SnapKV": "snapkv"}, dark)
    assert looks["CapKV"].colour == style.colour("capkv", dark) != looks["CapKV (tau 1)"].colour
    assert looks["CapKV (tau 1)"].symbol == "circle-open" and looks["CapKV"].dash == looks["CapKV (tau 1)"].dash


def test_the_common_legend_names_every_policy_once():
    made = style.legend({"CapKV": "capkv", "<i>": "momentkv"})
    assert made.count("repeating-linear-gradient") == 2 and "&lt;i&gt;" in made and "<i>" not in made
    with_full = style.legend({"CapKV": "capkv", "<i>": "momentkv", "full cache": "full"})
    assert with_full.count("repeating-linear-gradient") == 3 and "full cache" in with_full
    assert style.colour("momentkv") in made and style.colour("momentkv", dark=True) in made


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.2345, "0.23"),
        (1402.0, "1,400"),
        (-0.00123, "\u22120.0012"),
        (0.996, "1.0"),
        (0, "0"),
        (12.3, "12"),
        (1e-7, "1.0e-07"),
    ],
)
def test_numbers_have_two_significant_digits(value, text):
    assert style.number(value) == text


def test_no_number_is_no_value():
    assert style.number(None) == style.number(float("nan")) == style.number(float("inf")) == "no value"
    assert style.number(0.23456, 3) == "0.235"
