"""docs/tool-calls.md and examples/tool_loop.py: each example of a format is one call, and the programs run."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest
from support.sources import REPOSITORY

import lineclear.client
from lineclear.client import Client, ToolCall
from lineclear.client.testing import Answer, FakeTransport
from lineclear.scheduler.settings_fields import ReasoningParser, ToolCallParser
from lineclear.scheduler.text.call_formats import FORMATS
from lineclear.scheduler.text.call_parser import CallParser, CallPart

PAGE = (REPOSITORY / "docs/tool-calls.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| [^|`]*(?:`[^`]*`)?[^|`]*\| `(.*)` \|$", PAGE, re.M)


@pytest.mark.parametrize(("parser", "text"), ROWS)
def test_each_example_is_one_call(parser: str, text: str) -> None:
    calls = CallParser(FORMATS[parser], {"add"})
    calls.push(text.replace("\\|", "|"))
    calls.finish()
    assert calls.take() == ("", (CallPart(0, "add", '{"a": 1}'),))
    assert calls.num_complete == 1


def test_page_names_every_parser() -> None:
    assert {parser for parser, _ in ROWS} == FORMATS.keys()
    for kind in (ToolCallParser, ReasoningParser):
        for value in kind.__args__:
            assert f"`{value}`" in PAGE


def test_page_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    call = ToolCall("a", "get_weather", '{"city": "Bern"}')
    fake = FakeTransport(Answer(tool_calls=[call]))
    monkeypatch.setattr(lineclear.client, "Client", lambda: Client(transport=fake))
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(program, "tool-calls.md", "exec"), found)
    assert [message.role for message in found["messages"]] == ["user", "assistant", "tool"]
    assert found["messages"][2].content == "sunny in Bern"


def test_example_runs_the_calls_of_the_model() -> None:
    answer = runpy.run_path(str(REPOSITORY / "examples/tool_loop.py"))["answer"]
    bad = Answer(tool_calls=[ToolCall("x", "add", '{"a": 2, "b": "'), ToolCall("y", "add", '{"a": 2}')])
    good = Answer(tool_calls=[ToolCall("z", "add", '{"a": 2, "b": 40}')])

    def reply(request: Any) -> Any:
        last = request.chat.messages[-1]
        if last.role == "user":
            return bad
        assert [tool.name for tool in request.chat.tools] == ["add"]
        made = [call.id for message in request.chat.messages for call in message.tool_calls]
        assert made == [message.tool_call_id for message in request.chat.messages if message.role == "tool"]
        return good if last.content.startswith("error: ") else f"It is {last.content}."

    fake = FakeTransport(reply)
    with Client(transport=fake) as client:
        assert answer(client, "What is 2 + 40?") == "It is 42."
    assert len(fake.requests) == 3
