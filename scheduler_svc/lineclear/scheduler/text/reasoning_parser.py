"""Separate the reasoning of an answer, <think>...</think>, from its content while the text arrives."""

from __future__ import annotations

from collections.abc import Set
from enum import Enum

from lineclear.scheduler.text.call_formats import SPACE_PATTERN
from lineclear.scheduler.text.call_parser import partial_marker

OPEN, CLOSE = "<think>", "</think>"
MARKERS = frozenset((OPEN, CLOSE))
_MAX_HELD = 4096


class Phase(Enum):
    """Part of the answer that the next text belongs to."""

    EXPECTED = "expected"
    """Reasoning begins, with or without its opening marker (deepseek_r1)."""
    POSSIBLE = "possible"
    """Reasoning begins if its opening marker comes first (qwen3)."""
    REASONING = "reasoning"
    CONTENT = "content"


def first_phase(parser: str, prompt_end: str) -> Phase:
    """Return the phase that an answer begins in. `prompt_end` is the end of the rendered prompt.

    A template may open the reasoning for the model, or close it at once where the request switches it off.
    """
    end = prompt_end.rstrip()
    if end.endswith(OPEN):
        return Phase.REASONING
    if end.endswith(CLOSE):
        return Phase.CONTENT
    return Phase.EXPECTED if parser == "deepseek_r1" else Phase.POSSIBLE


class ReasoningParser:
    """Splits the text of one answer into reasoning and content. Markers and the space before the first are neither."""

    def __init__(self, phase: Phase, special: Set[str] = frozenset()) -> None:
        """`special` are the markers that arrive through `push_special`. Written as text they are text."""
        self.phase = phase
        self._open = "" if OPEN in special else OPEN
        self._close = "" if CLOSE in special else CLOSE
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Take more text. Return the new reasoning and the new content."""
        if self.phase is Phase.CONTENT:
            return "", text
        text, self._held = self._held + text, ""
        if self.phase is not Phase.REASONING:
            start = SPACE_PATTERN.match(text).end()  # type: ignore[union-attr]  # the pattern matches ""
            if self._open and text.startswith(self._open, start):
                self.phase, text = Phase.REASONING, text[start + len(self._open) :]
            elif start <= _MAX_HELD and (OPEN if self._open else "").startswith(text[start:]):
                self._held = text
                return "", ""
            else:
                self._begin()
        if self.phase is Phase.CONTENT:
            return "", text
        return self._reason(text)

    def push_special(self, marker: str) -> tuple[str, str, bool]:
        """Take a marker that is a special token. Return new reasoning and content, and whether it is content itself."""
        held, self._held = self._held, ""
        if marker == OPEN and self.phase in (Phase.EXPECTED, Phase.POSSIBLE) and not held.strip():
            self.phase = Phase.REASONING
            return "", "", False
        if self.phase in (Phase.EXPECTED, Phase.POSSIBLE):
            self._begin()
        if self.phase is Phase.CONTENT:
            return "", held, True
        if marker == CLOSE:
            self.phase = Phase.CONTENT
            return held, "", False
        return held + marker, "", False

    def finish(self) -> tuple[str, str]:
        """Return the reasoning and the content that were held back."""
        held, self._held = self._held, ""
        return ("", held) if self.phase in (Phase.POSSIBLE, Phase.CONTENT) else (held, "")

    def _begin(self) -> None:
        self.phase = Phase.REASONING if self.phase is Phase.EXPECTED else Phase.CONTENT

    def _reason(self, text: str) -> tuple[str, str]:
        found = text.find(self._close) if self._close else -1
        if found >= 0:
            self.phase = Phase.CONTENT
            return text[:found], text[found + len(self._close) :]
        end = len(text) - partial_marker(text, 0, [self._close])
        self._held = text[end:]
        return text[:end], ""
