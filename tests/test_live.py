"""Eviction while decoding: against a naive loop, bounded, and with positions that go on counting."""

import pytest
import torch
from transformers import AttentionInterface

import kvviz
from kvviz.cache import RowCache
from kvviz.decode import decode, forward
from kvviz.evict import evict
from kvviz.live import Live
from tests.reference import EVERY, run
from tests.test_decode import QUESTION, TEXT, state_of

LIVE = [name for name in EVERY if name != "oracle"]


class Naive:
    """One entry a step, entry by entry: dictionaries of plain vectors for each layer and KV head. No shared code."""

    def __init__(self, state, kept, budget, method, order=None, sinks=0, recent=0):
        self.budget, self.method, self.order = budget, method, order
        self.sinks, self.recent = sinks, recent
        self.heads, self.gone = {}, {}
        for index, layer in enumerate(kept.layers):
            for head, (keys, values, positions) in enumerate(layer.heads()):
                mass = state.layers[index].attention_mass[head]
                cells = [
                    {"p": int(p), "k": k.double(), "v": v.double(), "m": float(mass[p])}
                    for k, v, p in zip(keys, values, positions, strict=True)
                ]
                self.heads[index, head] = cells
                source = state.layers[index]
                out = [i for i in range(state.n_tokens) if i not in set(positions.tolist())]
                self.gone[index, head] = [(source.keys[head, i].double(), source.values[head, i].double()) for i in out]
        self.position = state.n_tokens

    def __call__(self, module, query, key, value, attention_mask=None, scaling=None, **_):
        layer, groups = module.layer_idx, query.shape[1] // key.shape[1]
        output = torch.zeros(1, 1, query.shape[1], value.shape[-1])
        for head in range(key.shape[1]):
            cells = self.heads[layer, head]
            cells.append({"p": self.position, "k": key[0, head, 0].double(), "v": value[0, head, 0].double(), "m": 0.0})
            queries = query[0, head * groups : (head + 1) * groups, 0].double()
            while len(cells) > self.budget:
                worst = min(self.free(cells), key=lambda i: self.score(layer, head, i, queries, scaling))
                dropped = cells.pop(worst)
                self.gone[layer, head].append((dropped["k"], dropped["v"]))
            for i, q in enumerate(queries):
                weights = torch.stack([(q @ c["k"] * scaling) for c in cells]).exp()
                for cell, weight in zip(cells, weights / weights.sum(), strict=True):
                    cell["m"] += float(weight) / groups
                f = sum(w * c["v"] for w, c in zip(weights, cells, strict=True)) / weights.sum()
                output[0, 0, head * groups + i] = self.correct(layer, head, q, f, weights.sum(), scaling)
        return output, None

    def free(self, cells):
        return [i for i in range(len(cells)) if i >= self.sinks and i < len(cells) - self.recent]

    def moments(self, layer, head):
        gone = self.gone[layer, head]
        keys, values = torch.stack([k for k, _ in gone]), torch.stack([v for _, v in gone])
        spread = sum(torch.outer(v, k - keys.mean(0)) for k, v in gone)
        return len(gone), keys.mean(0), values.mean(0), spread

    def score(self, layer, head, i, queries, scaling):
        cells = self.heads[layer, head]
        if self.method == "h2o":
            return cells[i]["m"]
        if self.method == "keydiff":
            unit = torch.stack([c["k"] / c["k"].norm() for c in cells])
            return float(-unit[i] @ unit.mean(0) / unit.mean(0).norm())
        n, k_mean, v_mean, spread = self.moments(layer, head)
        weights = [torch.stack([q @ c["k"] * scaling for c in cells]).softmax(0)[i] for q in queries]
        residual = cells[i]["v"] - v_mean - spread @ (cells[i]["k"] - k_mean) * scaling / n
        return float(sum(weights) / len(weights) * residual.norm())

    def correct(self, layer, head, q, f, z, scaling):
        if self.order is None:
            return f
        n, k_mean, v_mean, spread = self.moments(layer, head)
        estimate = v_mean + (spread @ q * scaling / n if self.order else 0)
        z_gone = n * (q @ k_mean * scaling).exp()
        return (z * f + z_gone * estimate) / (z + z_gone)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("h2o", {"recent": 3}),
        ("keydiff", {"sinks": 2}),
        ("momentkv", {"allocation": "uniform", "recent": 4, "correction": None}),
        ("momentkv", {"allocation": "uniform", "recent": 4, "correction": 1}),
        ("momentkv", {"allocation": "uniform", "recent": 4, "correction": 0}),
    ],
)
def test_one_entry_a_step_equals_a_naive_loop(engine, name, options):
    state, budget = state_of(engine), 14
    policy = kvviz.policy(name, **options)
    kept = evict(state, policy, budget)
    naive = Naive(state, kept, budget, name, policy.correction, policy.sinks, int(policy.recent))
    AttentionInterface.register("naive", naive)
    config, tokens = engine.model.config, [5, 9, 77, 200, 13, 64, 5, 9]
    cache = RowCache([kept], len(tokens), Live(1, (budget,)), state)
    for token in tokens:
        config._attn_implementation = "naive"
        try:
            with torch.no_grad():
                expected = engine.model(
                    torch.tensor([[token]]), position_ids=torch.tensor([[naive.position]]), use_cache=False
                ).logits[0, -1]
        finally:
            config._attn_implementation = "sdpa"
        naive.position += 1
        logits = forward(engine.model, cache, torch.tensor([[token]]))[0]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    for (layer, head), cells in naive.heads.items():
        assert cache.lives[layer].positions(0)[head].tolist() == [c["p"] for c in cells]


