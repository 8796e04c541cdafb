"""Drafts from the sequence's own tokens: what followed the longest earlier occurrence of its last tokens.

Prompt lookup (Saxena 2023; vLLM's n-gram proposer) needs no model. It drafts well where an answer repeats its prompt:
edits, summaries, code. The index is the hash chain of DEFLATE: the last position of every `min_ngram` tokens, and from
each position the one before it with the same tokens. Adding a token costs the same at any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lineclear.wire.messages import Row

from .verification import Drafter, Drafts, ReadTokens

_MAX_CANDIDATES = 16
"""Earlier occurrences that are compared. The latest come first."""
_MAX_INDEXED_TOKENS = 4096
"""Tokens that a step adds to the index of a slot, which takes about 2 ms. A longer prompt is indexed in several."""


class PromptLookupDrafter(Drafter):
    """Drafts by prompt lookup. A slot is indexed from its first row with drafts on."""

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._sizes = max_ngram, min_ngram
        self._slots: dict[int, PromptLookup] = {}

    def reset(self) -> None:
        self._slots.clear()

    def forget(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def propose(self, rows: Iterable[Row], read_tokens: ReadTokens) -> Drafts:
        found: dict[int, list[int]] = {}
        for row in rows:
            index, known = self._slots.setdefault(row.slot, PromptLookup(*self._sizes)), row.start + 1
            index.extend(read_tokens(row.slot, len(index), min(known, len(index) + _MAX_INDEXED_TOKENS)))
            if len(index) == known and (drafts := index.propose(row.num_drafts)):
                found[row.slot] = drafts
        return found


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
            self._earlier.append(latest.get(ngram, -1) if ngram else -1)
            if ngram:
                latest[ngram] = position

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
