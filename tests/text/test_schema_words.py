"""Each word of a JSON Schema is enforced, an annotation, or refused with its path."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from support.service import DEMO_MODEL

from lineclear.model_files.token_table import parser_limits, token_table
from lineclear.scheduler.text import schema_words
from lineclear.scheduler.text.schema_to_grammar import grammar_of

DRAFT = "https://json-schema.org/draft/2020-12/schema"


@pytest.fixture(scope="module")
def tokens() -> LLTokenizer:
    return token_table(DEMO_MODEL)


def accepts(tokens: LLTokenizer, schema: dict[str, Any], text: str) -> bool:
    grammar = grammar_of("json_schema", json.dumps(schema), any_whitespace=False)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    found = tokens.tokenize_str(text)
    return bool(matcher.try_consume_tokens(found) == len(found) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"type": "integer", "minimun": 3}', "#/minimun, which is not enforced; did you mean minimum?"),
        ('{"type": "string", "contentEncoding": "base64"}', "#/contentEncoding"),
        ('{"properties": {"a": {"items": {"anyOf": [{"foo": 1}]}}}}', "#/properties/a/items/anyOf/0/foo"),
        ('{"$defs": {"a": {"nullable": true}}}', '#/$defs/a/nullable, which is not enforced; add "null" to the types'),
        ('{"type": "array", "uniqueItems": true}', "#/uniqueItems, which is not enforced; remove it"),
        ('{"type": "array", "contains": {}}', "#/contains, which is not enforced; remove it"),
        ('{"propertyNames": {"maxLength": 3}}', "#/propertyNames, which is not enforced; remove it"),
        ('{"x-guidance": {"lenient": true}, "not": {}}', "#/x-guidance"),
        ('{"prefixItems": [{}], "additionalItems": false}', "#/additionalItems, which is not enforced"),
        ('{"items": [{"type": "string"}]}', "use prefixItems"),
        ('{"type": "integer", "multipleOf": -2}', "#/multipleOf -2; it must be a number above 0"),
        ('{"type": "integer", "multipleOf": 0}', "above 0"),
        ('{"type": "integer", "type": "string"}', 'the key "type" twice'),
        ('{"properties": {"a": {}, "a": {}}}', 'the key "a" twice'),
    ],
)
def test_word_that_would_be_ignored_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^has ") as refused:
        grammar_of("json_schema", text, any_whitespace=False)
    assert problem in str(refused.value)


@pytest.mark.parametrize("word", [*sorted(schema_words.ANNOTATIONS), "x-order", "x-enum-varnames"])
def test_annotation_changes_nothing(tokens: LLTokenizer, word: str) -> None:
    schema = {"type": "integer", word: {"$schema": DRAFT, "$id": "http://example.com/a"}.get(word, "a")}
    assert accepts(tokens, schema, "7")
    assert not accepts(tokens, schema, '"7"')


def test_names_of_properties_and_constants_are_no_words(tokens: LLTokenizer) -> None:
    schema = {"type": "object", "properties": {"minimun": {"const": {"foo": 1}}}, "required": ["minimun"]}
    assert accepts(tokens, schema, '{"minimun":{"foo":1}}')


def test_words_that_exclude_nothing_are_taken(tokens: LLTokenizer) -> None:
    """As zod writes a record, and OpenAPI a property that is not nullable."""
    values = {"type": "array", "uniqueItems": False, "items": {"type": "integer", "nullable": False}}
    schema = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": values}
    assert accepts(tokens, schema, '{"a":[1,1]}')
    assert not accepts(tokens, schema, '{"a":[null]}')


def test_property_of_a_discriminator_is_required(tokens: LLTokenizer) -> None:
    """As pydantic writes a union by `kind`, which has a default."""
    cat = {"properties": {"kind": {"const": "cat", "default": "cat"}, "lives": {"type": "integer"}}, "type": "object"}
    dog = {"properties": {"kind": {"const": "dog", "default": "dog"}, "name": {"type": "string"}}, "type": "object"}
    kinds = {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat", "dog": "#/$defs/dog"}}
    either = {"discriminator": kinds, "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}
    schema = {"$defs": {"cat": cat, "dog": dog}, "type": "array", "items": either}
    assert accepts(tokens, schema, '[{"kind":"dog","name":"a"},{"kind":"cat","lives":9}]')
    assert not accepts(tokens, schema, '[{"lives":9}]')
    assert not accepts(tokens, schema, '[{"kind":"cow"}]')


def is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def test_dates_are_those_of_the_calendar(tokens: LLTokenizer) -> None:
    days = ("01-31", "02-01", "02-28", "02-29", "02-30", "04-31", "12-31", "12-32", "13-01", "00-10", "10-00")
    for text in (f"{year}-{day}" for year in ("0004", "1900", "2000", "2023", "2024", "2100") for day in days):
        assert accepts(tokens, {"type": "string", "format": "date"}, f'"{text}"') == is_date(text), text
        moment = {"type": "string", "format": "date-time", "pattern": "Z$"}
        assert accepts(tokens, moment, f'"{text}T10:20:30Z"') == is_date(text), text


@pytest.mark.parametrize("time", ["23:59:59Z", "00:00:00.5+01:30", "12:00:60Z", "23:59:60Z", "24:00:00Z", "12:60:00Z"])
def test_no_time_has_a_second_60(tokens: LLTokenizer, time: str) -> None:
    is_right = time in ("23:59:59Z", "00:00:00.5+01:30")
    assert accepts(tokens, {"format": "time"}, f'"{time}"') == is_right
    assert accepts(tokens, {"type": "string", "format": "date-time"}, f'"2016-12-31T{time}"') == is_right


FORMATS = {
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", ["123e4567-e89b-12d3-a456-42661417400", "x"]),
    "ipv4": ("1.2.3.4", ["256.1.1.1", "01.2.3.4", "1.2.3"]),
    "ipv6": ("::1", ["1::2::3", "12345::", ":"]),
    "email": ("a@b.co", ["a b@c", "a@-b.co", "a..b@c.de"]),
    "hostname": ("a.b", ["-a.b", "a_b", "a" * 64]),
    "duration": ("P1DT2H", ["P", "PT", "P1W2D", "1D"]),
    "uri": ("http://a/b", ["a b", "//a", "http://[::1]/%zz"]),
}


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_format_is_enforced(tokens: LLTokenizer, form: str) -> None:
    right, wrong = FORMATS[form]
    schema = {"type": "string", "format": form}
    assert accepts(tokens, schema, f'"{right}"')
    assert [text for text in wrong if accepts(tokens, schema, f'"{text}"')] == []


BEHAVIOUR: dict[str, tuple[dict[str, Any], str, str]] = {
    "type": ({"type": ["integer", "null"]}, "null", '"a"'),
    "enum": ({"enum": [1, 2, 3], "minimum": 2}, "2", "1"),
    "const": ({"const": "a"}, '"a"', '"b"'),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "string"}], "maxLength": 2}, '"ab"', '"abc"'),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "1", "null"),
    "allOf": ({"allOf": [{"minimum": 3}, {"type": "integer"}]}, "3", "2"),
    "$ref": ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, "4", "1"),
    "$defs": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, "1", '"a"'),
    "definitions": ({"$ref": "#/definitions/a", "definitions": {"a": {"type": "integer"}}}, "1", '"a"'),
    "properties": ({"properties": {"a": {"type": "integer"}}, "type": "object"}, '{"a":1}', '{"a":"b"}'),
    "required": ({"type": "object", "required": ["b"]}, '{"b":1}', "{}"),
    "additionalProperties": ({"type": "object", "additionalProperties": {"type": "string"}}, '{"b":"c"}', '{"b":2}'),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
        '{"xa":1}',
        '{"xa":"b"}',
    ),
    "minProperties": ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
    "maxProperties": ({"type": "object", "maxProperties": 1}, '{"a":1}', '{"a":1,"b":2}'),
    "items": ({"type": "array", "items": {"type": "integer"}}, "[1]", '["a"]'),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, "[1]", "[1,2]"),
    "minItems": ({"type": "array", "minItems": 1}, "[1]", "[]"),
    "maxItems": ({"type": "array", "maxItems": 1}, "[1]", "[1,2]"),
    "minLength": ({"type": "string", "minLength": 2}, '"ab"', '"a"'),
    "maxLength": ({"type": "string", "maxLength": 1}, '"a"', '"ab"'),
    "pattern": ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aa"', '"ab"'),
    "format": ({"type": "string", "format": "date"}, '"2020-02-29"', '"2020-13-01"'),
    "minimum": ({"type": "integer", "minimum": 3}, "3", "2"),
    "maximum": ({"type": "integer", "maximum": 3}, "3", "4"),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 3}, "4", "3"),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 3}, "2", "3"),
    "multipleOf": ({"type": "number", "multipleOf": 0.5}, "1.5", "1.3"),
}


@pytest.mark.parametrize("word", sorted(schema_words.ENFORCED))
def test_enforced_word_is_enforced(tokens: LLTokenizer, word: str) -> None:
    schema, right, wrong = BEHAVIOUR[word]
    assert accepts(tokens, schema, right)
    assert not accepts(tokens, schema, wrong)
