"""Tiny random models of every supported family, with a byte tokenizer: whole paths in milliseconds, no download."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

SIZES = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "initializer_range": 0.15,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}

FAMILIES = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama3-rope": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "yarn-rope": lambda: LlamaConfig(**SIZES, rope_parameters=YARN),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "phi3": lambda: Phi3Config(**SIZES),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
}

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, 256 and 257 begin and end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)} | {
        "<|begin|>": 256,
        "<|end|>": 257,
        "<|a|>": 258,
        "<|b|>": 259,
    }
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|begin|>", "<|end|>"])
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|end|>"
    )
    made.chat_template = TEMPLATE
    return made


def model(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32):
    """A random model of a family, in evaluation mode."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype, attn_implementation="sdpa")
    return made.eval().requires_grad_(False)


def prompt_ids(n: int, seed: int = 0) -> list[int]:
    """n random byte tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), generator=generator).tolist()
