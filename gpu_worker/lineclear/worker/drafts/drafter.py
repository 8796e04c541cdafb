"""Makes the drafts of a step's rows from the tokens of their slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from lineclear.wire.messages import Row

from .prompt_lookup import PromptLookup
from .verification import Drafts

_MAX_INDEXED_TOKENS = 4096
"""Tokens that a step adds to the index of a slot, which takes about 2 ms. A longer prompt is indexed in several."""

ReadTokens = Callable[[int, int, int], list[int]]
"""(slot, start, end) -> the tokens of the slot at positions [start, end)."""


class Drafter(Protocol):
    """Makes drafts. The runner calls it before the step that verifies them."""

    def reset(self) -> None:
        """Forget every slot."""
        ...

    def forget(self, slot: int) -> None:
        """Forget the sequence of a slot that gets another one."""
        ...

    def propose(self, rows: Iterable[Row], read_tokens: ReadTokens) -> Drafts:
        """Return drafts for rows that may verify some. Rows without drafts are left out."""
        ...


class PromptLookupDrafter:
    """Drafts by prompt lookup. A slot is indexed from its first row with drafts on."""

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._sizes = max_ngram, min_ngram
        self._slots: dict[int, PromptLookup] = {}

    def reset(self) -> None:
        """Forget every slot."""
        self._slots.clear()

    def forget(self, slot: int) -> None:
        """Forget the sequence of a slot that gets another one."""
        self._slots.pop(slot, None)

    def propose(self, rows: Iterable[Row], read_tokens: ReadTokens) -> Drafts:
        """Return drafts for rows that may verify some. Rows without drafts are left out."""
        found: dict[int, list[int]] = {}
        for row in rows:
            index, known = self._slots.setdefault(row.slot, PromptLookup(*self._sizes)), row.start + 1
            index.extend(read_tokens(row.slot, len(index), min(known, len(index) + _MAX_INDEXED_TOKENS)))
            if len(index) == known and (drafts := index.propose(row.num_drafts)):
                found[row.slot] = drafts
        return found
