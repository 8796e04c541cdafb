"""Forms of an answer in requests, and answers as Python values."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypedDict

import pytest

from lineclear.client import Client, Request, Sampling
from lineclear.client.response_format import schema_of, value_of
from lineclear.client.testing import FakeTransport
from lineclear.errors import InvalidRequest
from lineclear.v1.sampling_pb2 import Choice, StructuredOutput


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: float


@dataclass
class Shape:
    name: str
    colour: Colour
    points: list[Point]
    size: tuple[int, int] | None
    tags: dict[str, bool]


class Card(TypedDict, total=False):
    suit: Literal["hearts", "spades"]


class Model:
    """Has the methods of a pydantic model that the client calls."""

    def __init__(self, number: int) -> None:
        self.number = number

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object", "properties": {"number": {"type": "integer"}}}

    @classmethod
    def model_validate_json(cls, text: str) -> Model:
        return cls(**json.loads(text))


def form(**params: Any) -> StructuredOutput:
    return Request.of("x", **params).to_proto().sampling.structured_output


def test_each_form_sets_its_field() -> None:
    assert form(regex="a+") == StructuredOutput(regex="a+")
    assert form(choice=["a", "b,c"]) == StructuredOutput(choice=Choice(texts=["a", "b,c"]))
    assert form(grammar="start: /x/") == StructuredOutput(grammar="start: /x/")
    assert form(json_object=True) == StructuredOutput(json_object=True)
    assert form(json_schema='{"type":"null"}') == StructuredOutput(json_schema='{"type":"null"}')
    assert form(response_format=Model).json_schema == json.dumps(Model.model_json_schema())
    assert not Request.of("x").to_proto().sampling.HasField("structured_output")


def test_form_of_the_request_replaces_that_of_the_client() -> None:
    message = Request.of("x", regex="a").to_proto(Sampling(json_object=True, temperature=0))
    assert message.sampling.structured_output == StructuredOutput(regex="a")
    assert message.sampling.temperature == 0


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"regex": "a", "grammar": "b"}, "regex and grammar; give one"),
        ({"choice": "abc"}, "a list of texts"),
        ({"regex": 3}, "must be a text"),
        ({"json_object": True, "json_whitespace": "some"}, "compact or any"),
        ({"constraint_start": "</think>"}, "needs one of"),
    ],
)
def test_invalid_form_is_refused(params: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        form(**params)


def test_schema_and_value_of_a_dataclass() -> None:
    schema = json.loads(schema_of(Shape))
    assert schema["required"] == ["name", "colour", "points", "size", "tags"]
    assert schema["properties"]["colour"] == {"enum": ["red", "blue"]}
    assert schema["properties"]["points"]["items"]["properties"] == {"x": {"type": "integer"}, "y": {"type": "number"}}
    assert schema["properties"]["size"]["anyOf"][1] == {"type": "null"}
    text = '{"name":"a","colour":"red","points":[{"x":1,"y":2.5}],"size":null,"tags":{"b":true}}'
    assert value_of(Shape, text) == Shape("a", Colour.RED, [Point(1, 2.5)], None, {"b": True})


def test_schema_of_a_typed_dict() -> None:
    properties = {"suit": {"enum": ["hearts", "spades"]}}
    assert json.loads(schema_of(Card)) == {
        "type": "object", "properties": properties, "required": [], "additionalProperties": False
    }  # fmt: skip
    assert value_of(Card, '{"suit":"hearts"}') == {"suit": "hearts"}


@pytest.mark.parametrize("unknown", [int, 3, object()])
def test_format_without_a_schema_is_refused(unknown: Any) -> None:
    with pytest.raises(TypeError, match="response_format must be"):
        schema_of(unknown)


def test_parsed_answer() -> None:
    with Client(transport=FakeTransport('{"number":4}')) as client:
        answer = client.generate("x", response_format=Model)
        for parsed in (answer.parsed, answer.outputs[0].parsed):
            assert isinstance(parsed, Model)
            assert parsed.number == 4
        assert "response_format" not in answer.to_dict()
        assert client.generate("x", json_object=True).parsed == {"number": 4}
    with Client(transport=FakeTransport("so 4 </think>")) as client, pytest.raises(json.JSONDecodeError):
        _ = client.generate("x").parsed


@pytest.mark.parametrize(
    ("start", "text", "value"),
    [
        ("=", "x=1=2", None),
        (":", ':{"a":2}', {"a": 2}),
        ("</think>", 'so</think>"use </think> here"', "use </think> here"),
        ("</think>", '{"a":1}', {"a": 1}),
    ],
)
def test_the_form_begins_behind_the_first_occurrence(start: str, text: str, value: Any) -> None:
    with Client(transport=FakeTransport(text)) as client:
        answer = client.generate("x", json_object=True, constraint_start=start)
        if value is not None:
            assert answer.parsed == value
            assert answer.outputs[0].parsed == value
        else:
            with pytest.raises(json.JSONDecodeError):
                _ = answer.parsed


def test_reasoning_that_the_server_separated_has_the_marker() -> None:
    with Client(transport=FakeTransport('{"a":"</think>"}')) as client:
        answer = client.generate("x", json_object=True, constraint_start="</think>")
        assert dataclasses.replace(answer, reasoning="so").parsed == {"a": "</think>"}
        with_start = dataclasses.replace(answer, reasoning="so", text='Result: {"a":": "}', constraint_start="Result:")
        assert with_start.parsed == {"a": ": "}
