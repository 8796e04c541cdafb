"""Compile structured output in a separate process, which exits when a grammar takes too long (`limited_child`).

llguidance limits the size of grammars, but not the time: a `multipleOf` with a large prime takes minutes. The answer is
the grammar in the form that workers compile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from lineclear.model_files.token_table import parser_limits, special_texts, token_table
from lineclear.scheduler.text import call_grammar, schema_words
from lineclear.scheduler.text.limited_child import Refused, serve

_MAX_REASON = 300
_FIRST_TOKENS = 4
_MAX_DEPTH = 64  # objects and arrays; the compiler is recursive, and schemas that people write nest some ten deep
_ESCAPE = re.compile(r"\\+u([0-9a-fA-F]{4})")
_OPTIONS = re.compile(r"^\s*%llguidance\b", re.MULTILINE)
FORCED_CALLS = "forced_calls"
"""The kind of a form whose content is a packed `ForcedCalls`. Other kinds are fields of StructuredOutput."""


def grammar_of(kind: str, content: str, *, any_whitespace: bool = False) -> str:
    """Return the grammar of a form in llguidance's format. Raises ValueError or RecursionError."""
    if kind == "regex":
        return LLMatcher.grammar_from_regex(content)
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(content)
    if kind == FORCED_CALLS:
        return LLMatcher.grammar_from_lark(call_grammar.lark(_exact_calls(call_grammar.unpacked(content))))
    if kind == "choice":
        texts = json.loads(content)
        return LLMatcher.grammar_from_lark(
            "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        )
    schema = {"type": "object"} if kind == "json_object" else schema_words.parsed(content)
    if not isinstance(schema, dict | bool):
        raise ValueError("is no JSON object")
    if _depth(schema) > _MAX_DEPTH:
        raise ValueError(f"is nested deeper than {_MAX_DEPTH} levels")
    if schema is False:
        raise ValueError("allows no value")
    schema_words.check(schema)
    schema_words.make_exact(schema)
    return LLMatcher.grammar_from_json_schema(
        json.dumps({} if schema is True else schema), overrides={"whitespace_flexible": any_whitespace}
    )


def _exact_calls(calls: call_grammar.ForcedCalls) -> call_grammar.ForcedCalls:
    """Return the calls with exact schemas. Their depth was checked with the request. Raises ValueError."""
    exact = list(calls.parameters)
    for index, parameters in enumerate(calls.parameters):
        if parameters:
            try:
                schema = schema_words.parsed(parameters)
                schema_words.check(schema)
            except ValueError as error:
                raise ValueError(f"has parameters of tool {index} that cannot be used: the schema {error}") from None
            schema_words.make_exact(schema)
            exact[index] = json.dumps(schema)
    return replace(calls, parameters=tuple(exact))


def _depth(value: Any) -> int:
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


def spelled(grammar: str, special: Iterable[str]) -> str:
    """Return a grammar that spells texts of special tokens that occur in it, such as a constant "</s>".

    Where llguidance can force text, it allows only the first token of its tokenization. That may be a special token,
    which the grammar then does not allow.
    """
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), grammar).replace("\\", "")
    if not any(text.replace("\\", "") in plain for text in special):
        return grammar
    if grammar.startswith("{"):  # JSON of one grammar
        (entry,) = json.loads(grammar)["grammars"]
        grammar = entry["lark_grammar"] or "start: %json " + json.dumps(entry["json_schema"])
    return grammar if _OPTIONS.search(grammar) else '%llguidance {"no_forcing": true}\n' + grammar


def _compile(tokens: LLTokenizer, special: Iterable[str], kind: str, content: str, options: Mapping[str, Any]) -> str:
    """Return the grammar of a form. Raises ValueError, RecursionError or MemoryError."""
    grammar = spelled(grammar_of(kind, content, **options), special)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=parser_limits())
    failure = matcher.get_error() if matcher.is_error() else _first_error(tokens, matcher)
    if failure:
        of_tool = _failure_of_a_tool(tokens, call_grammar.unpacked(content)) if kind == FORCED_CALLS else ""
        raise ValueError(of_tool or f"cannot be used: {_reason(failure)}")
    return grammar


def _first_error(tokens: LLTokenizer, matcher: LLMatcher) -> str:
    """Return why no answer gets beyond its first token: the error behind each of a few of them. Empty if one does.

    The library limits the work of a token when it comes, so a grammar that exceeds it everywhere would compile.
    """
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        return str(matcher.get_error())
    ends = set(tokens.eos_tokens)
    lowest = (8 * index + (byte & -byte).bit_length() - 1 for index, byte in enumerate(mask) if byte)
    allowed = [token for token in lowest if token not in ends]
    error = ""
    for token in allowed[:: -(-len(allowed) // _FIRST_TOKENS)] if allowed else ():
        copy = matcher.deep_copy()
        copy.consume_token(token)
        if not copy.is_error() and not copy.is_stopped():
            copy.compute_bitmask()
        if not copy.is_error():
            return ""
        error = str(copy.get_error())
    return error


def _reason(text: str) -> str:
    """Return llguidance's reason, without names of its options, which no request can set."""
    if "NoExtension" in text:
        return "it allows no text at all, or never ends (a rule or $ref that only repeats itself, or an empty class)"
    if text.startswith("oneOf constraints"):
        return "two of the schemas of a oneOf may match the same value; use anyOf, or make them exclude each other"
    return text


def _failure_of_a_tool(tokens: LLTokenizer, calls: call_grammar.ForcedCalls) -> str:
    """Name the tool whose parameters cannot be used; empty if each works alone."""
    for index, parameters in enumerate(_exact_calls(calls).parameters):
        schema = json.dumps(call_grammar.arguments_schema(parameters))
        one = LLMatcher(tokens, LLMatcher.grammar_from_json_schema(schema), log_level=0, limits=parser_limits())
        if one.is_error():
            return f"has parameters of tool {index} that cannot be used: {_reason(one.get_error())}"
    return ""


def _prepare(model: str) -> Callable[[dict[str, Any], list[str]], str]:
    tokens = token_table(Path(model))
    special = special_texts(tokens)

    def compiled(form: dict[str, Any], texts: list[str]) -> str:
        try:
            return _compile(tokens, special, form.pop("kind"), texts[0], form)
        except ValueError as error:
            reason = f"is no JSON: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
        except (RecursionError, MemoryError):
            reason = f"is nested deeper than {_MAX_DEPTH} levels"
        raise Refused(" ".join(reason.split())[:_MAX_REASON])

    return compiled


if __name__ == "__main__":
    serve(_prepare)
