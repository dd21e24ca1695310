"""GGUF files: exact conversion, the tokenizer, the cache, and what is refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import gguf
import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen2Tokenizer, Qwen3Config

from kvviz.models import ModelError, load_model
from kvviz.models import gguf as conversion
from kvviz.models.vocabulary import build_tokenizer
from tests.checkpoints import PACKED, logits, random_model, save_gguf, vocabulary
from tests.tiny import SIZES

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SIZE = SIZES | {"vocab_size": len(vocabulary()["tokenizer.ggml.tokens"]), "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "llama": LlamaConfig(**SIZE),
    "tied": LlamaConfig(**SIZE, tie_word_embeddings=True),
    "llama3": LlamaConfig(**SIZE, rope_parameters=LLAMA3, head_dim=32),
    "qwen2": Qwen2Config(**SIZE),
    "qwen3": Qwen3Config(**SIZE, head_dim=32),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVVIZ_CACHE", str(folder))
    monkeypatch.delenv("KVVIZ_MODELS", raising=False)
    return folder


@pytest.fixture
def file(tmp_path):
    return save_gguf(tmp_path / "tiny.gguf", random_model(MODELS["llama"]))


def converted(cache):
    return [path for path in cache.iterdir() if path.is_dir()]


@pytest.mark.parametrize("kind", MODELS)
def test_conversion_is_exact(tmp_path, kind):
    model = random_model(MODELS[kind])
    file = save_gguf(tmp_path / "tiny.gguf", model)
    loaded = load_model(str(file), device="cpu")
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=1e-5, atol=1e-5)
    assert loaded.source == "gguf" and len(loaded.revision) == 64
    assert loaded.eos_ids == {2} and loaded.chat and loaded.positions == SIZE["max_position_embeddings"]


def test_quantised_weights(tmp_path):
    model = random_model(MODELS["llama"])
    file = save_gguf(tmp_path / "tiny.gguf", model, kind=PACKED)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.data = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.detach().numpy(), PACKED), PACKED))
    torch.testing.assert_close(logits(load_model(str(file), device="cpu").model), logits(model))


def test_large_models_come_in_shards_of_16_bits(file, cache, monkeypatch):
    monkeypatch.setattr(conversion, "_SHARD_BYTES", 50_000)
    monkeypatch.setattr(conversion, "_LARGE", 1000)
    loaded = load_model(str(file), device="cpu")
    (folder,) = converted(cache)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
    assert logits(loaded.model).isfinite().all()


# The tokenizer.


def pieces(pre, text):
    tokenizer = build_tokenizer(vocabulary(pre), 128)
    return [tokenizer.decode([i]) for i in tokenizer.encode(text)]


def test_splitting_rules():
    assert pieces("gpt-2", "123") == ["123"]
    assert pieces("llama-bpe", "1234")[1:] == ["123", "4"]
    assert pieces("qwen2", "123") == pieces("smollm", "123") == ["1", "2", "3"]
    assert pieces("smollm", " the") == [" the"]


@pytest.mark.parametrize("text", ["the 123 the\n\n  the's", "I'M é\u0301 中文 ²½", "a\t \r\n\r\n  b "])
def test_same_ids_as_transformers_for_qwen2(text):
    meta = vocabulary("qwen2")
    ids = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    theirs = Qwen2Tokenizer(vocab=ids, merges=[tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]])
    assert build_tokenizer(meta, 128).encode(text) == theirs.encode(text)


def test_special_tokens():
    tokenizer = build_tokenizer(vocabulary(), 128)
    ids = tokenizer.encode("<|start|>the<tool><|stop|>")
    assert ids[0] == 1 and ids[-1] == 2 and tokenizer.decode(ids) == "<|start|>the<tool><|stop|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the<tool>"
    assert build_tokenizer(vocabulary("llama-bpe"), 128).encode("the")[0] == 1  # Llama 3 begins with BOS
    without = vocabulary("llama-bpe") | {"tokenizer.ggml.add_bos_token": False}
    assert build_tokenizer(without, 128).encode("the")[0] != 1


# What is refused.


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer is of kind 'llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"tokenizer.ggml.merges": ["the nothing"]}, "broken vocabulary"),
    ],
)
def test_other_tokenizers(tmp_path, meta, reason):
    model = random_model(MODELS["llama"])
    file = save_gguf(tmp_path / "tiny.gguf", model, vocabulary() | meta)
    with pytest.raises(ModelError, match=reason):
        load_model(str(file))


def test_other_architectures(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'mamba'"):
        load_model(str(tmp_path / "other.gguf"))


def test_unknown_rotary_scaling(tmp_path):
    odd = LLAMA3 | {"low_freq_factor": 2.0}
    model = random_model(LlamaConfig(**SIZE, rope_parameters=odd, head_dim=64))
    file = save_gguf(tmp_path / "tiny.gguf", model)
    with pytest.raises(ModelError, match="scales its rotary positions"):
        load_model(str(file))


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 500, b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64])
def test_not_a_gguf_file(tmp_path, content):
    file = tmp_path / "binary.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        load_model(str(file))


def test_truncated_file(file):
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        load_model(str(file))


def test_missing_tensor(tmp_path):
    model = random_model(MODELS["llama"])
    file = save_gguf(tmp_path / "tiny.gguf", model, drop="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"lacks 1 tensors, model\.layers\.1\.mlp\.up_proj"):
        load_model(str(file))


# The cache.


def test_converted_once(file, cache, monkeypatch):
    first = load_model(str(file), device="cpu")
    monkeypatch.setattr(conversion, "_make", lambda *_: pytest.fail("converted twice"))
    assert load_model(str(file), device="cpu").revision == first.revision
    assert len(converted(cache)) == 1


def test_many_at_once_convert_once(file, cache, monkeypatch):
    made = []
    real = conversion._make
    monkeypatch.setattr(conversion, "_make", lambda *arguments: made.append(1) or real(*arguments))
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: conversion.convert(file, lambda *_: None), range(4)))
    assert len(folders) == 1 and len(made) == 1


@pytest.mark.parametrize("harm", ["truncated", "file missing", "no record", "empty"])
def test_half_written_folder_is_never_used(file, cache, harm):
    expected = logits(load_model(str(file), device="cpu").model)
    (folder,) = converted(cache)
    weights = folder / "model-00001.safetensors"
    if harm == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif harm == "file missing":
        weights.unlink()
    elif harm == "no record":
        (folder / "kvviz.json").unlink()
    else:
        for path in folder.iterdir():
            path.unlink()
    assert torch.equal(logits(load_model(str(file), device="cpu").model), expected)


def test_cancelled_conversion_leaves_nothing(file, cache):
    def cancel(fraction, text):
        if fraction > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_model(str(file), device="cpu", progress=cancel)
    assert converted(cache) == []


def test_changed_file_is_converted_again(tmp_path, file, cache):
    before = load_model(str(file), device="cpu")
    torch.manual_seed(1)
    model = random_model(LlamaConfig(**SIZE, rope_parameters={"rope_type": "default", "rope_theta": 999.0}))
    file.unlink()
    after = load_model(str(save_gguf(file, model)), device="cpu")
    assert after.revision != before.revision and len(converted(cache)) == 2


def test_progress_runs_forward(file):
    seen = []
    load_model(str(file), device="cpu", progress=lambda fraction, text: seen.append((fraction, text)))
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions) and fractions[0] == 0.0 and fractions[-1] == 1.0
    assert sum("tensor" in text for _, text in seen) > 10


def test_cache_that_cannot_be_written(file, tmp_path, monkeypatch):
    (tmp_path / "occupied").write_text("a file, not a folder")
    monkeypatch.setenv("KVVIZ_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(ModelError, match="set KVVIZ_CACHE to another folder"):
        load_model(str(file))
