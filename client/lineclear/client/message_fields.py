"""Set the fields of protobuf messages, with the error that names a field which cannot hold its value."""

from __future__ import annotations

from typing import Any

from lineclear.errors import InvalidRequest, MalformedMessage


def set_field(message: Any, name: str, value: Any, path: str | None = None) -> None:
    """Set a field unless the value is None."""
    if value is not None:
        set_given(message, name, value, path or name)


def set_given(message: Any, name: str, value: Any, path: str) -> None:
    """Set a field that may not be None."""
    try:
        if value is None:  # protobuf would leave the field unset
            raise TypeError
        setattr(message, name, value)
    except UnicodeError:
        raise MalformedMessage.at(path, "is not valid Unicode") from None
    except (TypeError, ValueError):
        raise InvalidRequest.at(path, f"must be {_KINDS[message.DESCRIPTOR.fields_by_name[name].type]}") from None


# By the numbers of google.protobuf.FieldDescriptor.TYPE_*.
_KINDS: dict[int, str] = {
    2: "a number",
    4: "a whole number from 0 to 2**64 - 1",
    5: "a whole number from -2**31 to 2**31 - 1",
    8: "true or false",
    9: "a text",
    13: "a whole number from 0 to 2**32 - 1",
}