@pytest.mark.parametrize("name", LIVE)
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("budget", [16, 80])
def test_the_cache_stays_within_its_budget(engine, name, every, budget):
    """At a budget below and above the prompt: never more than budget + every, memory constant, protected entries kept."""
    state, policy, steps = state_of(engine), kvviz.policy(name, sinks=2, recent=4), 40
    kept = evict(state, policy, budget)
    cache = RowCache([kept], steps + 200, Live(every, (budget,)), state)
    peak = 0
    for step in range(steps):
        forward(engine.model, cache, torch.tensor([[step]]))
        peak = max(peak, cache.bytes)
        assert cache.entries(0) <= budget + every
        assert len(cache.held(0)) == cache.entries(0) * 8
    assert cache.entries(0) >= min(budget, state.n_tokens + steps)
    assert peak <= 2 * 4 * 2 * 16 * 4 * (max(budget, min(budget, state.n_tokens)) + every + 2)
    for live in cache.lives:
        for positions in live.positions(0):
            assert torch.equal(positions, positions.unique()) and positions[-1] == state.n_tokens + steps - 1
            if not policy.correction and budget < state.n_tokens:
                assert {0, 1} <= set(positions.tolist())


def test_without_an_eviction_nothing_changes(engine):
    """An interval longer than the generation gives what plain decoding gives, and the same divergences."""
    state, policies = state_of(engine), [kvviz.policy(n) for n in ("capkv", "momentkv", "h2o")]
    plain = run(engine, state, QUESTION, policies, 16, max_new_tokens=10)
    live = run(engine, state, QUESTION, policies, 16, max_new_tokens=10, evict_every=500)
    for a, b in zip(plain.rows, live.rows, strict=True):
        assert a.token_ids == b.token_ids
        if b.policy != "full":
            torch.testing.assert_close(torch.tensor(a.kl), torch.tensor(b.kl), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("fits", [False, True])
def test_statistics_count_also_where_the_prompt_fitted(engine, fits):
    state, chosen = state_of(engine), [kvviz.policy("momentkv", window=8), kvviz.policy("keydiff")]
    budget = state.n_tokens + 10 if fits else 20
    row, none = run(engine, state, QUESTION, chosen, budget, max_new_tokens=40, evict_every=8, stop=False).rows[1:]
    heads, d = 4 * 2, 16
    assert row.moments_bytes == heads * (d * d + 2 * d + 1) * 4 and none.moments_bytes == 0


@pytest.mark.parametrize("every", [1, 8])
def test_a_run_says_what_was_held(engine, every):
    state = state_of(engine)
    result = run(
        engine,
        state,
        QUESTION,
        [kvviz.policy("keydiff", recent=4)],
        20,
        max_new_tokens=60,
        evict_every=every,
        stop=False,
    )
    full, row = result.rows
    follow = len(kvviz.prompts.encode_question(engine.tokenizer, QUESTION, ""))
    assert full.entries_by_step == [state.n_tokens + follow + i for i in range(60)]
    assert max(row.entries_by_step) <= 20 + every + follow and row.entries_by_step[-1] <= 20 + every
    assert row.bytes_by_step[-1] == row.entries_by_step[-1] * 4 * 2 * 2 * 16 * 4
    assert len(row.kl) == 60 and all(k >= 0 for k in row.kl)
    total = state.n_tokens + follow + 60
    for number, shares in zip(row.raster_steps, row.raster, strict=True):
        bins = len(shares)
        sizes = torch.bincount(torch.arange(total) * bins // total, minlength=bins)
        assert (torch.tensor(shares) * sizes).sum().item() == pytest.approx(row.entries_by_step[number], abs=0.1)


def test_the_divergence_follows_the_full_caches_words(engine):
    """A shadow that reads the full cache's output: the same as decoding that output by hand."""
    state, policy = state_of(engine), kvviz.policy("keydiff")
    result = run(engine, state, QUESTION, [policy], 12, max_new_tokens=12, evict_every=1, stop=False)
    follow = kvviz.prompts.encode_question(engine.tokenizer, QUESTION, "")
    words = result.reference.token_ids
    full, kept = evict(state, kvviz.policy("full"), 1), evict(state, policy, 12)
    plain, live = RowCache([full], 200), RowCache([kept], 200, Live(1, (12,), len(follow)), state)
    expected = []
    for piece in [follow, *[[w] for w in words[:-1]]]:
        a, b = (forward(engine.model, cache, torch.tensor([piece])) for cache in (plain, live))
        expected.append(kvviz.metrics.kl_divergence(a, b).item())
    assert result.rows[1].kl == pytest.approx(expected, abs=1e-5)


def test_rows_that_end_leave_and_the_rest_goes_on(engine):
    """Rows leave a live batch; the others write what they write alone."""
    state = state_of(engine)
    policies = [kvviz.policy("random", seed=s, correction=1) for s in range(3)]
    free = run(engine, state, QUESTION, policies, 14, max_new_tokens=24, evict_every=3, stop=False)
    ends = frozenset({free.rows[1].token_ids[2], free.rows[2].token_ids[9]})
    kept = [evict(state, p, n) for p, n in [(kvviz.policy("full"), 1), *[(p, 14) for p in policies]]]
    follow = kvviz.prompts.encode_question(engine.tokenizer, QUESTION, "")
    cache = RowCache(kept, 200, Live(3, (14,) * 4, len(follow)), state)
    written = {i: [] for i in range(4)}
    for step in decode(engine.model, cache, follow, state.logits, max_new_tokens=24, eos=ends):
        for row, token in step.tokens.items():
            written[row].append(token)
    for row, tokens in written.items():
        assert tokens == free.rows[row].token_ids[: len(tokens)]
        assert tokens[-1] in ends or len(tokens) == 24
    assert len({len(t) for t in written.values()}) > 1


def test_sliding_layers_are_left_alone(tiny_engine):
    engine = tiny_engine("gemma3")
    state = state_of(engine)
    result = run(engine, state, QUESTION, [kvviz.policy("capkv")], 12, max_new_tokens=20, evict_every=2, stop=False)
    assert max(result.rows[1].entries_by_step) <= 14 + len(QUESTION)
    cache = RowCache([evict(state, kvviz.policy("capkv"), 12)], 40, Live(2, (12,)), state)
    assert [live is None for live in cache.lives] == [layer.sliding for layer in state.layers]


@pytest.mark.parametrize(("every", "message"), [(0, "every 1 or more"), (-3, "every 1 or more")])
def test_bad_intervals(engine, every, message):
    with pytest.raises(ValueError, match=message):
        run(engine, engine.prefill(TEXT), QUESTION, [kvviz.policy("sink")], 8, max_new_tokens=2, evict_every=every)


def test_the_oracle_says_that_it_cannot(engine):
    with pytest.raises(ValueError, match="cannot evict while decoding"):
        run(engine, state_of(engine), QUESTION, [kvviz.policy("oracle")], 8, max_new_tokens=2, evict_every=4)


@pytest.mark.parametrize("name", ["observed_attention", "random"])
def test_new_entries_get_their_chance(engine, name):
    """An entry that nobody could attend to yet is not the first to go, and lots are drawn for positions, not slots."""
    state = state_of(engine)
    cache = RowCache([evict(state, kvviz.policy(name, sinks=0, recent=0), 16)], 40, Live(1, (16,)), state)
    for step in range(30):
        forward(engine.model, cache, torch.tensor([[step * 5]]))
    held = cache.held(0)
    late = held[held >= state.n_tokens]
    assert 5 < len(late) < len(held) and late.unique().numel() > 5
    if name == "random":
        assert len(held[held < state.n_tokens]) > 5 and held[held < state.n_tokens].max() > state.n_tokens // 2
