"""Reasoning and content of an answer whose markers are special tokens, or text."""

from __future__ import annotations

import pytest

from lineclear.scheduler.text.reasoning_parser import Phase, ReasoningParser

SPECIAL = frozenset({"<think>", "</think>", "<tool_call>"})


def parse(phase: Phase, *pieces: str) -> tuple[str, str]:
    """Return reasoning and content; markers that are content are part of it."""
    parser = ReasoningParser(phase, SPECIAL)
    reasoning, content = "", ""
    for piece in pieces:
        if piece in SPECIAL:
            more, plain, is_content = parser.push_special(piece)
            plain += piece if is_content else ""
        else:
            more, plain = parser.push(piece)
        reasoning, content = reasoning + more, content + plain
    more, plain = parser.finish()
    return reasoning + more, content + plain


@pytest.mark.parametrize(
    ("phase", "pieces", "wanted"),
    [
        (Phase.POSSIBLE, ["<think>", "why", "</think>", "yes"], ("why", "yes")),
        (Phase.POSSIBLE, ["\n", "<think>", "why"], ("why", "")),
        (Phase.POSSIBLE, ["<tool_call>", "{}"], ("", "<tool_call>{}")),
        (Phase.POSSIBLE, ["\n", "<tool_call>", "{}"], ("", "\n<tool_call>{}")),
        (Phase.POSSIBLE, ["yes", "<think>", "why"], ("", "yes<think>why")),
        (Phase.EXPECTED, ["<tool_call>", "{}", "</think>", "yes"], ("<tool_call>{}", "yes")),
        (Phase.REASONING, ["why", "<tool_call>", "{}", "</think>", "<tool_call>"], ("why<tool_call>{}", "<tool_call>")),
        (Phase.CONTENT, ["yes", "</think>", "<think>"], ("", "yes</think><think>")),
    ],
)
def test_special_tokens_begin_and_end_reasoning(phase: Phase, pieces: list[str], wanted: tuple[str, str]) -> None:
    assert parse(phase, *pieces) == wanted
