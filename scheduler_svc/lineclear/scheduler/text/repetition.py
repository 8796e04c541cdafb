"""Find an output whose last tokens repeat one pattern (vLLM's repetition_detection)."""

from __future__ import annotations

from typing import NamedTuple


class RepetitionLimits(NamedTuple):
    """An output ends when a pattern of `min_pattern_size` to `max_pattern_size` tokens appears `min_count` times."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


class RepetitionDetector:
    """Takes the tokens of an output one by one. A token costs one comparison for each size."""

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
