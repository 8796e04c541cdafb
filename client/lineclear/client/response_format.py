"""JSON Schemas of Python types, and answers as values of these types.

A format is a class with `model_json_schema` (pydantic's models; pydantic itself is not needed), a dataclass, a
TypedDict, or a JSON Schema as a dict or as text.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    None: {"type": "null"},
    type(None): {"type": "null"},
    Any: {},
}


def schema_of(response_format: Any) -> str:
    """Return the JSON Schema of a format as JSON. Raises TypeError for another type."""
    if isinstance(response_format, str):
        return response_format
    if isinstance(response_format, Mapping):
        return json.dumps(response_format)
    if hasattr(response_format, "model_json_schema"):
        return json.dumps(response_format.model_json_schema())
    if dataclasses.is_dataclass(response_format) or is_typeddict(response_format):
        return json.dumps(_schema(response_format))
    raise TypeError("response_format must be a class with model_json_schema, a dataclass, a TypedDict or a JSON Schema")


def value_of(response_format: Any, text: str) -> Any:
    """Return the JSON value of `text`, as an instance of the format if that is a class. Raises ValueError."""
    if hasattr(response_format, "model_validate_json"):
        return response_format.model_validate_json(text)
    value = json.loads(text)
    return _value(response_format, value) if isinstance(response_format, type) else value


def _schema(kind: Any) -> dict[str, Any]:
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(argument) for argument in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0])}
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return {"type": "array", "items": _schema(arguments[0])}
        fixed = {"minItems": len(arguments), "maxItems": len(arguments), "items": False}
        return {"type": "array", "prefixItems": [_schema(argument) for argument in arguments], **fixed}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if dataclasses.is_dataclass(kind) or is_typeddict(kind):
        hints = get_type_hints(kind)
        return {
            "type": "object",
            "properties": {name: _schema(hint) for name, hint in hints.items()},
            "required": list(hints) if dataclasses.is_dataclass(kind) else sorted(kind.__required_keys__),
            "additionalProperties": False,
        }
    raise TypeError(f"no JSON Schema is known for {kind!r}; give the schema itself")


def _value(kind: Any, value: Any) -> Any:
    """Return `value` with dataclasses and enums in place of their JSON."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        hints = get_type_hints(kind)
        return kind(**{name: _value(hints[name], entry) for name, entry in value.items()})
    if origin is list:
        return [_value(arguments[0], entry) for entry in value]
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_value(entry_kind, entry) for entry_kind, entry in zip(kinds, value, strict=True))
    if origin is dict:
        return {key: _value(arguments[1], entry) for key, entry in value.items()}
    if origin in (Union, types.UnionType):
        found = [argument for argument in arguments if dataclasses.is_dataclass(argument)]
        return _value(found[0], value) if len(found) == 1 and isinstance(value, dict) else value
    return value
