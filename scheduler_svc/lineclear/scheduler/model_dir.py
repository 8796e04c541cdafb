"""Where a model lies on disk, and reading the small files beside its weights. Downloads nothing, opens no weights."""

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
    """The demonstration model that comes with lineclear. Raises ConfigurationError where it was left out."""
    for directory in _DEMO:
        if directory.is_dir():
            return directory.resolve()
    raise ConfigurationError("the demonstration model is not installed; name a model with --model")


def model_directory(model: str) -> Path:
    """The directory of a model: itself, or the newest local copy of a Hugging Face repository `owner/name`.

    Raises ConfigurationError with what to do if there is none.
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
            f"--model {model} is no directory and is not in the local cache {_hub_cache()}; download it first "
            f"(hf download {model})"
        )
    raise ConfigurationError(f"--model {model} does not exist; give the directory of a model")


def require_model(model: str, directory: Path, *, with_weights: bool) -> None:
    """Raise ConfigurationError if what is in the directory shows that it is no model that can be served."""
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
    """The object in a file of the model, None if there is no such file. Raises ConfigurationError if it is none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{path} is nested too deep to be read") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} holds no JSON object")
    return found
