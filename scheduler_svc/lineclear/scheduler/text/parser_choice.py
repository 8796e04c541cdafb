"""Choose the parsers of answers by the chat template: a model writes calls in the format that its template shows."""

from __future__ import annotations

from lineclear.scheduler.text.call_formats import FORMATS
from lineclear.scheduler.text.parsed_answer import AnswerParsers

_LLAMA3_MARKS = ("<|python_tag|>", "<|start_header_id|>")


def choose_parsers(tool_calls: str, reasoning: str, template: str | None) -> AnswerParsers:
    """Return the parsers for the values of the settings `tool_call_parser` and `reasoning_parser`.

    `template` is the source of the chat template; without one "auto" is none.
    """
    source = template or ""
    call_parser = _tool_call_parser(source) if tool_calls == "auto" else _named(tool_calls)
    return AnswerParsers(
        call_parser,
        _reasoning_parser(source) if reasoning == "auto" else _named(reasoning),
        tuple(tag for tag in FORMATS[call_parser].inner if tag in source) if call_parser else (),
    )


def _named(parser: str) -> str:
    return "" if parser == "none" else parser


def _tool_call_parser(source: str) -> str:
    if "[TOOL_CALLS]" in source:
        return "mistral"
    # Qwen3-Coder writes <tool_call><function=name>..., which is no JSON.
    if "<tool_call>" in source and "<function=" not in source:
        return "hermes"
    if any(mark in source for mark in _LLAMA3_MARKS) and '"parameters"' in source:
        return "llama3_json"
    return ""


def _reasoning_parser(source: str) -> str:
    if "</think>" not in source and "<think>" not in source:
        return ""
    return "deepseek_r1" if "<｜Assistant｜>" in source else "qwen3"
