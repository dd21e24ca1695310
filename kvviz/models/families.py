"""Which architectures kvviz supports, and why it refuses the others.

kvviz replaces the attention function and keeps its own cache, so it needs, in every layer, softmax attention over
cached keys that were rotated by RoPE. A model that does something else would be evicted wrongly in silence; it is
refused.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from kvviz.models.errors import ModelError, brief

_FAMILIES = {
    "llama": "Llama 2 and 3, SmolLM2, TinyLlama and others of their shape",
    "mistral": "Mistral 7B, Ministral, Mistral Nemo",
    "qwen2": "Qwen2 and Qwen2.5",
    "qwen3": "Qwen3 (dense)",
    "phi3": "Phi-3, Phi-4 and Phi-4-mini",
    "gemma3_text": "Gemma 3, text only",
    "gemma3": "Gemma 3, of which the text part is loaded",
}

_NO_CACHE = "keeps a recurrent state in place of keys and values, so there is nothing to evict"
_HYBRID = "has layers without attention between its attention layers"
_LATENT = "keeps a compressed latent (MLA) in place of keys and values for each head"
_ABSOLUTE = "has absolute positions in place of rotary ones"
_ENCODER = "is an encoder: it keeps no cache"
_REASONS = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _NO_CACHE),
    **dict.fromkeys(("jamba", "bamba", "zamba", "zamba2", "falcon_h1", "granitemoehybrid"), _HYBRID),
    **dict.fromkeys(("recurrent_gemma", "qwen3_next", "qwen3_5", "qwen3_5_text", "lfm2", "nemotron_h"), _HYBRID),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3", "kimi_k2", "longcat_flash"), _LATENT),
    **dict.fromkeys(("gpt2", "opt", "gpt_neo", "gpt_bigcode", "xglm"), _ABSOLUTE),
    **dict.fromkeys(("bloom", "mpt"), "has ALiBi biases in place of rotary positions"),
    **dict.fromkeys(("bert", "roberta", "modernbert", "distilbert", "electra"), _ENCODER),
    "gemma2": "caps its attention logits (soft-capping)",
    "gpt_oss": "has learned attention sinks inside its softmax",
    "smollm3": "has layers without rotary positions",
    "llama4": "has chunked attention and layers without rotary positions",
    "llama4_text": "has chunked attention and layers without rotary positions",
    "mllama": "has cross-attention layers",
}


def supported_families() -> dict[str, str]:
    """The supported values of `model_type` in a model's config.json, each with the models that it covers."""
    return dict(_FAMILIES)


def read_config(folder: Path, name: str) -> PreTrainedConfig:
    """The configuration in `folder`, of the text model where there are several parts.

    Raises ModelError where there is none, it cannot be read, or kvviz does not support the model.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{name} has no config.json, so it is not a transformers model. Name another folder or id.")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        family = raw.get("model_type") or "unknown"
        if family not in _FAMILIES:
            raise ModelError(_refusal(name, family, _why(family, raw)))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except ModelError:
        raise
    except Exception as error:  # transformers raises whatever its validators raise
        raise ModelError(
            f"the config.json of {name} cannot be read ({brief(error)}). Fetch the model again."
        ) from error
    config = config.get_text_config()
    reason = _fault(config)
    if reason:
        raise ModelError(_refusal(name, config.model_type, reason))
    return _unwindowed(config)


def _refusal(name: str, family: str, reason: str) -> str:
    return (
        f"{name} ({family}) is not supported: kvviz needs standard rotary attention in every layer, and this model "
        f"{reason}. Supported: {', '.join(_FAMILIES)}."
    )


def _why(family: str, raw: dict) -> str:
    """Why a family that is not listed is refused, from the plain config.json."""
    if family in _REASONS:
        return _REASONS[family]
    if raw.get("is_encoder_decoder"):
        return "is an encoder-decoder"
    if raw.get("kv_lora_rank"):
        return _LATENT
    if set(raw.get("layer_types") or ()) - {"full_attention", "sliding_attention"}:
        return _HYBRID
    return "is of a family that kvviz has not been checked with"


def _fault(config: PreTrainedConfig) -> str | None:
    """What in a config of a supported family stands against it, or None."""
    rope = _rope(config)
    if getattr(config, "attn_logit_softcapping", None):
        return _REASONS["gemma2"]
    if getattr(config, "use_bidirectional_attention", False):
        return "attends in both directions"
    if getattr(config, "quantization_config", None):
        return "is stored in a quantised form that needs its own kernels; name the plain one or a .gguf file"
    if rope.get("rope_type") == "dynamic":
        return "changes its rotary frequencies as the text grows, which makes cached keys stale"
    return None


def _rope(config: PreTrainedConfig) -> dict:
    """The RoPE parameters of the full-attention layers."""
    rope = config.rope_parameters or {}
    return rope.get("full_attention", rope)


def _unwindowed(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config with sliding windows taken out where they never cut, or where every layer has the same one.

    Within its window such a layer is a full one, so `positions` then ends there (Mistral 7B v0.1: 4,096 tokens). Models
    that mix both kinds of layers, as Gemma 3 does, are left as they are.
    """
    window, sliding = getattr(config, "sliding_window", None), sliding_layers(config)
    if any(sliding) and (all(sliding) or (window >= positions(config) and config.model_type != "gemma3_text")):
        config.max_position_embeddings = min(config.max_position_embeddings, window)
        config.sliding_window = None
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * len(sliding)
    return config


def sliding_layers(config: PreTrainedConfig) -> tuple[bool, ...]:
    """For each layer, whether it has a sliding window (it is then never evicted)."""
    n = config.num_hidden_layers
    if getattr(config, "sliding_window", None) is None:
        return (False,) * n
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * n
    return tuple(kind == "sliding_attention" for kind in kinds)


def positions(config: PreTrainedConfig) -> int:
    """The longest sequence, in tokens, prompt and answer together.

    LongRoPE (Phi-3 128k, Phi-4-mini) changes all frequencies when the text outgrows the original context, which would
    make cached keys stale, so such a model ends there.
    """
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        return min(config.max_position_embeddings, rope["original_max_position_embeddings"])
    return config.max_position_embeddings
