"""Compile structured output in a separate process, which exits when a grammar takes too long (`limited_child`).

llguidance limits the size of grammars, but not the time: a `multipleOf` with a large prime takes minutes. The answer is
the grammar in the form that workers compile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from lineclear.model_files.token_table import parser_limits, token_table
from lineclear.scheduler.text.limited_child import ANSWERED, REFUSED, serve

_MAX_REASON = 300


def pack_definition(model: Path, *, cpu_seconds: float, max_depth: int) -> bytes:
    """Return the content of the first frame."""
    return json.dumps({"model": str(model), "cpu_seconds": cpu_seconds, "max_depth": max_depth}).encode()


def pack_form(kind: str, content: str, *, any_whitespace: bool) -> bytes:
    """Return the content of a frame. `kind` is a field of StructuredOutput."""
    return json.dumps({"kind": kind, "content": content, "any_whitespace": any_whitespace}).encode()


def grammar_of(kind: str, content: str, *, any_whitespace: bool, max_depth: int) -> str:
    """Return the grammar in llguidance's format. Raises ValueError or RecursionError."""
    if kind == "regex":
        return LLMatcher.grammar_from_regex(content)
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(content)
    if kind == "choice":
        texts = json.loads(content)
        return LLMatcher.grammar_from_lark(
            "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        )
    schema = {"type": "object"} if kind == "json_object" else json.loads(content)
    if not isinstance(schema, dict | bool):
        raise ValueError("is no JSON object")
    if _depth(schema) > max_depth:
        raise ValueError(f"is nested deeper than {max_depth} levels (--max-grammar-depth)")
    if schema is False:
        raise ValueError("allows no value")
    return LLMatcher.grammar_from_json_schema(
        json.dumps({} if schema is True else schema), overrides={"whitespace_flexible": any_whitespace}
    )


def _depth(value: Any) -> int:
    """Return the number of nested objects and arrays."""
    depth, level = 0, [value]
    while level:
        level = [
            item
            for entry in level
            if isinstance(entry, dict | list)
            for item in (entry.values() if isinstance(entry, dict) else entry)
        ]
        depth += 1
    return depth


def _answer(tokens: LLTokenizer, frame: bytes, max_depth: int) -> bytes:
    try:
        grammar = grammar_of(**json.loads(frame), max_depth=max_depth)
    except ValueError as error:
        return _refused(str(error) if not isinstance(error, json.JSONDecodeError) else f"is no JSON: {error.msg}")
    except (RecursionError, MemoryError):
        return _refused(f"is nested deeper than {max_depth} levels (--max-grammar-depth)")
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return _refused(f"cannot be used: {matcher.get_error()}")
    return ANSWERED + grammar.encode()


def _refused(reason: str) -> bytes:
    return REFUSED + " ".join(reason.split()).encode(errors="replace")[:_MAX_REASON]


def _prepare(definition: dict[str, Any]) -> Callable[[bytes], bytes]:
    tokens = token_table(Path(definition["model"]))
    return lambda frame: _answer(tokens, frame, definition["max_depth"])


if __name__ == "__main__":
    serve(_prepare)
