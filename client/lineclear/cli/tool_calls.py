"""Read the tools of --tools, and write the calls of an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from lineclear.client import ToolCall

from . import output

_MODES = ("auto", "none", "required")


def read_tools(file: Path) -> list[Any]:
    """Return the tools in a file: a JSON list, or one tool. Raises typer.BadParameter."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(output.os_error_text(error), param_hint="--tools") from None
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{file} is no JSON: {error}", param_hint="--tools") from None
    tools = found if isinstance(found, list) else [found]
    if not all(isinstance(tool, dict) for tool in tools):
        raise typer.BadParameter(f"{file} must have a JSON object for each tool", param_hint="--tools")
    return tools


def choice_of(text: str) -> Any:
    """Return the tool_choice of a mode or of the name of a function."""
    return text if text in _MODES else {"function": {"name": text}}


def show_calls(calls: Sequence[ToolCall]) -> None:
    """Write a line of JSON for each call: id, name and arguments. Arguments that were broken off are a text."""
    for call in calls:
        try:
            arguments: Any = call.parsed()
        except ValueError:
            arguments = call.arguments
        output.show_json({"id": call.id, "name": call.name, "arguments": arguments})
