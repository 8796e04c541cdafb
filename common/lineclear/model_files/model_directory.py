"""Finds and checks the directory of a model, in milliseconds: both processes do so before anything slow is imported."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from . import config_check, directory_check
from .gguf_file import GgufBroken

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


class NotServable(ValueError):
    """The directory holds no model that can be served; the message names the flag, the fault and what to do."""


def locate(model: str, flag: str = "--model") -> Path:
    """Return `model` if it is a directory, else the local copy of the Hugging Face repository `owner/name`.

    For a GGUF file, or a directory with one and no safetensors, it is the directory that gguf_directory.py makes.
    Raises NotServable if it finds no model.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise NotServable(f"{flag} {model}: no permission to read the directory")
        found = directory_check.gguf_in(path)
        return path.resolve() if found is None else _of_gguf(found, flag)
    if directory_check.is_gguf(path):
        return _of_gguf(path, flag)
    if path.exists():
        raise NotServable(f"{flag} {model} {directory_check.of_file(path)}")
    if _REPOSITORY.fullmatch(model):
        snapshots = _hub_cache() / f"models--{model.replace('/', '--')}"
        found = _snapshot(snapshots)
        if found is not None:
            return found
        raise NotServable(
            f"{flag} {model} is not a directory and not in the local cache {_hub_cache()}; nothing is downloaded at"
            f" start: run `hf download {model}` first"
        )
    raise NotServable(f"{flag} {model} does not exist; give the directory of a model")


def check(model: str, directory: Path, flag: str = "--model", *, is_loaded_here: bool = True) -> None:
    """Raise NotServable if the files in the directory cannot be served as a model.

    With `is_loaded_here` all of them are there, and the installed transformers knows the type of the model.
    """
    if reason := directory_check.of_directory(directory, is_loaded_here=is_loaded_here):
        raise NotServable(f"{flag} {model} {reason}")


def check_tokenizer(model: str, directory: Path) -> None:
    """Raise NotServable if the directory has no tokenizer that the scheduler reads."""
    if reason := directory_check.of_tokenizer(directory):
        raise NotServable(f"--model {model} {reason}")


def _of_gguf(path: Path, flag: str) -> Path:
    from . import gguf_directory  # other models do without it

    try:
        return gguf_directory.directory_of(path)
    except GgufBroken as error:
        raise NotServable(f"{flag} {path} {error}") from None
    except gguf_directory.NoPlace as error:
        raise NotServable(f"{flag} {path}: its configuration needs a directory, and {error}") from None
    except OSError as error:
        raise NotServable(f"{flag} {path} cannot be read: {error.strerror}") from None


class ModelNames(NamedTuple):
    """Names of a model."""

    directory: Path
    names: frozenset[str]
    """Short names, see `short_name`."""
    revision: str
    """Its commit, if it lies in the Hugging Face cache."""


def names_of(directory: Path, *given: str) -> ModelNames:
    """Return the names of the model in a directory: by folder, repository and configuration, and as `given`."""
    is_snapshot = directory.parent.name == "snapshots"
    folder = directory.parents[1].name.rpartition("--")[2] if is_snapshot else directory.name
    try:
        made_from = config_check.read(directory / config_check.CONFIG).get("_name_or_path")
    except config_check.ConfigUnreadable:
        made_from = ""
    names = (folder, str(made_from or ""), *given)
    return ModelNames(directory, frozenset(map(short_name, filter(None, names))), directory.name if is_snapshot else "")


def short_name(model: str) -> str:
    """Return the last part of a path or repository in lower case."""
    return model.rstrip("/").rpartition("/")[2].lower()


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _snapshot(repository: Path) -> Path | None:
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    found = repository / "snapshots" / revision
    return found.resolve() if re.fullmatch(r"[0-9a-f]+", revision) and found.is_dir() else None
