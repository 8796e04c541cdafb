"""The demo model, which knows no tools, must call them: through real processes, the client and the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from client.command import process
from support.service import DEMO_MODEL, Service, running
from support.tool_templates import HERMES

from lineclear.errors import InvalidRequest

BOOK = {
    "name": "book",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "nights": {"type": "integer", "minimum": 1, "maximum": 30},
            "class": {"enum": ["first", "second"]},
        },
        "required": ["city", "nights", "class"],
    },
}
NOW = {"name": "now"}
TOOLS = {tool["name"]: tool.get("parameters", {"maxProperties": 0}) for tool in (BOOK, NOW)}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run the demo model with a template that shows tools."""
    model = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(DEMO_MODEL, model)
    # Short, because the context has 1,024 tokens.
    (model / "chat_template.jinja").write_text(HERMES.replace("Answer a call as ", ""), "utf-8")
    with running("--reasoning-parser", "none", model=model) as found:
        yield found


def check(answer: Any) -> None:
    assert answer.finish_reason == "tool_calls"
    assert answer.text == ""
    for call in answer.tool_calls:
        jsonschema.validate(call.parsed(), TOOLS[call.name])


def params(**changes: Any) -> dict[str, Any]:
    return {"tools": [BOOK, NOW], "tool_choice": "required", "max_tokens": 200, **changes}


def test_each_answer_is_a_valid_call(service: Service) -> None:
    messages = [{"role": "user", "content": "Book a night in Bern."}]
    several = service.client.generate(messages, n=6, seed=0, **params(parallel_tool_calls=False))
    for output in several.outputs:
        check(output)
    assert {call.name for output in several.outputs for call in output.tool_calls} == TOOLS.keys()
    assert len({call.id for output in several.outputs for call in output.tool_calls}) == 6, "one each, with its own id"
    named = service.client.generate(messages, temperature=0, **params(tool_choice={"function": {"name": "book"}}))
    check(named)
    assert [call.name for call in named.tool_calls] == ["book"]
    result = [{"role": "tool", "content": "ok", "tool_call_id": named.tool_calls[0].id, "name": "book"}]
    check(service.client.generate([*messages, named.message, *result], seed=1, **params(parallel_tool_calls=False)))


def test_command_prints_the_call(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([BOOK, NOW]), "utf-8")
    result = process(service, "generate", "Book", "--tools", str(file), "--tool-choice", "book", "--temperature", "0")
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    call = json.loads(line)
    assert call["name"] == "book"
    jsonschema.validate(call["arguments"], BOOK["parameters"])


def test_schema_that_cannot_be_enforced_is_refused(service: Service) -> None:
    bad = {"name": "bad", "parameters": {"type": "object", "not": {}}}
    with pytest.raises(InvalidRequest, match="tool 1"):
        service.client.generate([{"role": "user", "content": "x"}], **params(tools=[BOOK, bad]))
