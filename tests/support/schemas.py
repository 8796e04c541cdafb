"""JSON Schemas of the kinds that requests have: written by hand, and combined systematically."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_STRING: Schema = {"type": "string", "maxLength": 6}
_DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
_SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}


def closed(properties: dict[str, Schema], required: list[str] | None = None) -> Schema:
    """Return the schema of an object with these properties and no others."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def array(items: Schema, most: int = 3, least: int = 0) -> Schema:
    """Return the schema of a short array."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _row(*items: Schema) -> Schema:
    """Return the schema of an array of exactly these items."""
    return {"type": "array", "prefixItems": list(items), "items": False, "minItems": len(items)}


LEAVES: tuple[Schema, ...] = (
    _STRING,
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "pattern": "^(ja|nein|日本|é+x)$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    _DIGIT,
    {"type": "integer", "minimum": -40, "maximum": 400},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 95},
    _SHARE,
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["a", "b c", 'quote "', "tab\t", "ü😀"]},
    {"enum": [1, "1", None, True, 2.5]},
    {"const": {"kind": "fixed", "list": [1, 2]}},
)
"""Schemas of single values."""

_NODE = closed({"value": _DIGIT, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})
_POINT = closed({"x": _DIGIT, "y": _DIGIT})
_CAR = closed({"kind": {"const": "car"}, "doors": {"enum": [2, 4]}})
_BOAT = closed({"kind": {"const": "boat"}, "sails": _DIGIT})

BY_HAND: tuple[Schema, ...] = (
    closed({"name": _STRING, "age": {"type": "integer", "minimum": 0, "maximum": 120}}),
    closed({"name": _STRING, "age": _DIGIT}, ["name"]),
    closed({}),
    closed({"größe": _DIGIT, "名前": _STRING, "a b": {"type": "boolean"}, 'x"y': {"type": "null"}}),
    closed({"a": closed({"b": closed({"c": closed({"d": {"const": 1}})})})}),
    {"type": "object", "additionalProperties": _DIGIT, "maxProperties": 2},
    {"$defs": {"node": _NODE}, "$ref": "#/$defs/node"},
    {"$defs": {"p": _POINT}, **closed({"from": {"$ref": "#/$defs/p"}, "to": {"$ref": "#/$defs/p"}})},
    {"$defs": {"p": _POINT}, **array({"$ref": "#/$defs/p"}, 2, 1)},
    {"$defs": {"id": {"type": "string", "pattern": "^[a-f0-9]{8}$"}}, **closed({"id": {"$ref": "#/$defs/id"}})},
    {"anyOf": [_CAR, _BOAT]},
    {"oneOf": [_CAR, _BOAT]},
    array({"anyOf": [_CAR, _BOAT]}, 2, 1),
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 3}, {"type": "null"}]},
    {"type": ["string", "null"], "maxLength": 4},
    {"type": ["integer", "boolean"], "minimum": 0, "maximum": 9},
    _row(_DIGIT, _STRING),
    {**_row({"const": "point"}, _DIGIT, _DIGIT), "maxItems": 3},
    array(array(_DIGIT, 2, 1), 2, 1),
    array({"enum": ["red", "green"]}, 3, 3),
    array(closed({"id": _DIGIT, "tags": array({"enum": ["x", "y"]}, 2)}), 2),
    closed({"status": {"enum": ["ok", "error"]}, "items": array(_POINT, 2), "total": _DIGIT}),
    closed({"email": {"type": "string", "pattern": "^[a-z]{1,5}@[a-z]{1,5}\\.(com|org)$"}}),
    closed({"when": {"type": "string", "format": "date-time"}}),
    closed({"zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"}, "city": _STRING}),
    closed({"price": {"type": "number", "minimum": 0, "maximum": 10}, "currency": {"enum": ["EUR", "USD"]}}),
    {"allOf": [closed({"a": _DIGIT}), {"type": "object"}]},
    {"enum": ["only"]},
    {"const": 'ü\n"\\'},
    {"const": None},
    {"const": [1, [2, []], {}]},
    closed({"tool": {"const": "search"}, "arguments": closed({"query": _STRING, "limit": _DIGIT}, ["query"])}),
    closed({"steps": array(closed({"thought": _STRING, "done": {"type": "boolean"}}), 2, 1), "answer": _STRING}),
    closed({"matrix": array(array(_DIGIT, 2, 2), 2, 2)}),
    closed({"a": {"type": "string", "enum": ["x", "y"]}, "b": {"type": "integer", "enum": [1, 2]}}),
    closed({"temperature": {"type": "integer", "minimum": -100, "maximum": 100}, "unit": {"enum": ["C", "F"]}}),
    closed({"sentiment": {"enum": ["positive", "negative", "neutral"]}, "score": _SHARE}),
    array({"anyOf": [_DIGIT, {"type": "null"}, {"type": "boolean"}]}, 4, 1),
    {"$defs": {"t": closed({"l": {"anyOf": [{"$ref": "#/$defs/t"}, _DIGIT]}, "r": _DIGIT})}, "$ref": "#/$defs/t"},
    {"title": "Described", "description": "keywords without an effect", **_POINT},
    closed({"default": {"type": "integer", "minimum": 0, "maximum": 9, "default": 3}}),
    {"type": "integer", "minimum": 10, "maximum": 12},
    {"type": "integer", "minimum": -3, "maximum": -1},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "pattern": "^a{2,4}b?$"},
    {"type": "string", "pattern": "^\\d{2}:\\d{2}$"},
    {"type": "string", "pattern": '^[^"\\\\]{1,4}$'},
    {"type": "object", "patternProperties": {"^x_[a-c]$": _DIGIT}, "additionalProperties": False, "maxProperties": 2},
    closed({f"p{i}": _DIGIT for i in range(8)}),
    closed({f"p{i}": _DIGIT for i in range(8)}, ["p0", "p7"]),
    closed({"a": {"anyOf": [array(_DIGIT, 1), closed({"n": _DIGIT})]}}),
    closed({"nested": {"anyOf": [{"anyOf": [{"const": 1}, {"const": 2}]}, {"const": "x"}]}}),
    closed({"list": array({"const": "😀"}, 3, 2)}),
    closed({"url": {"type": "string", "pattern": "^https://[a-z]{1,6}\\.org$"}}),
    closed({"yes": {"const": True}, "no": {"const": False}, "none": {"const": None}}),
    closed({"version": {"type": "string", "pattern": "^[0-9]\\.[0-9]\\.[0-9]$"}}),
    array(_row({"enum": ["k", "l"]}, _DIGIT), 2, 1),
)


def combined() -> Iterator[Schema]:
    """Yield objects, arrays, unions and references over the leaves and pairs of them."""
    for leaf in LEAVES:
        yield leaf
        yield closed({"value": leaf})
        yield array(leaf, 2, 1)
        yield {"anyOf": [leaf, closed({"other": leaf})]}
        yield {"$defs": {"leaf": leaf}, **closed({"a": {"$ref": "#/$defs/leaf"}})}
        yield closed({"inner": closed({"list": array(leaf, 2)}), "flag": {"type": "boolean"}})
    for first, second in itertools.islice(itertools.combinations(LEAVES, 2), 0, None):
        yield closed({"first": first, "zweite ü": second}, ["zweite ü"])


def schemas(count: int = 300) -> list[Schema]:
    """Return the schemas by hand and then combined ones."""
    return [*BY_HAND, *itertools.islice(combined(), count - len(BY_HAND))]
