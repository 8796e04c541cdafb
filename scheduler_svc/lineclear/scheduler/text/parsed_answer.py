"""The text of an answer with tool calls or reasoning, parsed token by token.

`ParsedText` is the content that a token releases, as `AnswerText` returns it, and carries what else the token releases.
So answers without a parser cost what they cost without this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from lineclear.scheduler.text.call_formats import FORMATS, NO_CALLS
from lineclear.scheduler.text.call_parser import CallParser, CallPart
from lineclear.scheduler.text.detokenizer import AnswerText, StopMatch, decode
from lineclear.scheduler.text.reasoning_parser import MARKERS, Phase, ReasoningParser, first_phase
from lineclear.scheduler.text.tokenizer import Tokenizer

_PROMPT_END_TOKENS = 16
_LLAMA3_MARKS = ("<|python_tag|>", "<|start_header_id|>")
_ID_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9  # letters and digits, as Mistral's templates require


class ParsedText(str):
    """The content that a token releases, and the reasoning and parts of calls beside it."""

    reasoning: str
    calls: tuple[CallPart, ...]

    def __new__(cls, content: str, reasoning: str, calls: tuple[CallPart, ...]) -> ParsedText:
        parsed = super().__new__(cls, content)
        parsed.reasoning, parsed.calls = reasoning, calls
        return parsed

    @property
    def num_extra(self) -> int:
        """Number of characters beside the content, with an allowance for each part."""
        return len(self.reasoning) + sum(64 + len(part.arguments) for part in self.calls)


def call_id(key: str, index: int) -> str:
    """Return the id of a call with this index in the answer `key`: equal for equal arguments."""
    digest = hashlib.blake2b(f"{key}:{index}".encode(), digest_size=8).digest()
    number, digits = int.from_bytes(digest, "little"), []
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_ID_DIGITS))
        digits.append(_ID_DIGITS[digit])
    return "".join(digits)


@dataclass(frozen=True, slots=True)
class AnswerParsers:
    """The parsers of a server, by vLLM's names; empty for none."""

    tool_calls: str = ""
    reasoning: str = ""
    call_tags: tuple[str, ...] = ()
    """The markers within calls that the chat template has."""

    def are_needed(self, tool_names: Set[str]) -> bool:
        """Whether answers of a conversation with these tools are parsed."""
        return bool(self.reasoning or (self.tool_calls and tool_names))


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


def phase_of(parsers: AnswerParsers, pieces: Tokenizer, prompt: Sequence[int]) -> Phase:
    if not parsers.reasoning:
        return Phase.CONTENT
    return first_phase(parsers.reasoning, decode(pieces, prompt[-_PROMPT_END_TOKENS:], keep_special=True))


class ParsedAnswerText(AnswerText):
    """Releases the text of one answer as content, reasoning and calls. `begin` must be called before the first token.

    Stop strings match the text of the model as without parsers, except across markers that are special tokens.
    """

    __slots__ = ("_calls", "_is_parallel", "_markers", "_parsers", "_pieces", "_reasoning", "_special", "_thoughts")

    def __init__(
        self,
        pieces: Tokenizer,
        parsers: AnswerParsers,
        tool_names: Set[str],
        *,
        is_parallel: bool = True,
        **options: Any,
    ) -> None:
        """Without `is_parallel` the answer ends after its first call. `options` are those of AnswerText."""
        super().__init__(pieces, **options)
        self._pieces = pieces
        self._parsers = parsers
        self._is_parallel = is_parallel
        form = FORMATS[parsers.tool_calls] if parsers.tool_calls and tool_names else NO_CALLS
        markers = form.markers | MARKERS if parsers.reasoning else form.markers
        self._markers = {i: text for i, text in pieces.special_ids(markers).items() if i not in self._silent_ids}
        self._special = frozenset(self._markers.values())
        self._calls = CallParser(form, tool_names, self._special)
        self._reasoning = ReasoningParser(Phase.CONTENT)
        self._thoughts: list[str] = []

    @property
    def has_tool_calls(self) -> bool:
        """Whether the answer has a complete call so far."""
        return self._calls.num_complete > 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._reasoning = ReasoningParser(phase_of(self._parsers, self._pieces, prompt), self._special)

    def push(self, token_id: int) -> ParsedText:
        marker = self._markers.get(token_id)
        if marker is None:
            self._parse(super().push(token_id))
        else:
            self._num_tokens += 1
            self._parse(self._flush())  # no character and no stop string spans a special token
            if self.match is None:
                self._parse_special(marker)
                self._parse(self._detect(token_id))
        if self.match is None and self.has_tool_calls and not self._is_parallel:
            self.match = StopMatch(None, self._num_tokens, is_call=True)
        if self.match is not None:
            self._end()
        return self._take()

    def finish(self) -> ParsedText:
        """Return the rest after the last token."""
        self._parse(self._flush())
        self._end()
        return self._take()

    def _parse(self, text: str) -> None:
        self._add(*self._reasoning.push(text))

    def _parse_special(self, marker: str) -> None:
        reasoning, content, is_content = self._reasoning.push_special(marker)
        self._add(reasoning, content)
        if is_content:
            self._calls.push_special(marker)

    def _end(self) -> None:
        self._add(*self._reasoning.finish())
        self._calls.finish()

    def _add(self, reasoning: str, content: str) -> None:
        self._thoughts.append(reasoning)
        self._calls.push(content)

    def _take(self) -> ParsedText:
        content, calls = self._calls.take()
        reasoning = "".join(self._thoughts)
        self._thoughts.clear()
        return ParsedText(content, reasoning, calls)
