"""The formats in which models write tool calls, each as a generator that reads one marker's calls.

A generator receives one character for each `yield`, or a special token as a whole. It yields a JsonScanner to have the
rest of an object passed through it instead. It reports names and arguments to a `CallSink`, and raises NotACall at the
first character that no call continues with.

hermes (Hermes 2, Qwen 2.5 and 3): <tool_call>{"name": "f", "arguments": {}}</tool_call>
llama3_json (Llama 3): {"name": "f", "parameters": {}}, also after <|python_tag|>, several separated by ;
mistral: [TOOL_CALLS] [{"name": "f", "arguments": {}}], newer: [TOOL_CALLS]f[ARGS]{}, with [CALL_ID]... between them
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from lineclear.scheduler.text.json_scanner import JsonScanner

Reader: TypeAlias = Generator[JsonScanner | None, str, None]
_Text: TypeAlias = Generator[JsonScanner | None, str, str]

SPACE_PATTERN = re.compile(r"[ \t\n\r]*")
_SPACE = " \t\n\r"
_MAX_STRING = 256  # characters of a key, name or id
_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("id", "type")
_NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")


class NotACall(Exception):
    """The text is no call in this format."""


class CallSink(Protocol):
    """Receives the parts of a call in any order."""

    def name(self, name: str) -> None:
        """Take the name. Raises NotACall if no tool has it."""

    def arguments(self, text: str) -> None:
        """Take the first characters of the arguments. The rest passes through the yielded scanner."""

    def complete(self) -> None:
        """End a call. Raises NotACall if it has no name."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls. `first` may begin a call where no text precedes."""

    name: str
    opens: tuple[str, ...]
    read: Callable[[CallSink], Reader]
    inner: tuple[str, ...] = ()
    """Special tokens within calls."""
    closes: str = ""
    """Text that may follow a call."""
    first: str = ""
    read_first: Callable[[CallSink], Reader] | None = None
    space_between: re.Pattern[str] = SPACE_PATTERN
    """What may be between two calls."""

    @property
    def markers(self) -> frozenset[str]:
        """The markers that may be special tokens."""
        return frozenset((*self.opens, *self.inner, *((self.closes,) if self.closes else ())))


def _space() -> _Text:
    """Return the first character that is no space."""
    while True:
        c = yield None
        if c not in _SPACE:
            return c


def _string(c: str) -> _Text:
    """Read a JSON string whose first character is `c`."""
    if c != '"':
        raise NotACall
    raw = [c]
    while True:
        c = yield None
        raw.append(c)
        if c == '"':
            break
        if c == "\\":
            raw.append((yield None))
        if len(raw) > _MAX_STRING or len(raw[-1]) > 1:  # too long, or a special token
            raise NotACall
    try:
        return str(json.loads("".join(raw)))
    except ValueError:
        raise NotACall from None


def _object(sink: CallSink, c: str) -> Reader:
    """Read the arguments, whose first character is `c`."""
    if c != "{":
        raise NotACall
    scanner = JsonScanner()
    scanner.feed(c)
    sink.arguments(c)
    yield scanner


def _call(sink: CallSink) -> Reader:
    """Read the rest of an object with name and arguments, after its first character."""
    seen: set[str] = set()
    while True:
        key = yield from _string((yield from _space()))
        kind = "arguments" if key in _ARGUMENTS else key
        if kind in seen or kind not in ("name", "arguments", *_IGNORED) or (yield from _space()) != ":":
            raise NotACall
        seen.add(kind)
        c = yield from _space()
        if kind == "arguments":
            yield from _object(sink, c)
        else:
            text = yield from _string(c)
            if kind == "name":
                sink.name(text)
        c = yield from _space()
        if c == "}":
            return sink.complete()
        if c != ",":
            raise NotACall


def _after_marker(sink: CallSink) -> Reader:
    """Read an object after a marker."""
    if (yield from _space()) != "{":
        raise NotACall
    yield from _call(sink)


def _mistral(sink: CallSink) -> Reader:
    c = yield from _space()
    if c != "[":
        yield from _named(sink, c)
        return
    while True:
        yield from _after_marker(sink)
        c = yield from _space()
        if c == "]":
            return
        if c != ",":
            raise NotACall


def _named(sink: CallSink, c: str) -> Reader:
    """Read the newer form of Mistral: name, [CALL_ID] and an id, [ARGS], arguments."""
    name: list[str] = []
    while c in _NAME_CHARACTERS and len(name) < _MAX_STRING:
        name.append(c)
        c = yield None
    sink.name("".join(name))
    tag = yield from _tag(c)
    if tag == "[CALL_ID]":
        length = 0
        while (c := (yield None)) in _NAME_CHARACTERS and length < _MAX_STRING:
            length += 1
        tag = yield from _tag(c)
    if tag == "[ARGS]":
        tag = yield from _space()
    yield from _object(sink, tag)
    sink.complete()


def _tag(c: str) -> _Text:
    """Return `c`, or the whole tag if it begins one as text."""
    if c != "[":
        return c
    tag = c
    while c != "]" and len(tag) <= len("[CALL_ID]"):
        c = yield None
        tag += c
    return tag


FORMATS = {
    "hermes": CallFormat("hermes", ("<tool_call>",), _after_marker, closes="</tool_call>"),
    "llama3_json": CallFormat(
        "llama3_json",
        ("<|python_tag|>",),
        _after_marker,
        first="{",
        read_first=_call,
        space_between=re.compile(r"[ \t\n\r;]*"),
    ),
    "mistral": CallFormat("mistral", ("[TOOL_CALLS]",), _mistral, inner=("[ARGS]", "[CALL_ID]")),
}
NO_CALLS = CallFormat("", (), _after_marker)
"""All text is content."""
