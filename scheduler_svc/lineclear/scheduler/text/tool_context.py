"""What a chat template gets about tools: their schemas, the calls of earlier answers, and results.

All of it comes from the caller, so it must not write special tokens either (see `template_renderer`). Templates compare
the words of JSON Schema (`type == "object"`), so these words stay as they are, and so do words that the template names.
All other texts and keys are replaced character by character, as message contents are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

_SCHEMA_WORDS = """
$defs $id $ref $schema additionalProperties allOf anyOf array boolean const contains content default definitions
dependentRequired deprecated description else enum examples exclusiveMaximum exclusiveMinimum format if integer items
maxItems maxLength maximum minItems minLength minProperties minimum multipleOf name not null nullable number object
oneOf pattern patternProperties prefixItems properties propertyNames readOnly required strict string then title type
uniqueItems writeOnly
"""
_FIELD_WORDS = "arguments function id parameters reasoning_content tool_call_id tool_calls"
_KEPT_WORDS = frozenset(f"{_SCHEMA_WORDS} {_FIELD_WORDS}".split())
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ESCAPED = re.compile(r"\\\\|\\U(0010[0-9a-f]{4})")


class ToolContext(NamedTuple):
    """The tools of a conversation in OpenAI's form, and further fields of its messages by index.

    Templates get schemas and arguments as JSON values. Until `parsed` they are JSON texts, to save the event loop work.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    message_fields: Mapping[int, Mapping[str, Any]] = {}

    def parsed(self) -> ToolContext:
        """Return this context with the values of schemas and arguments, in place of their JSON texts."""
        tools = [{**tool, "function": _parse(tool["function"], "parameters")} for tool in self.tools]
        fields = {index: {**entry, **_parse_calls(entry)} for index, entry in self.message_fields.items()}
        return ToolContext(tools, fields)

    @property
    def characters(self) -> set[str]:
        """The characters of all texts and keys."""
        return set().union(*_texts(self.tools), *_texts(list(self.message_fields.values())))


class Opaque(str):
    """A text with placeholder characters. Its repr shows them, as that of other printable characters does."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else found[0], str.__repr__(self))


def kept_words(literals: Set[str]) -> frozenset[str]:
    """Return the words that stay as they are under a template with these literals."""
    return _KEPT_WORDS | {literal for literal in literals if _WORD.fullmatch(literal)}


def opaque(value: Any, taint: Callable[[str], str], kept: Set[str]) -> Any:
    """Return a copy of a JSON value with each text and key replaced by `taint`, except for the words in `kept`."""
    if isinstance(value, str):
        return value if value in kept else Opaque(taint(value))
    if isinstance(value, Mapping):
        return {opaque(key, taint, kept): opaque(entry, taint, kept) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [opaque(entry, taint, kept) for entry in value]
    return value


def _parse(function: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {**function, key: json.loads(function[key])}


def _parse_calls(fields: Mapping[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in fields:
        return {}
    # Templates write the arguments with `tojson`, so they get the object, as transformers' documentation asks for.
    calls = [{**call, "function": _parse(call["function"], "arguments")} for call in fields["tool_calls"]]
    return {"tool_calls": calls}


def _texts(value: Any) -> Iterator[str]:
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            rest.extend(item)
            rest.extend(item.values())
        elif isinstance(item, list | tuple):
            rest.extend(item)
