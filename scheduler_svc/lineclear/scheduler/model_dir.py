"""The directory of the demonstration model, and the JSON files of a model beside its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lineclear.process.settings_base import ConfigurationError

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
