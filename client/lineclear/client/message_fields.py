"""Set the fields of protobuf messages, with the error that names a field which cannot hold its value."""

from __future__ import annotations

import math
import operator
from typing import Any, TypeVar

from lineclear.errors import InvalidRequest, MalformedMessage

_Message = TypeVar("_Message")


def filled(message: _Message, **fields: Any) -> _Message:
    """Return the message with those fields that are not None."""
    for name, value in fields.items():
        set_field(message, name, value)
    return message


def set_field(message: Any, name: str, value: Any, path: str | None = None) -> None:
    if value is not None:
        set_given(message, name, value, path or name)


def set_given(message: Any, name: str, value: Any, path: str) -> None:
    """Set a field that may not be None."""
    try:
        kind = message.DESCRIPTOR.fields_by_name[name].type
        # protobuf would leave the field unset, or take True as 1 and 5 as true.
        if value is None or is_bool(type(value)) is not (kind == _BOOL):
            raise TypeError
        setattr(message, name, value)
    except UnicodeError:
        raise MalformedMessage.at(path, "is not valid Unicode") from None
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest.at(path, f"must be {_KINDS[message.DESCRIPTOR.fields_by_name[name].type]}") from None


def whole(name: str, value: Any, low: int) -> int:
    """Return an integer of at least `low`. Raises ValueError for anything else, True and 1.0 included."""
    try:
        number = low - 1 if is_bool(type(value)) else operator.index(value)
    except TypeError:
        number = low - 1
    if number < low:
        raise ValueError(f"{name} is {value!r}; give a whole number of at least {low}")
    return number


def seconds(name: str, value: Any) -> float:
    """Return a number of seconds. Raises ValueError for anything else, NaN and True included."""
    try:
        number = math.nan if is_bool(type(value)) or isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{name} is {value!r}; give a number of seconds")
    return number


def is_bool(kind: type) -> bool:
    """Return whether it is the bool of Python or numpy."""
    return kind.__name__ in ("bool", "bool_")


_BOOL = 8
# By the numbers of google.protobuf.FieldDescriptor.TYPE_*.
_KINDS: dict[int, str] = {
    1: "a number",
    2: "a number",
    4: "a whole number from 0 to 2**64 - 1",
    5: "a whole number from -2**31 to 2**31 - 1",
    8: "true or false",
    9: "a text",
    13: "a whole number from 0 to 2**32 - 1",
}
