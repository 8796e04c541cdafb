"""Check the numeric arguments of a batcher. Integers of any library are taken, such as those of numpy."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterable
from typing import Any

from lineclear.errors import InvalidRequest

MAX_TOKEN = 2**31 - 1
MAX_COUNT = 2**31 - 1
_LONGEST_SECONDS = 366 * 86_400.0


def whole(name: str, value: Any, low: int, high: int, error: type[Exception] = ValueError) -> int:
    """Return an integer in [low, high]. Raises `error` for anything else, True and 1.0 included."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise error(f"{name} is {value!r}; give a whole number from {low} to {high}")
    return number


def real(name: str, value: Any, low: float, high: float, error: type[Exception] = ValueError) -> float:
    """Return a number in [low, high]. Raises `error` for anything else, NaN and True included."""
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high:
        raise error(f"{name} is {value!r}; give a number from {low:g} to {high:g}")
    return number


def deadline(timeout_seconds: float | None) -> float | None:
    """Return the time on the monotonic clock at which a request expires. Raises InvalidRequest."""
    if timeout_seconds is None:
        return None
    seconds = real("timeout_seconds", timeout_seconds, -_LONGEST_SECONDS, math.inf, InvalidRequest)
    return time.monotonic() + min(seconds, _LONGEST_SECONDS)


def token_ids(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """Return token ids, of a list, an array or any other sequence. Raises InvalidRequest."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidRequest(f"{name} is no sequence of token ids")
    try:
        found = tuple(map(operator.index, values))
    except TypeError:
        raise InvalidRequest(f"{name} has an entry that is no whole number") from None
    if found and not 0 <= min(found) <= max(found) < MAX_TOKEN:
        raise InvalidRequest(f"{name} has an entry outside [0, {MAX_TOKEN})")
    return found
