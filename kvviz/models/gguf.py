"""A GGUF file -> a folder of safetensors, config and tokenizer, made once and kept in the cache.

Written here and not left to transformers, because the conversion must be exact or refused: transformers drops llama3's
rotary scaling, and builds wrong tokenizers. Tensors are dequantised one by one, so memory stays small and progress is
real.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from gguf import GGUFReader, dequantize
from gguf.gguf_reader import ReaderTensor
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvviz.models.errors import ModelError, Progress
from kvviz.models.vocabulary import build_tokenizer

_CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_RECORD = "kvviz.json"
_VERSION = 1  # of what is written; raise it when that changes, and every file is converted anew
_SHARD_BYTES = 2 * 1024**3
_LARGE = 1_000_000_000  # parameters from which on weights are kept in 16 bits


def cache_folder() -> Path:
    """Where converted models are kept: `KVVIZ_CACHE`, or kvviz in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "kvviz"
    return Path(os.environ.get("KVVIZ_CACHE") or default).expanduser()


def convert(file: Path, progress: Progress) -> tuple[Path, str]:
    """The folder with the converted model, made now if the cache lacks it, and the file's sha256.

    A folder appears in the cache only when it is complete. Where two processes ask at once, the second waits for the
    first.
    Raises ModelError where the file is broken or not supported, or the cache cannot be written.
    """
    progress(0.0, f"reading {file.name}")
    try:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}. Check its permissions.") from error
    root = cache_folder()
    folder = root / f"{file.stem}-{digest[:16]}-v{_VERSION}"
    if not _is_complete(folder):
        try:
            root.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if not _is_complete(folder):
                    _make(file, digest, folder, progress)
        except OSError as error:
            raise ModelError(
                f"the converted model cannot be written to {root}: {error.strerror or error}. "
                "Free some disk there, or set KVVIZ_CACHE to another folder."
            ) from error
    return folder, digest


