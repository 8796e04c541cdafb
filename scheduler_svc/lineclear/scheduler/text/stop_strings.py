"""Find the first stop string of an answer while its text arrives in pieces, or a pattern that its tokens repeat.

Plain suffix matching: a request has at most 8 stop strings of 64 bytes, and a piece of text about four characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopStrings:
    """The stop strings of one request, with the sets that StopMatcher looks suffixes up in."""

    __slots__ = ("final_characters", "inner_characters", "max_held", "prefixes", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.prefixes = frozenset(string[:end] for string in strings for end in range(1, len(string)))
        """Proper prefixes: text that ends in one may become a stop string."""
        self.max_held = max(map(len, strings)) - 1
        self.inner_characters = frozenset("".join(string[:-1] for string in strings))
        self.final_characters = frozenset(string[-1] for string in strings)

    def matcher(self, *, include_stop_string: bool) -> StopMatcher:
        return StopMatcher(self, include_stop_string=include_stop_string)


class StopMatcher:
    """Release text up to the stop string that is complete first; of two that end together, the longer one.

    The result does not depend on how the text is cut into pieces.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: StopStrings, *, include_stop_string: bool) -> None:
        self._stops = stops
        self._include = include_stop_string
        self._held = ""  # the longest suffix so far that is a proper prefix of a stop string
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Return the text that can be released. A string that is completed while not `armed` does not match."""
        stops, num_held = self._stops, len(self._held)
        may_complete = armed and not stops.final_characters.isdisjoint(text)
        if num_held:
            text = self._held + text
        if may_complete and (found := self._first_completed(text, num_held)) is not None:
            end, self.matched = found
            self._held = ""
            return text[: end if self._include else end - len(self.matched)]
        if text and text[-1] in stops.inner_characters:
            for start in range(max(0, len(text) - stops.max_held), len(text)):
                if text[start:] in stops.prefixes:
                    self._held = text[start:]
                    return text[:start]
        self._held = ""
        return text

    def flush(self) -> str:
        """Return the text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, text: str, num_held: int) -> tuple[int, str] | None:
        """Return the end and the string of the first match that ends after the first `num_held` characters."""
        found = []
        for string in self._stops.strings:
            start = text.find(string, max(0, num_held - len(string) + 1))
            if start >= 0:
                found.append((start + len(string), -len(string), string))
        if not found:
            return None
        end, _, string = min(found)
        return end, string


class RepetitionLimits(NamedTuple):
    """An output ends when a pattern of `min_pattern_size` to `max_pattern_size` tokens appears `min_count` times."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


class RepetitionDetector:
    """Finds an output whose last tokens repeat one pattern (vLLM's repetition_detection).

    Takes its tokens one by one. A token costs one comparison for each size.
    """

    __slots__ = ("_goals", "_runs", "_sizes", "_tokens")

    def __init__(self, limits: RepetitionLimits) -> None:
        self._sizes = range(limits.min_pattern_size, limits.max_pattern_size + 1)
        self._goals = [size * (limits.min_count - 1) for size in self._sizes]
        self._runs = [0] * len(self._sizes)  # by size: how many last tokens equal the one `size` before them
        self._tokens: list[int] = []

    def push(self, token_id: int) -> bool:
        """Return whether the output repeats a pattern often enough, up to this token."""
        tokens, count = self._tokens, len(self._tokens)
        self._runs = [
            run + 1 if size <= count and tokens[-size] == token_id else 0
            for size, run in zip(self._sizes, self._runs, strict=True)
        ]
        tokens.append(token_id)
        return any(map(int.__ge__, self._runs, self._goals))
