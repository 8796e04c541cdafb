"""Tool calls in the text of answers: each format, malformed calls, and independence of how the text is cut."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.tool_templates import written

from lineclear.scheduler.text.call_formats import FORMATS
from lineclear.scheduler.text.call_parser import MAX_HELD, CallParser
from lineclear.scheduler.text.json_scanner import MAX_DEPTH, JsonScanner

NAMES = frozenset({"add", "get_weather"})
Calls = list[tuple[str, str]]


def parsed(
    family: str, pieces: Sequence[str], special: frozenset[str] = frozenset()
) -> tuple[str, Calls, list[tuple[str, int]]]:
    """Return content, calls with the text of their arguments, and the number of parts of each call.

    A piece that is a marker in `special` arrives as a special token.
    """
    parser = CallParser(FORMATS[family], NAMES, special)
    contents: list[str] = []
    calls: dict[int, list[str]] = {}
    names: dict[int, str] = {}

    def take() -> None:
        content, parts = parser.take()
        contents.append(content)
        for part in parts:
            assert bool(part.name) == (part.call not in names), "the name is in the first part"
            names.setdefault(part.call, part.name)
            calls.setdefault(part.call, []).append(part.arguments)

    for piece in pieces:
        if piece in special:
            parser.push_special(piece)
        else:
            parser.push(piece)
        take()
    parser.finish()
    take()
    assert list(calls) == list(range(len(calls)))
    found = [(names[index], "".join(parts)) for index, parts in calls.items()]
    return "".join(contents), found, [(names[index], len(parts)) for index, parts in calls.items()]


def whole(family: str, text: str) -> tuple[str, Calls]:
    return parsed(family, [text])[:2]


CALL = ("add", '{"a": 1}')
OTHER = ("get_weather", "{}")
ADD = '{"name": "add", "arguments": {"a": 1}}'
LLAMA_ADD = '{"name": "add", "parameters": {"a": 1}}'
GOOD = {
    "one call": ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", "", [CALL]),
    "text before": ("hermes", f"I will add.\n<tool_call>{ADD}</tool_call>", "I will add.\n", [CALL]),
    "text after": ("hermes", f"<tool_call>{ADD}\n</tool_call>\nDone.", "\nDone.", [CALL]),
    "arguments first": ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [CALL]),
    "an id": ("hermes", '<tool_call>{"id": "7", "name": "add", "arguments": {"a": 1}}</tool_call>', "", [CALL]),
    "no arguments": ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    "no end marker": ("hermes", f"<tool_call>{ADD}", "", [CALL]),
    "two without end markers": ("hermes", f"<tool_call>{ADD}\n<tool_call>{ADD}", "", [CALL, CALL]),
    "markers in arguments": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call><tool_call>\\""}}</tool_call>',
        "",
        [("add", '{"a": "</tool_call><tool_call>\\""}')],
    ),
    "a marker twice": ("hermes", f"<tool_call><tool_call>{ADD}</tool_call>", "<tool_call>", [CALL]),
    "cut by length": ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [1, ', "", [("add", '{"a": [1, ')]),
    "only space": ("hermes", " \n", " \n", []),
    "llama": ("llama3_json", f"\n{LLAMA_ADD}", "", [CALL]),
    "llama's other key": ("llama3_json", '{"type": "function", "name": "add", "arguments": {"a": 1}}', "", [CALL]),
    "separated by ;": ("llama3_json", LLAMA_ADD + '; {"name": "get_weather", "parameters": {}}', "", [CALL, OTHER]),
    "python tags": (
        "llama3_json",
        f'Now: <|python_tag|>{LLAMA_ADD}<|python_tag|>{{"name": "add"}}',
        "Now: ",
        [CALL, ("add", "{}")],
    ),
    "an array": (
        "mistral",
        f'[TOOL_CALLS] [{ADD}, {{"name": "get_weather", "arguments": {{}}, "id": "x"}}]',
        "",
        [CALL, OTHER],
    ),
    "named": ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', "", [CALL]),
    "named with ids": (
        "mistral",
        'Text [TOOL_CALLS]add[CALL_ID]abcDEF123[ARGS] {"a": 1}[TOOL_CALLS]get_weather[ARGS]{}',
        "Text ",
        [CALL, OTHER],
    ),
    "named without a tag": ("mistral", '[TOOL_CALLS]add{"a": 1}', "", [CALL]),
}


@pytest.mark.parametrize(("family", "text", "content", "calls"), GOOD.values(), ids=GOOD)
def test_calls_are_found(family: str, text: str, content: str, calls: Calls) -> None:
    assert whole(family, text) == (content, calls)
    assert parsed(family, text)[:2] == (content, calls), "cut into characters"


MALFORMED = {
    "no JSON": ("hermes", "<tool_call>add(1)</tool_call>"),
    "unknown tool": ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'),
    "arguments as text": ("hermes", '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>'),
    "no name": ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    "another key": ("hermes", '<tool_call>{"function": "add", "arguments": {"a": 1}}</tool_call>'),
    "the name twice": ("hermes", '<tool_call>{"name": "add", "name": "add"}</tool_call>'),
    "cut marker": ("hermes", "text <tool_cal"),
    "cut in the name": ("hermes", ' <tool_call>{"name": "ad'),
    "bad string": ("hermes", '<tool_call>{"name": "add\\x"}</tool_call>'),
    "long name": ("hermes", '<tool_call>{"name": "' + "x" * 300 + '"}</tool_call>'),
    "another object": ("llama3_json", '{"name": "Bob", "age": 3}'),
    "an object later": ("llama3_json", 'See {"name": "add", "parameters": {}}'),
    "python code": ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    "an empty array": ("mistral", "[TOOL_CALLS] []"),
    "an object alone": ("mistral", '[TOOL_CALLS] {"name": "add", "arguments": {}}'),
    "an unknown name": ("mistral", "[TOOL_CALLS]rm[ARGS]{}"),
    "a long tag": ("mistral", "[TOOL_CALLS]add[SOMETHING_ELSE]{}"),
    "much space": ("hermes", "<tool_call>" + " " * (2 * MAX_HELD)),
    "much space before": ("hermes", " " * (2 * MAX_HELD)),
}


@pytest.mark.parametrize(("family", "text"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_calls_are_content(family: str, text: str) -> None:
    assert whole(family, text) == (text, [])


def test_text_after_a_broken_call_is_content() -> None:
    """What passed as arguments stays in the call, and every other character is content."""
    begun = '<tool_call>{"name": "add", "arguments": {"a": '
    assert whole("hermes", begun + "nil}}</tool_call> so") == ("il}}</tool_call> so", [("add", '{"a": n')])
    assert whole("hermes", begun + "1}]</tool_call> so") == ("]</tool_call> so", [CALL])
    assert whole("llama3_json", '{"name": "add"} ; so') == (" ; so", [("add", "{}")])
    deep = "[" * MAX_DEPTH
    assert whole("hermes", begun + deep) == ("[", [("add", '{"a": ' + deep[1:])])


@pytest.mark.parametrize("family", FORMATS)
def test_arguments_pass_through_before_their_end(family: str) -> None:
    text = written(family, ("add", {"a": "x" * 100}))
    assert parsed(family, text)[2] > [("add", 100)]
    name_only = text[: text.index("{", text.index("add"))]
    assert parsed(family, name_only)[1] == []


@pytest.mark.parametrize(
    ("family", "pieces", "content", "calls"),
    [
        (
            "mistral",
            ["ok ", "[TOOL_CALLS]", "add", "[CALL_ID]", "a1", "[ARGS]", '{"a"', ": 1}", "[TOOL_CALLS]", "add{}"],
            "ok ",
            [CALL, ("add", "{}")],
        ),
        ("mistral", ["[TOOL_CALLS]", f" [{ADD}]"], "", [CALL]),
        ("mistral", ["[TOOL_", "CALLS]add{}"], "[TOOL_CALLS]add{}", []),
        (
            "mistral",
            ["[TOOL_CALLS]", "add", "[TOOL_CALLS]", "add", "[ARGS]", '{"a": ', "[ARGS]", "x"],
            "[TOOL_CALLS]add[ARGS]x",
            [("add", '{"a": ')],
        ),
        ("hermes", ["<tool_call>", f"\n{ADD}\n", "</tool_call>", "\n", "</tool_call>"], "\n</tool_call>", [CALL]),
        (
            "llama3_json",
            ["<|python_tag|>", '{"name": "add", "na', "<|python_tag|>", '{"name": "add"}'],
            '<|python_tag|>{"name": "add", "na',
            [("add", "{}")],
        ),
    ],
)
def test_markers_as_special_tokens(family: str, pieces: list[str], content: str, calls: Calls) -> None:
    assert parsed(family, pieces, FORMATS[family].markers)[:2] == (content, calls)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.sampled_from(["a", "city", "</tool_call>", '"', "\\"]) | st.text(), json_values)
calls = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), arguments), min_size=1, max_size=4)
MARKERS = ["<tool_call>", "</tool_call>", "<tool_call", "<", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"]
OBJECTS = ['{"name": "add", "arguments": {', '{"name": "add", "parameters": {"a": [1, true']
OBJECTS += ['{"arguments": {}, "name": "add"}', '"name"', '"arguments"', "add", "x", "-1e5", "0"]
FRAGMENTS = [*MARKERS, *OBJECTS, "[", "]", ",", ";", "{", "}", "}}", '"}', '"', "\\", ":", " ", "\n"]
outputs = st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join)


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted({0, len(text), *(end % (len(text) + 1) for end in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("family", FORMATS)
@given(text=outputs, cuts=st.lists(st.integers(0, 500), max_size=12))
@settings(max_examples=80, deadline=None)
@example(text="<tool_call><tool_call>", cuts=[13])
def test_parts_do_not_depend_on_the_cuts(family: str, text: str, cuts: list[int]) -> None:
    expected = whole(family, text)
    assert parsed(family, cut(text, cuts))[:2] == expected
    assert parsed(family, text)[:2] == expected
    if not expected[1]:
        assert expected[0] == text


@pytest.mark.parametrize("family", FORMATS)
@given(
    pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=16),
    cuts=st.lists(st.integers(0, 500), max_size=12),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_parts_with_special_tokens_do_not_depend_on_the_cuts(
    family: str, pieces: list[str], cuts: list[int], data: st.DataObject
) -> None:
    special = frozenset(data.draw(st.sets(st.sampled_from(sorted(FORMATS[family].markers)))))
    smaller = [part for piece in pieces for part in ([piece] if piece in special else cut(piece, cuts))]
    joined: list[str] = []
    for piece in pieces:
        if joined and piece not in special and joined[-1] not in special and joined[-1] + piece not in special:
            joined[-1] += piece
        else:
            joined.append(piece)
    expected = parsed(family, joined, special)[:2]
    assert parsed(family, smaller, special)[:2] == expected
    if not expected[1]:
        assert expected[0] == "".join(pieces)


@pytest.mark.parametrize("family", FORMATS)
@given(made=calls, cuts=st.lists(st.integers(0, 500), max_size=12))
@settings(max_examples=30, deadline=None)
def test_written_calls_are_read(family: str, made: list[tuple[str, Mapping[str, Any]]], cuts: list[int]) -> None:
    content, found, _ = parsed(family, cut(written(family, *made), cuts))
    assert content == ""
    assert [(name, json.loads(text)) for name, text in found] == made


@given(value=st.dictionaries(st.text(), json_values), indent=st.none() | st.integers(0, 2), rest=st.text(max_size=5))
@settings(max_examples=80, deadline=None)
def test_scanner_finds_the_end_of_an_object(value: Any, indent: int | None, rest: str) -> None:
    for text in (json.dumps(value, indent=indent), json.dumps(value, ensure_ascii=False)):
        scanner = JsonScanner()
        assert scanner.feed(text + rest) == len(text)
        assert scanner.is_done
        assert not scanner.is_broken


ALPHABET = '{}[]:,"\\ \n\x01aeu0123.+-E'


@given(text=st.text(ALPHABET, max_size=12) | st.lists(st.sampled_from(FRAGMENTS)).map("".join))
@settings(max_examples=250, deadline=None)
@example(text='"a":01}')
@example(text='"a":-}')
@example(text='"a":1.}')
@example(text='"a":"\\u12G4"}')
@example(text='"a":tru }')
def test_scanner_agrees_with_json(text: str) -> None:
    text = "{" + text
    scanner = JsonScanner()
    end = scanner.feed(text)
    assert end == sum(1 for _ in text[:end])
    assert scanner.is_done == any(is_object(text[:i]) for i in range(end + 1))
    if scanner.is_done:
        assert is_object(text[:end])
    assert scanner.is_broken == (end < len(text) and not scanner.is_done)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


HOSTILE = {
    "markers": ("hermes", "<tool_call>"),
    "partial markers": ("hermes", "<tool_cal"),
    "begun calls": ("hermes", '<tool_call>{"arguments": {"'),
    "endless names": ("hermes", '<tool_call>{"name": "'),
    "calls": ("llama3_json", '{"name": "add", "parameters": {}};'),
    "brackets": ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [[['),
    "mistral": ("mistral", "[TOOL_CALLS]["),
}


@pytest.mark.parametrize(("family", "unit"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("size", [3, 10**6], ids=["pieces", "whole"])
def test_hostile_output_takes_linear_work(family: str, unit: str, size: int) -> None:
    """Counts the calls of functions for a text and for one of twice the length."""

    def work(num_characters: int) -> int:
        text = unit * (num_characters // len(unit))
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        count = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(profile)
        try:
            parsed(family, pieces)
        finally:
            sys.setprofile(None)
        return count

    assert work(MAX_HELD // 2) <= 2.2 * work(MAX_HELD // 4)
