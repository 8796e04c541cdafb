"""Type and location of an exception, for logs and error sentences.

The message of an exception is left out: it may quote a prompt or an answer.
"""

from __future__ import annotations

import os
import traceback

_MAX_FRAMES = 16


def exception_location(error: BaseException) -> list[str]:
    """Return the innermost frames as "file.py:line function", the outermost of them first."""
    frames = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
    return [f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames]


def exception_fields(error: BaseException) -> dict[str, str | list[str]]:
    """Return the fields of a log line about the exception."""
    return {"error": type(error).__name__, "location": exception_location(error)}


def exception_summary(error: BaseException) -> str:
    """Return type and innermost frame in one line."""
    location = exception_location(error)
    return f"{type(error).__name__} at {location[-1]}" if location else type(error).__name__
