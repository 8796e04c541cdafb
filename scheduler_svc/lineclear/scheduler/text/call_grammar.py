"""The grammar of an answer that must call tools, in llguidance's Lark format.

It has the text that `call_parser` reads as calls, in the form in which the chat template shows calls to the model.
Markers that are added tokens of the tokenizer are these tokens, because the model writes them so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lineclear.scheduler.text.reasoning_parser import CLOSE, OPEN, Phase

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Of JSON in calls: `tojson` of templates writes a space, other models write none."""
_NO_ARGUMENTS = {"type": "object", "additionalProperties": False}
_OPENS_OBJECT = frozenset(
    ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if")
)


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """What an answer must call. `parameters` are the JSON Schemas of the arguments; empty: no arguments."""

    parser: str
    """Name of the format (`call_formats.FORMATS`)."""
    names: tuple[str, ...]
    parameters: tuple[str, ...]
    is_parallel: bool
    """Whether the answer may have several calls."""
    phase: str
    """The reasoning before the calls, a value of `reasoning_parser.Phase`."""
    markers: Mapping[str, int]
    """The markers that are tokens of the tokenizer, and their ids."""
    tags: tuple[str, ...] = ()
    """The markers within calls that the chat template has."""

    def packed(self) -> str:
        return json.dumps(asdict(self))


def unpacked(text: str) -> ForcedCalls:
    """Return the value of `ForcedCalls.packed`."""
    return ForcedCalls(**json.loads(text))


def arguments_schema(parameters: str) -> dict[str, Any]:
    """Return the schema of a tool's arguments: an object, closed unless the schema says what else it may have."""
    schema = json.loads(parameters) if parameters else _NO_ARGUMENTS
    if _OPENS_OBJECT.isdisjoint(schema):
        schema = {**schema, "additionalProperties": False}
    return {**schema, "type": "object", "x-guidance": _SEPARATORS}


def lark(calls: ForcedCalls) -> str:
    """Return the grammar. Raises ValueError if a schema is no JSON."""
    rules = [f"start: {_thought(calls)}{_BODIES[calls.parser](calls)}"]
    for index, (name, parameters) in enumerate(zip(calls.names, calls.parameters, strict=True)):
        rules.append(f"call_{index}: {_call(calls, name, f'args_{index}')}")
        rules.append(f"args_{index}: %json {json.dumps(arguments_schema(parameters))}")
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(calls.names))))
    if CLOSE in calls.markers:
        rules.append(f"thought: /(?s:.*)/ {_marker(calls, CLOSE)}")
    else:
        rules.append("thought[lazy]: /(?s:.*)<\\/think>/")
    return "\n".join(rules)


def _thought(calls: ForcedCalls) -> str:
    phase, opens = Phase(calls.phase), _marker(calls, OPEN)
    after = r"/[ \n]{0,2}/"
    if phase is Phase.CONTENT:
        return ""
    if phase is Phase.REASONING:
        return f"thought {after} "
    if phase is Phase.EXPECTED:
        return f"{opens}? thought {after} "
    return f"({opens} thought {after})? "


def _marker(calls: ForcedCalls, marker: str) -> str:
    return f"<[{calls.markers[marker]}]>" if marker in calls.markers else json.dumps(marker)


def _repeated(item: str, separator: str, *, is_parallel: bool) -> str:
    return f"{item} ({separator} {item})*" if is_parallel else item


def _hermes(calls: ForcedCalls) -> str:
    call = f'{_marker(calls, "<tool_call>")} "\\n" call "\\n" {_marker(calls, "</tool_call>")}'
    return _repeated(f"({call})", '"\\n"', is_parallel=calls.is_parallel)


def _llama3_json(calls: ForcedCalls) -> str:
    tag = "<|python_tag|>"
    opens = f"{_marker(calls, tag)}? " if tag in calls.markers else ""
    return opens + _repeated("call", '"; "', is_parallel=calls.is_parallel)


def _mistral(calls: ForcedCalls) -> str:
    opens = _marker(calls, "[TOOL_CALLS]")
    if "[ARGS]" in calls.tags:
        return _repeated(f"({opens} call)", '""', is_parallel=calls.is_parallel)
    return f'{opens} / ?/ "[" ' + _repeated("call", "/, ?/", is_parallel=calls.is_parallel) + ' "]"'


_BODIES = {"hermes": _hermes, "llama3_json": _llama3_json, "mistral": _mistral}


def _call(calls: ForcedCalls, name: str, arguments: str) -> str:
    if calls.parser == "mistral" and "[ARGS]" in calls.tags:
        has_id = "[CALL_ID]" in calls.tags
        call_id = f"{_marker(calls, '[CALL_ID]')} /[a-zA-Z0-9]{{9}}/ " if has_id else ""
        return f"{json.dumps(name)} {call_id}{_marker(calls, '[ARGS]')} {arguments}"
    key = "parameters" if calls.parser == "llama3_json" else "arguments"
    pattern = name.replace(".", "[.]")  # of [A-Za-z0-9_.-]
    return f'/\\{{"name": ?"{pattern}", ?"{key}": ?/ {arguments} "}}"'
