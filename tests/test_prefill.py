"""The prefill: the model's own forward, and everything that is caught on the way."""

import pytest
import torch

from kvviz.prefill import prefill, rotaries
from tests import tiny


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_equals_the_models_own_forward(tiny_engine, family):
    model, ids = tiny_engine(family).model, tiny.prompt_ids(60)
    out = model(torch.tensor([ids]), use_cache=True)
    state = prefill(model, ids)
    torch.testing.assert_close(state.logits, out.logits[0, -1], rtol=1e-4, atol=1e-4)
    for layer, own in zip(state.layers, out.cache.layers, strict=True):
        stored = layer.keys.shape[1]
        assert stored == (min(60, model.config.sliding_window) if layer.sliding else 60)
        n = min(stored, own.keys.shape[2])
        torch.testing.assert_close(layer.keys[:, -n:], own.keys[0, :, -n:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.values[:, -n:], own.values[0, :, -n:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_chunks_change_nothing(tiny_engine, family, chunk):
    model, ids = tiny_engine(family).model, tiny.prompt_ids(40)
    whole, pieces = prefill(model, ids, want_mass=True), prefill(model, ids, want_mass=True, chunk=chunk)
    torch.testing.assert_close(whole.logits, pieces.logits, rtol=1e-4, atol=1e-4)
    for a, b in zip(whole.layers, pieces.layers, strict=True):
        for name in ("keys", "values", "queries", "query_mean", "query_cov", "attention_mass"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_query_statistics_are_of_the_queries_before_rope(tiny_engine, family):
    """Caught by a hook where the family makes them: after the projection (and QK-norm), before RoPE."""
    model, ids, caught = tiny_engine(family).model, tiny.prompt_ids(50), {}
    hooks = []
    for index, block in enumerate(model.model.layers):
        attention = block.self_attn
        source = (
            attention.q_norm
            if hasattr(attention, "q_norm")
            else getattr(attention, "q_proj", None) or attention.qkv_proj
        )
        hooks.append(source.register_forward_hook(lambda _m, _i, out, index=index: caught.__setitem__(index, out)))
    state = prefill(model, ids)
    for hook in hooks:
        hook.remove()
    for layer in state.layers:
        heads, d = layer.query_mean.shape
        out = caught[layer.index]
        # plain projections are [1, T, H d]; QK-norm sees [1, T, H, d] or [1, H, T, d]
        before = out[..., : heads * d].view(50, heads, d).transpose(0, 1) if out.dim() == 3 else out[0]
        before = before.transpose(0, 1) if before.shape[0] == 50 else before
        torch.testing.assert_close(layer.query_mean, before[:, 4:].mean(1), rtol=1e-4, atol=1e-5)
        spread = before[:, 4:] - before[:, 4:].mean(1, keepdim=True)
        torch.testing.assert_close(layer.query_cov, spread.mT @ spread / 46, rtol=1e-4, atol=1e-5)


def test_mass_is_the_triangular_sum(engine):
    """KVCache-Factory #49: the causal mask must hold everywhere, not only inside a window."""
    model, ids = engine.model, tiny.prompt_ids(33)
    state = prefill(model, ids, want_mass=True, chunk=10)
    model.set_attn_implementation("eager")
    try:
        weights = model(torch.tensor([ids]), output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    for layer, own in zip(state.layers, weights, strict=True):
        expected = own[0].sum(1).view(2, 2, 33).mean(1)
        torch.testing.assert_close(layer.attention_mass, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_short_prompts(engine, n):
    state = prefill(engine.model, tiny.prompt_ids(n), want_mass=True)
    assert state.n_tokens == n
    assert all(torch.isfinite(layer.query_cov).all() and layer.keys.shape[1] == n for layer in state.layers)


def test_progress_reaches_the_end_and_can_cancel(engine):
    shares = []
    prefill(engine.model, tiny.prompt_ids(40), progress=lambda share, text: shares.append(share), chunk=16)
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) == 3 * 4

    def stop(share, text):
        if share > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefill(engine.model, tiny.prompt_ids(40), progress=stop)
    assert engine.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["llama", "llama3-rope", "yarn-rope", "gemma3"])
def test_rotations_undo_each_other_and_average(tiny_engine, family):
    x, positions = torch.randn(3, 20, 16), torch.arange(100, 120)
    for rotary in rotaries(tiny_engine(family).model):
        turned = rotary.rotate(x, positions)
        torch.testing.assert_close(rotary.unrotate(turned, positions), x, rtol=1e-4, atol=1e-5)
        same = x[:, :1].expand(-1, 20, -1)
        expected = rotary.rotate(same, positions).mean(1)
        torch.testing.assert_close(same[:, 0] @ rotary.mean_matrix(100, 20, 16).T, expected, rtol=1e-4, atol=1e-5)
