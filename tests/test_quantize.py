"""4-bit storage: HQQ's own numbers, real bytes, free to combine, and entries that are quantised once."""

import pytest
import torch

import kvviz
from kvviz.cache import RowCache
from kvviz.decode import forward
from kvviz.evict import evict
from kvviz.live import Live
from kvviz.quantize import Quantized
from tests.reference import EVERY, run
from tests.test_decode import QUESTION, state_of


@pytest.mark.parametrize("shape", [(1, 16), (7, 64), (300, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_hqq_library(shape, dtype):
    from hqq.core.quantize import Quantizer

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    stored = Quantized.of(x)
    group = min(64, shape[1])
    codes, meta = Quantizer.quantize(
        x.float(), nbits=4, group_size=group, axis=1, bitpack=False, device="cpu", compute_dtype=torch.float32
    )
    own = Quantizer.dequantize(codes, meta).to(dtype)
    torch.testing.assert_close(stored.dequantize(), own, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=5e-2)
    assert stored.dequantize().dtype == dtype and stored.shape == shape
    size = torch.empty((), dtype=dtype).element_size()
    assert stored.nbytes == shape[0] * (shape[1] // 2 + 2 * size * shape[1] // group)


def test_parts_are_kept_as_they_are():
    stored = Quantized.of(torch.randn(20, 32))
    whole = stored.dequantize()
    rows = torch.tensor([1, 5, 19])
    torch.testing.assert_close(stored[rows].dequantize(), whole[rows])
    torch.testing.assert_close(torch.cat([p.dequantize() for p in stored.split([3, 0, 17])]), whole)
    torch.testing.assert_close(Quantized.cat([stored[:4], stored[4:]]).dequantize(), whole)


def test_keys_with_large_offsets_lose_quality_and_nothing_else():
    """transformers #35185."""
    x = torch.randn(50, 64) + 100 * (torch.arange(64) == 3)
    back = Quantized.of(x).dequantize()
    assert torch.isfinite(back).all() and (back - x).abs().max() < 15


@pytest.mark.parametrize("shape", [(4, 63), (4, 96)])
def test_head_sizes_that_do_not_fit(shape):
    with pytest.raises(ValueError, match="head size"):
        Quantized.of(torch.zeros(shape))


@pytest.mark.parametrize("name", [n for n in EVERY if n != "oracle"])
def test_every_policy_in_four_bits(engine, name):
    state = state_of(engine)
    plain, stored = (evict(state, kvviz.policy(name, bits=bits), 16) for bits in (None, 4))
    per_entry = 16 // 2 + 2 * 4
    assert stored.kv_bytes == 2 * 4 * 2 * 16 * per_entry
    for a, b in zip(plain.layers, stored.layers, strict=True):
        assert torch.equal(a.positions, b.positions) and a.counts == b.counts
        torch.testing.assert_close(b.keys.dequantize(), a.keys, rtol=0, atol=0.5)
    more = torch.tensor([[5, 9, 77]])
    logits = [forward(engine.model, RowCache([kept], 3), more, all_logits=True) for kept in (plain, stored)]
    assert 0 < (logits[0] - logits[1]).abs().max() < 0.5 * logits[0].abs().max()


def test_four_bits_equal_the_same_numbers_in_full(engine):
    """Decoding from codes is decoding from their dequantised values."""
    from dataclasses import replace

    state = state_of(engine)
    for name in ("capkv", "momentkv"):
        stored = evict(state, kvviz.policy(name, bits=4), 16)
        full = [replace(p, keys=p.keys.dequantize(), values=p.values.dequantize()) for p in stored.layers]
        more = torch.tensor([[5, 9, 77]])
        a = forward(engine.model, RowCache([stored], 3), more, all_logits=True)
        b = forward(engine.model, RowCache([replace(stored, layers=tuple(full))], 3), more, all_logits=True)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_in_a_run_beside_the_others_and_while_decoding(engine):
    state = state_of(engine)
    policies = [
        kvviz.policy("snapkv", window=4),
        kvviz.policy("snapkv", window=4, bits=4),
        kvviz.policy("full", bits=4),
    ]
    result = run(engine, state, QUESTION, policies, 16, max_new_tokens=8)
    assert [row.label for row in result.rows] == [
        "Full cache",
        "SnapKV (window 4)",
        "SnapKV (window 4, 4 bits)",
        "Full cache (4 bits)",
    ]
    assert result.rows[2].bytes < result.rows[1].bytes and result.rows[3].bytes < result.rows[0].bytes
    assert result.rows[3].entries == state.n_tokens
    live = run(engine, state, QUESTION, policies[:2], 16, max_new_tokens=20, evict_every=4, stop=False)
    assert max(live.rows[2].entries_by_step) <= 20 + len(QUESTION)


def test_an_entry_is_quantised_once(engine):
    state = state_of(engine)
    cache = RowCache([evict(state, kvviz.policy("keydiff", bits=4), 16)], 40, Live(1, (16,)), state)
    seen = {}
    for step in range(12):
        forward(engine.model, cache, torch.tensor([[step * 7]]))
        for index, (layer, live) in enumerate(zip(cache.layers, cache.lives, strict=True)):
            for head, ((block, i), positions) in enumerate(zip(layer.row(0), live.positions(0), strict=True)):
                keys = block.contents()[0][i]
                for position, key in zip(positions.tolist(), keys, strict=True):
                    old = seen.setdefault((index, head, position), key.clone())
                    assert torch.equal(old, key)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("correction", [None, 1])
def test_equal_bytes(engine, bits, correction):
    """At equal bytes, statistics, scales and zeros are counted."""
    from kvviz.evict import entries_within

    state = state_of(engine)
    policy = kvviz.policy("snapkv", window=4, bits=bits, correction=correction)
    for size in (40_000, 60_000):
        entries = entries_within(state, policy, size)
        assert evict(state, policy, entries).bytes <= size
        if entries < state.n_tokens:
            assert evict(state, policy, entries + 1).bytes > size or entries + 1 == state.n_tokens
