"""A server whose tokenizer has the markers of tool calls, and what a client reads from its answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.serving import HELLO, Serving, serving, until
from support.small_tokenizers import definition
from support.tool_templates import tokenizer as with_markers

from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.v1 import inference_pb2 as pb

TOKENIZER = Tokenizer(definition(with_markers()))


@contextlib.asynccontextmanager
async def larger_serving(path: Path, **options: Any) -> AsyncIterator[Serving]:
    async with serving(path, joined=False, **options) as s:
        s.engine.join(replace(HELLO, max_model_len=4096))
        await until(lambda: s.server.health.is_serving("readiness"))
        yield s


def ids(text: str) -> list[int]:
    """Return the tokens of an answer, with special tokens where they are written."""
    return TOKENIZER.encode_sealed(TOKENIZER.seal(text))


def parts_of(responses: Iterable[pb.GenerateResponse]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Return text, reasoning and calls (id, name, arguments)."""
    text, reasoning, calls = "", "", list[list[str]]()
    for response in responses:
        text += response.text
        reasoning += response.reasoning
        for delta in response.tool_calls:
            if delta.id:
                assert delta.index == len(calls)
                assert delta.name
                calls.append([delta.id, delta.name, ""])
            calls[delta.index][2] += delta.arguments
    return text, reasoning, [(call[0], call[1], call[2]) for call in calls]
