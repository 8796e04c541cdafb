"""The model directory: finding it, checking it, and reading the JSON files beside the weights."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from lineclear.model_files import directory_check
from lineclear.process.settings_base import ConfigurationError

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_DEMO = (
    Path(__file__).parents[1] / "demo" / "model",  # installed
    Path(__file__).parents[3] / "demo" / "model",  # a checkout
)


def demo_directory() -> Path:
    """Return the demonstration model's directory. Raises ConfigurationError if it is not installed."""
    for directory in _DEMO:
        if directory.is_dir():
            return directory.resolve()
    raise ConfigurationError("the demonstration model is not installed; name a model with --model")


def model_directory(model: str) -> Path:
    """Return `model` if it is a directory, else the local copy of the Hugging Face repository `owner/name`.

    Raises ConfigurationError if neither exists.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise ConfigurationError(f"--model {model}: no permission to read the directory")
        return path.resolve()
    if path.exists():
        raise ConfigurationError(f"--model {model} {directory_check.of_file(path)}")
    if _REPOSITORY.fullmatch(model):
        snapshots = _hub_cache() / f"models--{model.replace('/', '--')}"
        found = _snapshot(snapshots)
        if found is not None:
            return found
        raise ConfigurationError(
            f"--model {model} is not a directory and not in the local cache {_hub_cache()}; download it first "
            f"(hf download {model})"
        )
    raise ConfigurationError(f"--model {model} does not exist; give the directory of a model")


def require_model(model: str, directory: Path, *, with_weights: bool) -> None:
    """Raise ConfigurationError if the files in the directory cannot be served as a model."""
    if reason := directory_check.of_directory(directory, with_weights=with_weights):
        raise ConfigurationError(f"--model {model} {reason}")


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


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of the model, None if the file is missing. Raises ConfigurationError."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{path} is nested too deeply to be read") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} does not contain a JSON object")
    return found
