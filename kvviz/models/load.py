"""A model's name -> the model on its device, its tokenizer, and the dimensions that the rest of kvviz asks for."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from kvviz.models.errors import ModelError, Progress, brief, part, steady
from kvviz.models.families import positions, read_config, sliding_layers
from kvviz.models.names import Source, locate
from kvviz.models.packed import can_pack, pack
from kvviz.models.yarn import split, stretch

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
_GEMMA3_TEXT = {  # where the text part of a Gemma 3 with a vision part lies: as published, and as saved again
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model ready to run.

    Attributes:
        name: as it was asked for.
        model: the transformers model, in eval mode, without gradients.
        tokenizer: its tokenizer.
        device, dtype: of the weights (of the first ones, where the model is spread over devices).
        source, revision: "wheel", "gguf", "hub" or "folder"; and what names the content: a sha256, a commit, or "".
        n_layers, n_heads, n_kv_heads, head_dim: L, Hq, Hkv and d.
        positions: the longest sequence, in tokens, prompt and answer together.
        parameters: how many weights.
        sliding: for each layer, whether it has a sliding window (it is then never evicted).
        eos_ids: the tokens that end an answer.
        chat: whether there is a chat template.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    source: str
    revision: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    positions: int
    parameters: int
    sliding: tuple[bool, ...]
    eos_ids: frozenset[int]
    chat: bool


def load_model(
    name: str,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Load a model: the default one, a Hugging Face id, a local folder, or a `.gguf` file.

    Args:
        name: what to load; see `available`. With `:yarn=4` after it, four times as many positions (see kvviz.models.yarn).
        device: "cpu", "cuda", "cuda:1", "mps", or "auto" to spread it over all GPUs; by default CUDA, MPS or CPU,
            whichever is there first.
        dtype: "bf16", "fp16" or "fp32"; by default bf16 on a GPU and fp32 on a CPU.
        progress: called with (fraction, text). It may raise to cancel.

    Raises ModelError, with what to do about it, where the model cannot be loaded.
    """
    place, kind = _device(device), _dtype(dtype)
    report = steady(progress)
    base, factor = split(name)
    source = locate(base, part(report, 0.0, 0.8))
    report(0.8, "loading the weights")
    with _quiet():
        config = read_config(source.folder, name)
        stretch(config, factor, base)
        kind = kind or _default_dtype(place)
        tokenizer = _read_tokenizer(source.folder, name)
        model = _read_weights(source.folder, name, config, place, kind)
    loaded = _describe(name, source, model, tokenizer)
    if can_pack(model):
        report(0.95, "packing the weights")
        pack(model)
        _map_again(model, source.folder)
    report(1.0, "ready")
    return loaded


def _device(device: str | torch.device | None) -> torch.device | None:
    """The device to load onto; None means spread over all ("auto")."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if _has_mps() else "cpu")
    if device == "auto":
        return None
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"unknown device {device!r}. Use cpu, cuda, cuda:1, mps or auto.") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"there is no device {place}: {torch.cuda.device_count()} CUDA devices are visible. Use cpu or auto."
        )
    if place.type == "mps" and not _has_mps():
        raise ModelError("there is no MPS device on this machine. Use cpu.")
    if place.type not in ("cpu", "cuda", "mps"):
        raise ModelError(f"kvviz does not run on {place.type!r}. Use cpu, cuda, cuda:1, mps or auto.")
    return place


def _has_mps() -> bool:
    return torch.backends.mps.is_available()


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    kind = _DTYPES.get(dtype.lower()) if isinstance(dtype, str) else dtype
    if dtype is not None and kind not in _DTYPES.values():
        raise ModelError(f"unknown dtype {dtype!r}. Use bf16, fp16 or fp32.")
    return kind


def _default_dtype(place: torch.device | None) -> torch.dtype:
    """bf16 on a GPU (fp16 on one that is too old for it), fp32 on a CPU."""
    on_gpu = torch.cuda.is_available() if place is None else place.type != "cpu"
    if not on_gpu:
        return torch.float32
    old = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.float16 if old else torch.bfloat16


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars, its report of the weights (kvviz checks them itself) and its advice to the
    authors of RoPE settings."""
    shown = transformers_logging.is_progress_bar_enabled()
    loggers = [logging.getLogger(f"transformers.{module}") for module in ("modeling_utils", "modeling_rope_utils")]
    transformers_logging.disable_progress_bar()
    for logger in loggers:
        logger.addFilter(_is_error)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_error)
        if shown:
            transformers_logging.enable_progress_bar()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _read_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`. A tokenizer.json is taken to the letter: transformers' classes for single families
    rebuild some of it, and drop splitting rules."""
    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a broken or an unknown file makes its reader raise
        raise ModelError(
            f"{name} has no tokenizer that can be read ({brief(error)}). Its folder needs a tokenizer.json."
        ) from error


def _read_weights(
    folder: Path, name: str, config: PreTrainedConfig, place: torch.device | None, dtype: torch.dtype
) -> PreTrainedModel:
    """The model with its weights on the device. Safetensors only, and every weight must be there."""
    gemma3 = config.model_type == "gemma3_text"
    options = {"key_mapping": _GEMMA3_TEXT} if gemma3 else {}
    if place is None or place.type != "cpu":
        options["device_map"] = "auto" if place is None else {"": place}
    try:
        model, info = (Gemma3ForCausalLM if gemma3 else AutoModelForCausalLM).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except Exception as error:
        if not _is_out_of_memory(error):
            raise ModelError(f"the weights of {name} cannot be read ({brief(error)}). Fetch them again.") from error
        gc.collect()
        torch.cuda.empty_cache()
        raise ModelError(
            f"{name} does not fit into memory in {str(dtype).removeprefix('torch.')}. Free the device, choose bf16, "
            "a smaller model, or device auto."
        ) from error
    if info["missing_keys"] or info["mismatched_keys"]:
        raise ModelError(
            f"the weights of {name} are not complete: {sorted(info['missing_keys'])[:3]}. Fetch them again."
        )
    return model.eval().requires_grad_(False)


def _map_again(model: PreTrainedModel, folder: Path) -> None:
    """Let go of the files whose pages packing brought into memory: what is left, the embedding above all, is mapped anew, and
    only the rows that are looked up are read again."""
    left = dict(model.named_parameters())
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in left.keys() & set(stored.keys()):
                fresh = stored.get_tensor(name)
                if (fresh.shape, fresh.dtype) == (left[name].shape, left[name].dtype):
                    left[name].data = fresh


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _describe(name: str, source: Source, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Loaded:
    config = model.config
    heads = config.num_attention_heads
    ends = model.generation_config.eos_token_id
    eos = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    model.generation_config.eos_token_id = sorted(eos)  # so that model.generate ends where kvviz ends
    first = next(model.parameters())
    return Loaded(
        name=name,
        model=model,
        tokenizer=tokenizer,
        device=first.device,
        dtype=first.dtype,
        source=source.kind,
        revision=source.revision,
        n_layers=config.num_hidden_layers,
        n_heads=heads,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        positions=positions(config),
        parameters=sum(p.numel() for p in model.parameters()),
        sliding=sliding_layers(config),
        eos_ids=frozenset(eos),
        chat=tokenizer.chat_template is not None,
    )