def _is_complete(folder: Path) -> bool:
    """Whether a cached folder holds every file that was written, each of its full size."""
    try:
        record = json.loads((folder / _RECORD).read_text())
        return all((folder / name).stat().st_size == size for name, size in record["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def _make(file: Path, digest: str, folder: Path, progress: Progress) -> None:
    """Convert into a temporary folder beside `folder`, then rename it: it is whole, or it is not there."""
    for left in folder.parent.glob(".converting-*"):  # by a process that was killed
        if time.time() - left.stat().st_mtime > 86_400:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=folder.parent) as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        _write(file, made, progress)
        files = {path.name: path.stat().st_size for path in made.iterdir()}
        record = {"source": file.name, "sha256": digest, "files": files}
        (made / _RECORD).write_text(json.dumps(record, indent=1))
        if folder.exists():  # incomplete, or it would have been used
            shutil.rmtree(folder)
        os.replace(made, folder)


def _write(file: Path, folder: Path, progress: Progress) -> None:
    """Everything that transformers needs, into `folder`."""
    reader, meta = _read(file)
    try:
        config = _config(meta, {tensor.name: tensor for tensor in reader.tensors})
        tokenizer = build_tokenizer(meta, config.max_position_embeddings)
        ends = {meta.get("tokenizer.ggml.eos_token_id"), meta.get("tokenizer.ggml.eot_token_id")} - {None}
        config.bos_token_id = meta.get("tokenizer.ggml.bos_token_id")
        config.eos_token_id = sorted(ends)
        _write_weights(folder, config, reader.tensors, progress)
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    except (ModelError, OSError):
        raise
    except NotImplementedError as error:
        raise ModelError(
            f"{file} has a quantisation that cannot be read: {error}. Use Q4_0 to Q8_0 or a K type."
        ) from error
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise ModelError(f"{file} is a broken GGUF file ({error!r}). Fetch it again.") from error
    except Exception as error:  # the tokenizers library raises plain Exception for lists that do not fit together
        if type(error) is not Exception:
            raise
        raise ModelError(f"{file} has a broken vocabulary ({error}). Fetch it again.") from error


def _read(file: Path) -> tuple[GGUFReader, dict[str, Any]]:
    """The file's reader, and its metadata as plain Python values."""
    try:
        reader = GGUFReader(file)
        meta = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader walks raw bytes: a broken file fails in any way
        raise ModelError(f"{file} is not a whole GGUF file ({error}). Fetch it again.") from error
    if meta.get("split.count", 1) > 1:
        raise ModelError(f"{file} is one part of several. Join them first: llama-gguf-split --merge FIRST OUT.gguf.")
    return reader, meta


def _config(meta: dict[str, Any], tensors: dict[str, ReaderTensor]) -> PreTrainedConfig:
    """The transformers config that the metadata describes."""
    family = meta.get("general.architecture")
    own = {key.removeprefix(f"{family}."): value for key, value in meta.items() if key.startswith(f"{family}.")}
    if family not in _CONFIGS or own.get("expert_count"):
        experts = " with experts" if own.get("expert_count") else ""
        raise ModelError(
            f"GGUF files of the architecture {family!r}{experts} are not supported ({', '.join(_CONFIGS)} are). "
            "Name the model's Hugging Face id or a safetensors folder."
        )
    heads, hidden = own["attention.head_count"], own["embedding_length"]
    head_dim = own.get("attention.key_length", hidden // heads)
    if {own.get("attention.value_length", head_dim), own.get("rope.dimension_count", head_dim)} != {head_dim}:
        raise ModelError("the GGUF file's keys, values and rotary part differ in size, which is not supported.")
    large = sum(int(tensor.n_elements) for tensor in tensors.values()) >= _LARGE
    config = _CONFIGS[family](
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=hidden,
        intermediate_size=own["feed_forward_length"],
        num_hidden_layers=own["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=own.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=own["context_length"],
        rms_norm_eps=own["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": own.get("rope.freq_base", 10_000.0)},
        tie_word_embeddings="output.weight" not in tensors,
        dtype=torch.float16 if large else torch.float32,
    )
    _scale_rope(config, own, tensors.get("rope_freqs.weight"))
    config.architectures = [_CONFIGS[family].__name__.replace("Config", "ForCausalLM")]
    return config


def _scale_rope(config: PreTrainedConfig, own: dict[str, Any], factors: ReaderTensor | None) -> None:
    """Put RoPE scaling into the config. llama.cpp stores llama3's as one factor a frequency; from these its parameters
    are found again, and it is checked that they give the same frequencies."""
    kind = own.get("rope.scaling.type", "none")
    if factors is not None:
        factors = torch.from_numpy(np.array(factors.data, dtype=np.float32))
        plain = config.rope_parameters["rope_theta"] ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        config.rope_parameters |= {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        known = torch.allclose(scaled, plain / factors, rtol=1e-3, atol=0.0)
    elif kind == "linear":
        config.rope_parameters |= {"rope_type": "linear", "factor": own["rope.scaling.factor"]}
        known = True
    else:
        known = kind == "none"
    if not known:
        raise ModelError(
            f"the GGUF file scales its rotary positions in a way that is not supported ({kind}). "
            "Name the model's Hugging Face id or a safetensors folder."
        )


def _write_weights(folder: Path, config: PreTrainedConfig, tensors: list[ReaderTensor], progress: Progress) -> None:
    """Dequantise every tensor into shards of about 2 GiB, with the index that transformers reads."""
    expected = _expected_shapes(config)
    shard: dict[str, Tensor] = {}
    placed: dict[str, str] = {}
    size = 0

    def flush() -> None:
        name = f"model-{len(set(placed.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        placed.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in _weights(config, tensors, progress):
        if expected.pop(name, None) != tensor.shape:
            raise ModelError(
                f"the GGUF file's tensor {name} {tuple(tensor.shape)} does not fit its metadata. Fetch it again."
            )
        shard[name] = tensor
        size += tensor.nbytes
        if sum(t.nbytes for t in shard.values()) >= _SHARD_BYTES:
            flush()
    if expected:
        raise ModelError(
            f"the GGUF file lacks {len(expected)} tensors, {next(iter(expected))} among them. Fetch it again."
        )
    flush()
    index = {"metadata": {"total_size": size}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _weights(config: PreTrainedConfig, tensors: list[ReaderTensor], progress: Progress) -> Iterator[tuple[str, Tensor]]:
    """(transformers' name, weight) of every tensor but the rotary factors, which the config holds."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for i, tensor in enumerate(tensors):
        progress(i / len(tensors), f"converting the model, tensor {i + 1} of {len(tensors)}")
        if tensor.name == "rope_freqs.weight":
            continue
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor.name)
        layer, kind, end = match.groups() if match else (None, "", "")
        stem = (_OUTSIDE if layer is None else _IN_LAYER).get(kind)
        if stem is None:
            raise ModelError(
                f"the GGUF file has a tensor that kvviz does not know: {tensor.name}. Name a safetensors folder."
            )
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if config.model_type == "llama" and kind in heads:
            weight = _halves(weight, heads[kind])
        yield (f"{stem}.{end}" if layer is None else f"model.layers.{layer}.{stem}.{end}"), weight.to(config.dtype)


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of rotary channels in a Llama's q and k: pairs (2i, 2i + 1) -> (i, i + d/2)."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _expected_shapes(config: PreTrainedConfig) -> dict[str, torch.Size]:
    """Name and shape of every weight that a model of this config has."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {name: tensor.shape for name, tensor in model.state_dict().items() if name not in tied}
