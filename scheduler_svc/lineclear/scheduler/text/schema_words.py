"""Refuses the words of a JSON Schema that its grammar would not enforce (JSON Schema 2020-12).

llguidance ignores words that it does not know, and some values. A schema that is ignored in part gives answers that it
does not describe, so each word is either enforced, an annotation, or refused with its path.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any

ANNOTATIONS = frozenset(
    {"title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$schema", "$id", "$comment", "$anchor", "discriminator"}
)
"""`discriminator` is OpenAPI's: the schemas of its oneOf say the same, but for its property being required."""
_OPTIONS = "x-guidance"
"""llguidance's. Other words with x- are annotations, as in OpenAPI."""
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "propertyNames": ({"type": "string"}, {}, True),
    "uniqueItems": (False,),
    "nullable": (False,),
}
"""Words that llguidance does not have, and their values that exclude nothing. zod writes the first for each record."""
_ADVICE = {"nullable": 'add "null" to the types'}
_LIKENESS = 0.8
"""Of a word and its misspelling: `minimun` has 0.86. `propertyNames` and `properties`, two words, have 0.78."""
_ONE = frozenset({"items", "additionalProperties"})
"""Words whose value is a schema."""
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_OTHERS = frozenset(
    {"type", "enum", "const", "$ref", "required", "minProperties", "maxProperties", "minItems", "maxItems"}
    | {"minLength", "maxLength", "pattern", "format"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_NO_SECOND_60 = "^[^:]*:[0-9]{2}:[0-5]"
_DAY = f"^([0-9]{{4}}-(0[13-9]|1[0-2])|[0-9]{{4}}-02-([01]|2[0-8])|{_LEAP_YEAR}-02-29)"
_EXACT = {"date": (_DAY,), "time": (_NO_SECOND_60,), "date-time": (_DAY, _NO_SECOND_60)}
"""Patterns in addition to llguidance's formats, which allow February 29 in each year and second 60 at each time. In RFC
3339 a second 60 is a leap second, and those come from a table; no answer has one."""
ENFORCED = _ONE | _LISTS | _MAPS | _OTHERS


def parsed(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError for a key that an object has twice."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key in found if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"has the key {json.dumps(twice)} twice in one object; remove one")
    return found


def check(schema: Any) -> None:
    """Raise ValueError with the path of the first word that would be ignored."""
    for path, node in _schemas("#", schema):
        for word, value in node.items():
            if word in ENFORCED:
                _check_value(f"{path}/{word}", word, value)
            elif value in _NO_EFFECT.get(word, ()):
                continue
            elif word not in ANNOTATIONS and (not word.startswith("x-") or word == _OPTIONS):
                raise ValueError(f"has {path}/{_cut(word)}, which is not enforced{_advice(word)}")


def make_exact(schema: Any) -> None:
    """Add what llguidance's formats leave out to a schema, in place, and require the property of a discriminator.

    Words that have no effect are removed, because llguidance does not have them.

    OpenAPI wants it required. pydantic leaves that out if it has a default, and then an object without it matches
    several schemas of a oneOf.
    """
    for _, node in list(_schemas("#", schema)):
        for word, values in _NO_EFFECT.items():
            if word in node and node[word] in values:
                del node[word]
        name = node["discriminator"].get("propertyName") if isinstance(node.get("discriminator"), dict) else None
        if isinstance(name, str) and isinstance(node.get("oneOf"), list):
            node["oneOf"] = [{"allOf": [one, {"required": [name]}]} for one in node["oneOf"]]
        form = node.get("format")
        if isinstance(form, str) and form in _EXACT and isinstance(node.get("allOf", []), list):
            node["allOf"] = [*node.get("allOf", []), *({"pattern": pattern} for pattern in _EXACT[form])]


def _check_value(path: str, word: str, value: Any) -> None:
    if word == "multipleOf" and not (_is_number(value) and value > 0):
        raise ValueError(f"has {path} {_cut(json.dumps(value))}; it must be a number above 0")
    if word == "items" and isinstance(value, list):
        raise ValueError(f"has a list as {path}; use prefixItems")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _advice(word: str) -> str:
    close = difflib.get_close_matches(word, ENFORCED | ANNOTATIONS, n=1, cutoff=_LIKENESS)
    return f"; did you mean {close[0]}?" if close else f"; {_ADVICE.get(word, 'remove it')}"


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "…"


def _schemas(path: str, schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return each schema in a schema with its path, without recursion: schemas may be nested deeply."""
    waiting = [(path, schema)]
    while waiting:
        path, schema = waiting.pop()
        if not isinstance(schema, dict):
            continue  # true, false, or a mistake that llguidance reports
        yield path, schema
        for word, value in schema.items():
            at = f"{path}/{_cut(word)}"
            if word in _ONE:
                waiting.append((at, value))
            elif word in _LISTS and isinstance(value, list):
                waiting += [(f"{at}/{index}", entry) for index, entry in enumerate(value)]
            elif word in _MAPS and isinstance(value, dict):
                waiting += [(f"{at}/{_cut(name)}", entry) for name, entry in value.items()]
