"""A GGUF file's vocabulary and merges -> a tokenizer.

transformers builds a wrong one from some GGUF files (SmolLM2's spaces become `<|endoftext|>`), so kvviz builds it with
the `tokenizers` library: byte-level BPE, split into words first by the rule that the file names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvviz.models.errors import ModelError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_CONTROL, _USER_DEFINED = 3, 4  # token types of the GGUF format


def _splitter(pre: str) -> pre_tokenizers.PreTokenizer:
    """How text is split into words before any merge, by the rule's name in llama.cpp."""
    rules = {"gpt-2": _GPT2, "smollm": _GPT2, "qwen2": _QWEN2, "llama-bpe": _LLAMA3}
    if pre not in rules:
        raise ModelError(
            f"the GGUF file's pre-tokenizer {pre!r} is not supported ({', '.join(rules)} are). "
            "Name the model's Hugging Face id or a safetensors folder."
        )
    steps = [pre_tokenizers.Split(Regex(rules[pre]), behavior="isolated")]
    if pre == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def build_tokenizer(meta: Mapping[str, Any], max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file's metadata describes, chat template included.

    Raises ModelError where the file has another kind of vocabulary or its lists do not fit together.
    """
    kind = meta.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"the GGUF file's tokenizer is of kind {kind!r}, and only byte-level BPE ('gpt2') is supported. "
            "Name the model's Hugging Face id or a safetensors folder."
        )
    pre = meta.get("tokenizer.ggml.pre", "unnamed")
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    bpe = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _splitter(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    types = meta.get("tokenizer.ggml.token_type", [])
    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [t for t, kind in zip(tokens, types, strict=False) if kind == wanted]
        tokenizer.add_tokens([AddedToken(t, special=special, normalized=False) for t in added])
    names = _special_tokens(meta, tokens)
    if meta.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token" in names:
        bos = names["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokens.index(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=meta.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        **names,
    )


def _special_tokens(meta: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    """The beginning, end, unknown and padding token, those of them that the file names."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: meta.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None}
