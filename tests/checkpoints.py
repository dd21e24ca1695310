"""Tiny random models on disk: folders as transformers saves them, GGUF files as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests import tiny

MERGES = ["t h", "th e", "Ġ the", "Ġ Ġ", "1 2", "12 3", "Ċ Ċ"]
PLAIN, PACKED = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0


def random_model(config: PreTrainedConfig, model_class: type | None = None) -> torch.nn.Module:
    """A random model of `config`, the same one at every call."""
    torch.manual_seed(0)
    return (model_class(config) if model_class else AutoModelForCausalLM.from_config(config)).eval()


def save_folder(folder: Path, config: PreTrainedConfig, model_class: type | None = None) -> torch.nn.Module:
    """A random model and the byte tokenizer, saved as transformers does."""
    model = random_model(config, model_class)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return model


def logits(model: torch.nn.Module, n: int = 20) -> torch.Tensor:
    """Logits [n, vocabulary] of a fixed sequence."""
    with torch.no_grad():
        return model(torch.arange(10, 10 + n)[None]).logits[0].float()


def vocabulary(pre: str = "smollm", **more) -> dict:
    """Metadata of a GGUF file's tokenizer: three special tokens, 256 bytes, seven merges, one user-defined token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", "<|start|>", "<|stop|>", *letters, *(merge.replace(" ", "") for merge in MERGES), "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 4) + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m['content'] }}<|stop|>{% endfor %}",
    } | more


def save_gguf(
    file: Path,
    model: torch.nn.Module,
    meta: dict | None = None,
    drop: str = "",
    kind: gguf.GGMLQuantizationType = PLAIN,
) -> Path:
    """`model` as a GGUF file with its matrices stored as `kind`; `drop` names a tensor to leave out."""
    config, meta, arch = model.config, meta or vocabulary(), model.config.model_type
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_vocabulary(writer, meta)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        short = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if short == drop or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        array = _channels(tensor, short, config)
        stored = kind if array.ndim == 2 else PLAIN
        writer.add_tensor(short, gguf.quantize(array, stored), raw_dtype=stored)
    if config.rope_parameters["rope_type"] == "llama3":
        plain = config.rope_parameters["rope_theta"] ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _channels(tensor: torch.Tensor, short: str, config: PreTrainedConfig) -> np.ndarray:
    """A weight in llama.cpp's order of rotary channels."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(short.split(".")[-2])
    array = tensor.numpy()
    if config.model_type != "llama" or heads is None:
        return array
    return array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def _add_vocabulary(writer: gguf.GGUFWriter, meta: dict) -> None:
    writer.add_tokenizer_model(meta["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(meta["tokenizer.ggml.pre"])
    writer.add_token_list(meta["tokenizer.ggml.tokens"])
    writer.add_token_merges(meta["tokenizer.ggml.merges"])
    writer.add_token_types(meta["tokenizer.ggml.token_type"])
    writer.add_bos_token_id(meta["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(meta["tokenizer.ggml.eos_token_id"])
    writer.add_chat_template(meta["tokenizer.chat_template"])
