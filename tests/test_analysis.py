"""The pages' numbers: equal to plain loops over the printed formulas, to `decompose`, and to what `evict` really keeps."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

import kvviz
from kvviz import analysis
from kvviz.analysis import Pace, core
from kvviz.analysis.bounded import Bounded
from kvviz.capacity import capacity_curve, capacity_of_sets, joint_capacity, key_capacity, output_capacity
from kvviz.errors import decompose
from kvviz.evict import evict
from tests.reference import EVERY
from tests.test_decode import TEXT, state_of
from tests.test_evict import SETTINGS

CORRECTIONS = [
    ("capkv", {}),
    ("snapkv", {"correction": 0}),
    ("momentkv", {"window": 8}),
    ("momentkv", {"window": 8, "partition": 0.5}),
]


@pytest.fixture
def state(engine):
    return state_of(engine)


@pytest.fixture
def numbers(state):
    return analysis.of(state)


def plain(state, policy, kept, layer, head, partition=0.0):
    """Equations 3 to 12 of MomentKV for one query head, one probe at a time, float64 numpy."""
    own = state.layers[layer]
    group = head // own.groups
    K, V = (t[group].double().numpy() for t in (own.keys, own.values))
    rows = []
    for q in own.probes[head].double().numpy():
        logits = own.scaling * K @ q
        z = np.exp(logits)
        f, f_R, f_E = ((z[m, None] * V[m]).sum(0) / z[m].sum() for m in (kept | True, kept, ~kept))
        n, k_, v_ = (~kept).sum(), K[~kept].mean(0), V[~kept].mean(0)
        C = (V[~kept] - v_).T @ (K[~kept] - k_)
        order = 1 if policy.correction is None else policy.correction
        estimate = v_ + order * own.scaling / n * C @ q
        spread = (K[~kept] - k_).T @ (K[~kept] - k_) / n
        log_z = np.log(n) + own.scaling * q @ k_ + partition * own.scaling**2 / 2 * q @ spread @ q
        out = (z[kept].sum() * f_R + np.exp(log_z) * estimate) / (z[kept].sum() + np.exp(log_z))
        cos = f_R @ f_E / np.linalg.norm(f_R) / np.linalg.norm(f_E)
        size = np.linalg.norm(f)
        rows.append(
            {
                "w_E": z[~kept].sum() / z.sum(),
                "cos": cos,
                "angle": np.degrees(np.arccos(cos)),
                "gamma": np.linalg.norm(f_E - f_R) / size,
                "relative_error": np.linalg.norm(f - f_R) / size,
                "corrected_error": np.linalg.norm(f - out) / size,
                "log_z_gap": np.log(z[~kept].sum()) - log_z,
                "vectors": np.stack([f, f_R, f_E, estimate]),
            }
        )
    return {key: np.mean([row[key] for row in rows], axis=0) for key in rows[0]}


@pytest.mark.parametrize(("name", "options"), CORRECTIONS)
@pytest.mark.parametrize(("layer", "head"), [(0, 0), (2, 3)])
def test_a_head_in_numbers_is_the_papers_formulas(state, numbers, name, options, layer, head):
    policy = kvviz.policy(name, **options)
    view = numbers.head(policy, 24, layer, head)
    expected = plain(state, policy, view.kept, layer, head, policy.partition)
    for key in ("w_E", "cos", "angle", "gamma", "relative_error", "corrected_error", "log_z_gap"):
        assert getattr(view, key) == pytest.approx(expected[key], rel=2e-4, abs=2e-5), key
    assert view.probes == state.layers[layer].probes.shape[1] and view.real_probes
    assert view.corrects == (policy.correction is not None)
    assert view.order == (1 if policy.correction is None else policy.correction)


def test_arrows_are_means_seen_on_the_plane_of_all_values(state, numbers):
    policy = kvviz.policy("capkv")
    view = numbers.head(policy, 24, 1, 2)
    V = state.layers[1].values[1].double().numpy()
    centred = V - V.mean(0)
    _, sizes, axes = np.linalg.svd(centred, full_matrices=False)
    signs = np.sign((view.points * (centred @ axes[:2].T)).sum(0))
    plane = axes[:2] * signs[:, None]
    assert view.points == pytest.approx(centred @ plane.T, abs=1e-5)
    assert view.explained == pytest.approx((sizes**2 / (sizes**2).sum())[:2], rel=1e-5)
    assert view.origin == pytest.approx(-V.mean(0) @ plane.T, abs=1e-6)
    vectors = plain(state, policy, view.kept, 1, 2)["vectors"]
    for name, vector in zip(("f", "f_R", "f_E", "estimate"), vectors, strict=True):
        assert view.arrows[name] == pytest.approx((vector - V.mean(0)) @ plane.T, abs=1e-5), name


@pytest.mark.parametrize("budget", [4, 24, 60, 10_000])
def test_longer_arrows_still_end_inside_the_axes(numbers, budget):
    for head in range(4):
        view = numbers.head(kvviz.policy("keydiff"), budget, 1, head)
        assert view.scale >= 1
        for name in ("f", "f_R", "f_E"):
            x, y = view.origin + view.scale * (view.arrows[name] - view.origin)
            assert view.x_range[0] <= x <= view.x_range[1] and view.y_range[0] <= y <= view.y_range[1]


def test_only_membership_depends_on_policy_and_budget(numbers):
    views = [
        numbers.head(kvviz.policy(name), budget, 1, 0) for name in ("capkv", "keydiff", "full") for budget in (8, 50)
    ]
    for view in views[1:]:
        assert view.points is views[0].points
        assert (view.x_range, view.y_range) == (views[0].x_range, views[0].y_range)
    assert [view.n_kept for view in views] == [8, 50, 8, 50, view.n_tokens, view.n_tokens]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("budget", [1, 16, 40, 100_000])
@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_the_kept_set_is_what_evict_keeps(state, numbers, name, budget, setting):
    policy = kvviz.policy(name, **SETTINGS[setting])
    kept = evict(state, policy, budget)
    for index, layer in enumerate(kept.layers):
        mask = numbers.kept(policy, budget, index)
        for head, (_, _, positions) in enumerate(layer.heads()):
            assert np.flatnonzero(mask[head]).tolist() == positions.tolist()


def test_heads_of_a_slider_are_each_the_head_alone_as_long_as_there_is_time(state):
    numbers = analysis.Analysis(state)
    settings = [(kvviz.policy("capkv", tau=tau), budget) for tau in (0.0, 5.0) for budget in (1, 9, 16, 10_000)]
    settings.append((kvviz.policy("momentkv"), 12))
    for layer, head in ((0, 1), (1, 3)):
        pace = Pace(60)
        found = numbers.heads(settings, layer, head, pace)
        assert list(found) == settings and not pace.over
        for (each, budget), view in found.items():
            alone = analysis.Analysis(state).head(each, budget, layer, head)
            assert np.array_equal(view.kept, alone.kept) and view.label == each.label
            assert view.relative_error == pytest.approx(alone.relative_error, rel=1e-6)
    known, new, pace = settings[1], (kvviz.policy("keydiff", recent=3), 11), Pace(0)
    assert list(numbers.heads([new, known], 0, 1, pace)) == [known] and pace.over
    assert list(numbers.heads([known], 0, 1, complete := Pace(0))) == [known] and not complete.over


def test_curves_of_a_slider_are_each_the_curve_alone(state):
    numbers, alone = analysis.Analysis(state), analysis.Analysis(state)
    choices = [(kvviz.policy("capkv", tau=tau), kvviz.policy("keydiff")) for tau in (5.0, 4.0)]
    errors = numbers.errors_by_budget(choices, 1, 2, Pace(60))
    for only in (None, (1, 1)):
        found = numbers.capacities(choices, Pace(60), only)
        assert list(found) == list(errors) == choices
        for each, curves in found.items():
            other = alone.capacity(each) if only is None else alone.head_capacity(each, analysis.SHARES, *only)
            for label, values in other.shares.items():
                assert np.array_equal(curves.shares[label], values, equal_nan=True)
    for each, curves in errors.items():
        for label, values in alone.error_by_budget(each, None, 1, 2).errors.items():
            assert curves.errors[label] == pytest.approx(values, rel=1e-6)
    new = (kvviz.policy("capkv", tau=1.0),)
    assert numbers.capacities([new], Pace(0)) == numbers.errors_by_budget([new], 1, 2, Pace(0)) == {}


@pytest.mark.parametrize(("name", "options"), CORRECTIONS)
def test_the_map_is_decompose_over_all_probes_and_agrees_with_every_head(state, numbers, name, options, monkeypatch):
    policy = kvviz.policy(name, **options)
    data = numbers.error_map(policy, 20)
    for index, layer in enumerate(state.layers):
        parts = decompose(
            layer.probes,
            layer.keys,
            layer.values,
            torch.from_numpy(numbers.kept(policy, 20, index)),
            scaling=layer.scaling,
            order=1 if policy.correction is None else policy.correction,
            partition=policy.partition,
        )
        for key in ("relative_error", "w_E", "cos", "gamma", "corrected_error"):
            assert data[key][index] == pytest.approx(parts[key].mean(1).numpy(), rel=1e-5, abs=1e-7)
        assert data["log_z_gap"][index] == pytest.approx((parts.log_Z_E - parts.log_Zhat_E).mean(1).numpy(), abs=1e-4)
    for layer, head in ((0, 1), (3, 2)):
        view = numbers.head(policy, 20, layer, head)
        assert all(data[key][layer, head] == pytest.approx(getattr(view, key), rel=1e-4) for key in analysis.MEASURES)
    monkeypatch.setattr("kvviz.analysis.maps.PIECE", 2 * 4 * state.n_tokens)  # two probes at a time
    again = analysis.Analysis(state).error_map(policy, 20)
    for key in analysis.MEASURES:
        assert again[key] == pytest.approx(data[key], rel=1e-4, abs=1e-4)


def test_what_a_method_cannot_do_is_left_out():
    def make(number: int) -> int:
        if number == 2:
            raise ValueError("it needs what is not there")
        memory.add(number)
        return 10 * number

    memory: set[int] = set()
    assert core.in_time([3, 2, 1, 3], make, memory.__contains__, pace := Pace(60)) == {3: 30, 1: 10} and not pace.over
    calls: list[list[int]] = []
    core.in_time([1, *range(3, 20)], make, memory.__contains__, Pace(60), calls.append, 8)
    assert calls == [[4, 5], [6, 7, 8, 9], [*range(10, 18)], [18, 19]], "what is not in memory, more and more together"


def test_maps_of_a_slider_are_each_the_map_alone(state, monkeypatch):
    settings = [(kvviz.policy("momentkv", window=8, partition=0.5), budget) for budget in (20, 12, 33, 50, 9, 10_000)]
    numbers, alone = analysis.Analysis(state), analysis.Analysis(state)
    for pieces in (None, 2 * 4 * state.n_tokens):  # all probes, or two at a time
        if pieces:
            monkeypatch.setattr("kvviz.analysis.maps.PIECE", pieces)
            numbers = analysis.Analysis(state)
        found = numbers.error_maps(settings, Pace(60))
        assert list(found) == settings
        for setting, made in found.items():
            other = alone.error_map(*setting)
            assert (made.label, made.budget, made.probes) == (other.label, other.budget, other.probes)
            for key in analysis.MEASURES:
                assert made[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5, nan_ok=True)


def test_maps_of_a_slider_go_on_where_they_were_ended(state):
    numbers, settings = analysis.Analysis(state), [(kvviz.policy("capkv", tau=tau), 20) for tau in (1.0, 2.0, 3.0)]
    assert numbers.error_maps(settings, Pace(0)) == {}
    calls = []

    def give_way() -> None:
        calls.append(None)
        if len(calls) == 4:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        numbers.error_maps(settings, Pace(60, give_way))
    assert not numbers.holds(("map", *settings[0])) and numbers.holds(("layer errors", *settings[0], 1))
    assert list(numbers.error_maps(settings, Pace(60))) == settings
    assert list(numbers.error_maps([*settings, (kvviz.policy("oracle"), 9)], Pace(0))) == settings


def test_the_difference_map(numbers):
    one, two = (numbers.error_map(kvviz.policy(name), 20) for name in ("capkv", "keydiff"))
    assert np.array_equal(one.minus(two)["w_E"], one["w_E"] - two["w_E"])


def test_error_by_budget_is_the_heads_error_at_each_budget(state, numbers, monkeypatch):
    policies = [kvviz.policy("capkv"), kvviz.policy("momentkv", window=8)]
    curves = numbers.error_by_budget(policies, [8, 30, 60, 10_000], 2, 1)
    assert curves.budgets.tolist() == [8, 30, 60, state.n_tokens]
    for policy in policies:
        views = [numbers.head(policy, int(b), 2, 1) for b in curves.budgets]
        assert curves.errors[policy.label] == pytest.approx([v.relative_error for v in views], rel=1e-4, abs=1e-6)
        assert curves.corrected[policy.label] == pytest.approx([v.corrected_error for v in views], rel=1e-4, abs=1e-6)
        assert curves.policies[policy.label] == policy.name
    monkeypatch.setattr("kvviz.analysis.head.PIECE", 1)  # one budget at a time
    again = analysis.Analysis(state).error_by_budget(policies, curves.budgets, 2, 1)
    assert again.errors["CapKV"] == pytest.approx(curves.errors["CapKV"], rel=1e-5, abs=1e-7)


def test_nothing_evicted_is_no_error(state, numbers):
    for policy, budget in ((kvviz.policy("full"), 4), (kvviz.policy("capkv"), state.n_tokens)):
        view = numbers.head(policy, budget, 1, 1)
        assert view.kept.all() and view.w_E == 0 and view.relative_error == 0 and view.corrected_error == 0
        assert view.angle == pytest.approx(0, abs=0.1) and np.isnan(view.log_z_gap)
        data = numbers.error_map(policy, budget)
        assert not data["relative_error"].any() and np.isnan(data["log_z_gap"]).all()


def test_error_is_attention_lost_times_gap(state, numbers):
    own, policy = state.layers[1], kvviz.policy("snapkv", window=8)
    mask = torch.from_numpy(numbers.kept(policy, 20, 1))
    parts = decompose(own.probes, own.keys, own.values, mask, scaling=own.scaling)
    assert parts.relative_error == pytest.approx((parts.w_E * parts.gamma).numpy(), rel=1e-5)
    assert numbers.error_map(policy, 20)["relative_error"][1] == pytest.approx(
        (parts.w_E * parts.gamma).mean(1).numpy(), rel=1e-5
    )


def test_sliding_layers_are_left_out_of_maps_and_shown_whole(tiny_engine):
    state = state_of(tiny_engine("gemma3"))
    numbers, policy = analysis.of(state), kvviz.policy("capkv")
    data = numbers.error_map(policy, 12)
    assert data.sliding.tolist() == [True, False, True, False]
    assert np.isnan(data["w_E"][[0, 2]]).all() and np.isfinite(data["w_E"][[1, 3]]).all()
    view = numbers.head(policy, 12, 0, 1)
    assert view.sliding and view.kept.all() and view.n_tokens < state.n_tokens
    assert view.positions[-1] == state.n_tokens - 1 and len(view.positions) == view.n_tokens
    curves = numbers.capacity([policy])
    assert np.isnan(curves.shares["CapKV"][:, :, [0, 2]]).all()
    assert np.isfinite(curves.mean("CapKV")).all()
    assert np.isnan(numbers.head_capacity([policy], [0, 0.5], 0, 0).shares["CapKV"]).all()


def test_before_a_run_the_prompts_last_query_is_the_probe(engine):
    state = engine.prefill("A text that no other test reads, so that no run has left probes. " * 2)
    numbers = analysis.of(state)
    view = numbers.head(kvviz.policy("capkv"), 20, 1, 2)
    assert not numbers.real_probes and not view.real_probes and view.probes == 1
    q = state.layers[1].queries[2, -1:]
    parts = decompose(q, state.layers[1].keys[1], state.layers[1].values[1], torch.from_numpy(view.kept))
    assert view.relative_error == pytest.approx(float(parts.relative_error), rel=1e-5)


def test_of_many_probes_evenly_spaced_ones_are_taken(state, monkeypatch):
    monkeypatch.setattr(core, "MAX_PROBES", 3)
    numbers, own = analysis.Analysis(state), state.layers[0]
    count = own.probes.shape[1]
    assert count > 3
    assert torch.equal(numbers.probes(own), own.probes[:, [0, round((count - 1) / 2), count - 1]])


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("setting", [{}, {"allocation": "adaptive"}, {"allocation": "pyramid"}])
def test_capacities_are_those_of_the_kept_entries(state, numbers, name, setting):
    policy = kvviz.policy(name, **setting)
    shares = (0.0, 0.4, 0.8)
    curves = numbers.capacity([policy], shares)
    assert curves.removed == pytest.approx(1 - curves.budgets / state.n_tokens)
    assert (curves.shares[policy.label][:, 0] == 1).all()
    for layer, head, at in ((0, 0, 1), (3, 1, 2)):
        own, budget = state.layers[layer], int(curves.budgets[at])
        kept = torch.from_numpy(numbers.kept(policy, budget, layer)[head])
        K, V = own.keys[head], own.values[head]
        for row, of in enumerate((lambda K, V: key_capacity(K), lambda K, V: output_capacity(V), joint_capacity)):
            expected = float(of(K[kept], V[kept]) / of(K, V))
            alone = numbers.head_capacity([policy], shares, layer, head).at(policy.label, layer, head)
            assert alone[row, at] == pytest.approx(expected, rel=1e-8)
            found = curves.shares[policy.label][row, at, layer, head]
            assert found == pytest.approx(expected, rel=1e-8)
    point = numbers.capacity_at(policy, int(curves.budgets[2]))
    assert point == pytest.approx(curves.mean(policy.label)[:, 2])
    low, high = curves.quantiles(policy.label)
    assert (low <= high).all() and (curves.shares[policy.label] <= 1 + 1e-9).all()


def test_step_by_step_policies_have_every_second_point(numbers):
    stepwise = kvviz.policy("momentkv", window=8)
    once = kvviz.policy("momentkv", window=8, order_of_eviction="one batch")
    curves = numbers.capacity([stepwise, once], (0, 0.2, 0.4, 0.6, 0.8))
    assert np.isfinite(curves.mean(stepwise.label)[0]).tolist() == [True, True, False, True, True]
    assert np.isfinite(curves.mean(once.label)).all()
    alone = numbers.head_capacity([stepwise], (0, 0.2, 0.4, 0.6, 0.8), 1, 1)
    assert np.isfinite(alone.at(stepwise.label, 1, 1)).all()


def test_progress_is_told_layer_by_layer_while_there_is_work(state):
    numbers, told = analysis.Analysis(state), []
    for _ in range(2):
        numbers.capacity([kvviz.policy("keydiff")], (0.5,), progress=lambda *fact: told.append(fact))
    assert told == [(share, "KeyDiff") for share in (0.25, 0.5, 0.75, 1)]


def test_capacity_of_sets_that_are_not_nested():
    torch.manual_seed(0)
    K, V, sets = torch.randn(3, 40, 8), torch.randn(3, 40, 6), torch.rand(5, 3, 40) < 0.4
    found = capacity_of_sets(K, V, sets)
    for s in range(5):
        for h in range(3):
            kept = sets[s, h]
            expected = (key_capacity(K[h, kept]), output_capacity(V[h, kept]), joint_capacity(K[h, kept], V[h, kept]))
            assert found[:, s, h] == pytest.approx(torch.stack(expected).numpy(), rel=1e-9)
    order = torch.rand(3, 40).argsort(1)
    nested = torch.stack([torch.zeros(3, 40, dtype=torch.bool).scatter(1, order[:, :b], True) for b in (4, 9, 40)])
    assert capacity_of_sets(K, V, nested) == pytest.approx(capacity_curve(K, V, order, (4, 9, 40)).numpy(), rel=1e-9)


def test_spearman_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(0)
    for _ in range(20):
        x, y = generator.integers(0, 6, (2, 9)) / 2
        assert analysis.spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
    assert np.isnan(analysis.spearman([1, 2], [1, 2])) and np.isnan(analysis.spearman([1, 1, 1], [1, 2, 3]))


def test_steps_are_budgets_on_a_log_scale():
    assert analysis.steps(2048) == [16, 26, 42, 69, 111, 181, 294, 478, 776, 1261, 2048]
    assert analysis.steps(5) == [5] and analysis.steps(1) == [1]
    assert analysis.budgets_of((0, 0.5, 0.999, 1.0), 100) == [100, 50, 1]


def test_an_analysis_is_shared_and_leaves_with_its_state(engine):
    state = engine.prefill("A text that is read here and forgotten at once. " * 2)
    numbers = analysis.of(state)
    assert analysis.of(state) is numbers
    numbers.head(kvviz.policy("capkv"), 20, 1, 2)
    known = len(core._KNOWN)
    engine._states.pop(state.key)
    del state
    gc.collect()
    assert len(core._KNOWN) == known - 1
    with pytest.raises(RuntimeError, match="Read it again"):
        numbers.head(kvviz.policy("capkv"), 21, 1, 2)


def test_what_a_method_lacks_is_said(engine):
    state = engine.prefill("A text that was read without the attention that keys receive. " * 2)
    with pytest.raises(ValueError, match="attention_mass"):
        analysis.of(state).head(kvviz.policy("h2o"), 20, 0, 0)


def test_bounded_forgets_the_least_recently_used():
    made = []

    def make(name):
        return lambda: made.append(name) or np.zeros(100, np.uint8)

    store = Bounded(500)
    for name in "ab":
        store.get(name, make(name))
    store.get("a", make("again"))
    store.get("c", make("c"))  # 3 x 200 bytes: one must go, and it is b
    assert made == ["a", "b", "c"] and len(store) == 2 and store.bytes <= 500
    store.get("a", make("again"))
    store.get("b", make("b"))
    assert made == ["a", "b", "c", "b"]
    store.get("large", lambda: np.zeros(1000, np.uint8))
    assert len(store) == 1  # the newest stays, whatever its size


def test_caches_stay_within_their_bounds(state, monkeypatch):
    monkeypatch.setattr(core, "RESULT_BYTES", 20_000)
    monkeypatch.setattr(core, "MASK_BYTES", 5_000)
    numbers = analysis.Analysis(state)
    for budget in range(5, 60, 2):
        numbers.head(kvviz.policy("capkv"), budget, 1, 0)
    assert numbers._results.bytes <= 20_000 and numbers._masks.bytes <= 5_000


def test_tokens_are_made_visible(engine, numbers):
    texts = numbers.texts(engine.tokenizer.decode)
    assert len(texts) == len(TEXT) and "".join(texts) == TEXT.replace(" ", "·")
    assert [core.visible(t) for t in ("\n", " a", "")] == ["↵", "·a", "∅"]
