"""Tools in requests and calls in answers of the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client.conftest import finished, started, tokens

from lineclear.client import AsyncClient, ChatMessage, Client, FinishReason, Request, ToolCall, ToolCallDelta
from lineclear.client.answer_assembler import AnswerAssembler
from lineclear.client.testing import Answer, FakeTransport
from lineclear.errors import DataLoss, InvalidRequest
from lineclear.v1 import inference_pb2 as pb

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city", "parameters": {"type": "object"}},
}
CALL = ToolCall("call00001", "weather", '{"city": "Zürich"}')
QUESTION = ChatMessage("user", "Weather?")


class Lookup:
    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return {"type": "object", "description": "Look up", "properties": {}}


def test_tools_are_sent() -> None:
    chat = Request.of([QUESTION], tools=[WEATHER, {"name": "now"}, Lookup]).to_proto().chat
    assert [tool.name for tool in chat.tools] == ["weather", "now", "Lookup"]
    assert json.loads(chat.tools[0].parameters) == {"type": "object"}
    assert not chat.tools[1].HasField("parameters")
    assert chat.tools[2].description == "Look up"
    assert json.loads(chat.tools[2].parameters) == {"type": "object", "properties": {}}
    assert not chat.HasField("parallel_tool_calls")


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("none", pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE)),
        ("required", pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)),
        (WEATHER, pb.ToolChoice(function="weather")),
        ({"function": {"name": "weather"}}, pb.ToolChoice(function="weather")),
    ],
)
def test_choice_is_sent(choice: Any, sent: pb.ToolChoice) -> None:
    chat = Request.of([QUESTION], tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False).to_proto().chat
    assert (chat.tool_choice, chat.HasField("parallel_tool_calls"), chat.parallel_tool_calls) == (sent, True, False)


def test_messages_carry_calls_and_results() -> None:
    as_dict = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": CALL.arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [as_dict], "reasoning_content": "hm"}
    own = ChatMessage("assistant", "", [CALL], reasoning="hm")
    result = ChatMessage("tool", "sunny", tool_call_id="call00001", name="weather")
    for turn in (message, own):
        chat = Request.of([QUESTION, turn, result]).to_proto().chat
        (call,) = chat.messages[1].tool_calls
        assert (call.id, call.name, call.arguments) == (CALL.id, CALL.name, CALL.arguments)
        assert chat.messages[1].reasoning == "hm"
        assert (chat.messages[2].tool_call_id, chat.messages[2].name) == ("call00001", "weather")


@pytest.mark.parametrize(
    ("params", "path"),
    [
        ({"tools": [5]}, "chat.tools[0]"),
        ({"tools": WEATHER}, "tools"),
        ({"tools": [{"name": 5}]}, "chat.tools[0].name"),
        ({"tools": [{"name": "f", "parameters": {"a": {1}}}]}, "chat.tools[0].parameters"),
        ({"tool_choice": "weather"}, "tool_choice"),
        ({"tool_choice": {}}, "chat.tool_choice.function"),
        ({"prompt": "text", "tools": [WEATHER]}, "tools"),
        ({"prompt": [{"role": "assistant", "tool_calls": [5]}]}, "chat.messages[0].tool_calls[0]"),
    ],
)
def test_wrong_tools_are_rejected(params: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Request.of(**{"prompt": [QUESTION], **params}).to_proto()
    assert caught.value.violations[0].field == path


SCRIPT = {"Weather?": Answer(text="Let me see.", reasoning="They ask.", tool_calls=[CALL]), "sunny": "It is sunny."}


def test_answer_has_calls_and_reasoning() -> None:
    with Client(transport=FakeTransport(SCRIPT)) as client:
        deltas: list[ToolCallDelta] = []
        with client.stream([QUESTION], tools=[WEATHER]) as stream:
            for delta in stream:
                deltas += delta.tool_calls
        answer = stream.result
        assert [(d.index, d.id, d.name) for d in deltas] == [(0, "call00001", "weather")]
        assert (answer.text, answer.reasoning, answer.tool_calls) == ("Let me see.", "They ask.", (CALL,))
        assert (stream.reasoning, stream.tool_calls) == (answer.reasoning, answer.tool_calls)
        assert answer.finish_reason is FinishReason.TOOL_CALLS
        assert answer.tool_calls[0].parsed() == {"city": "Zürich"}
        assert answer.to_dict()["tool_calls"] == ({"id": CALL.id, "name": "weather", "arguments": CALL.arguments},)
        result = ChatMessage("tool", "sunny", tool_call_id=CALL.id)
        final = client.generate([QUESTION, answer.message, result], tools=[WEATHER])
        assert final.text == "It is sunny."
        assert "tool_calls" not in final.to_dict()


async def test_submitted_answer_has_calls() -> None:
    async with AsyncClient(transport=FakeTransport(SCRIPT)) as client:
        submitted = await client.submit([QUESTION], tools=[WEATHER])
        status = await submitted.poll()
        assert (status.reasoning, status.tool_calls) == ("They ask.", (CALL,))
        assert (await submitted.result()).tool_calls == (CALL,)


def test_broken_call_has_no_arguments() -> None:
    for text in ('{"a": ', "[1]"):
        with pytest.raises(ValueError):  # noqa: PT011 - json and this class raise it
            ToolCall("1", "f", text).parsed()


def test_call_that_begins_twice_is_data_loss() -> None:
    assembler = AnswerAssembler()
    first = pb.GenerateResponse(tool_calls=[pb.ToolCallDelta(index=0, id="a", name="f", arguments="{")])
    assembler.add(first)
    assembler.add(pb.GenerateResponse(tool_calls=[pb.ToolCallDelta(index=0, arguments="}")]))
    assert assembler.outputs[0].tool_calls == (ToolCall("a", "f", "{}"),)
    with pytest.raises(DataLoss):
        assembler.add(first)


def calls_weather(request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
    """Answer a user with two calls, and results with text."""
    yield started()
    if request.chat.messages[-1].role == "tool":
        yield tokens(0, 1, text="Sunny.")
        yield finished(1)
        return
    cities = [json.dumps({"city": city}) for city in ("Zürich", "Bern")]
    calls = [pb.ToolCallDelta(index=n, id=f"call{n}", name="weather", arguments=city) for n, city in enumerate(cities)]
    yield tokens(0, 1, tool_calls=calls)
    yield finished(1, finish_reason=pb.FINISH_REASON_TOOL_CALLS)


LINES = [
    {"id": "call0", "name": "weather", "arguments": {"city": "Zürich"}},
    {"id": "call1", "name": "weather", "arguments": {"city": "Bern"}},
]


def test_command_sends_tools_and_shows_calls(cli: Any, server: Any, tmp_path: Path) -> None:
    server.script = calls_weather
    file = tmp_path / "tools.json"
    for tools, choice, kind in (([WEATHER], "weather", "function"), (WEATHER, "required", "mode")):
        file.write_text(json.dumps(tools), "utf-8")
        result = cli("generate", "Weather?", "--tools", str(file), "--tool-choice", choice, "--no-parallel-tool-calls")
        assert [json.loads(line) for line in result.stdout.splitlines()] == LINES
        chat = server.requests[-1].chat
        assert [tool.name for tool in chat.tools] == ["weather"]
        assert chat.tool_choice.WhichOneof("choice") == kind
        assert [message.content for message in chat.messages] == ["Weather?"]


def test_chat_sends_results_of_calls(cli: Any, server: Any, tmp_path: Path) -> None:
    server.script = calls_weather
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([WEATHER]), "utf-8")
    result = cli("chat", "--tools", str(file), input="Weather?\nsunny\nrainy\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "Sunny."
    last = server.requests[-1].chat.messages
    assert [message.role for message in last] == ["user", "assistant", "tool", "tool"]
    assert [(message.tool_call_id, message.content) for message in last[2:]] == [("call0", "sunny"), ("call1", "rainy")]
    assert len(server.requests) == 2


@pytest.mark.parametrize("content", [None, "no JSON", "[3]"])
def test_bad_file_of_tools_is_wrong_usage(cli: Any, server: Any, tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "tools.json"
    if content is not None:
        file.write_text(content, "utf-8")
    result = cli("generate", "x", "--tools", str(file))
    assert result.exit_code == 2
    assert "tools.json" in result.output
    assert cli("generate", "x", "--tool-choice", "required").exit_code == 2
    assert server.requests == []
