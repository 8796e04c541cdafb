"""Drafts from the sequence's own tokens: what followed the longest earlier occurrence of its last tokens.

Prompt lookup (Saxena 2023; vLLM's n-gram proposer) needs no model. It drafts well where an answer repeats its prompt:
edits, summaries, code. The index is the hash chain of DEFLATE: the last position of every `min_ngram` tokens, and from
each position the one before it with the same tokens. Adding a token costs the same at any length.
"""

from __future__ import annotations

from collections.abc import Sequence

_MAX_CANDIDATES = 16
"""Earlier occurrences that are compared. The latest come first."""


class PromptLookup:
    """The tokens of one sequence, indexed by their n-grams."""

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._max, self._min = max_ngram, min_ngram
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram of `min_ngram` tokens -> position behind it
        self._earlier: list[int] = []  # position -> an earlier one behind the same n-gram; -1: none

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the sequence. The n-gram at its end is not indexed before a token follows it."""
        known, latest, size = self._tokens, self._latest, self._min
        for token in tokens:
            position = len(known)
            ngram = tuple(known[position - size :]) if position >= size else ()
            known.append(token)
            if ngram:
                self._earlier.append(latest.get(ngram, -1))
                latest[ngram] = position
            else:
                self._earlier.append(-1)

    def propose(self, count: int) -> list[int]:
        """Return up to `count` tokens that followed the longest, and then latest, occurrence of the last tokens."""
        source = self._best_match()
        if source < 0 or count <= 0:
            return []
        copied = self._tokens[source : source + count]
        # As in DEFLATE the copy may run on into itself: an answer of a period of three tokens drafts any number.
        while len(copied) < count:
            copied += copied[: count - len(copied)]
        return copied

    def _best_match(self) -> int:
        """Return the position behind the best earlier occurrence; -1: none has `min_ngram` tokens."""
        tokens, size = self._tokens, self._min
        candidate = self._latest.get(tuple(tokens[-size:]), -1) if len(tokens) >= size else -1
        best, best_length = -1, size - 1
        for _ in range(_MAX_CANDIDATES):
            if candidate < 0 or best_length >= self._max:
                break
            length = size
            while length < self._max and candidate > length and tokens[candidate - length - 1] == tokens[-length - 1]:
                length += 1
            if length > best_length:
                best, best_length = candidate, length
            candidate = self._earlier[candidate]
        return best
