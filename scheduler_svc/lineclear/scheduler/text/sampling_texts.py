"""Token sequences of the texts in sampling parameters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from lineclear.scheduler.text.tokenizer import Tokenizer

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's."""
NO_BREAKERS = ("none",)
_MAX_SEQUENCE = 20
_MAX_KNOWN = 256
_SEPARATOR = "\U0010ffff"


def bad_word_ids(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """Return the token sequences of a bad word: as it is, and behind a space unless the space is a token of its own.

    vLLM keeps the second one only if it has as many tokens; small vocabularies would then still write the word.
    """
    word = word.lstrip() or word
    sequences = [tuple(tokenizer.encode_sealed(word)), tuple(tokenizer.encode_sealed(" " + word))]
    bare, spaced = sequences
    if bare and spaced[-len(bare) :] == bare:
        return [bare]
    return [sequence for sequence in sequences if sequence]


class Breakers(NamedTuple):
    """Sequence breakers of DRY: tokens that contain one, and longer token sequences."""

    ids: tuple[int, ...]
    sequences: tuple[tuple[int, ...], ...]


class BreakerIndex:
    """Finds the tokens of sequence breakers. The first call reads the whole vocabulary; the last results are kept.

    As in llama.cpp, a token with the text of a breaker in it is one. A breaker across two tokens is found where the
    tokenizer writes it so.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._joined: tuple[str, list[int]] | None = None
        self._known: dict[tuple[str, ...], Breakers] = {}

    def find(self, texts: Sequence[str]) -> Breakers:
        """Return the tokens of all `texts`, of the default ones if it is empty."""
        key = tuple(texts) or DEFAULT_BREAKERS
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            found = self._known[key] = Breakers((), ()) if key == NO_BREAKERS else self._find(key)
        return found

    def _find(self, texts: tuple[str, ...]) -> Breakers:
        encoded = {tuple(self._tokenizer.encode_sealed(text)[:_MAX_SEQUENCE]) for text in texts}
        ids = {token_id for text in texts for token_id in self._containing(text)}
        return Breakers(tuple(sorted(ids)), tuple(sorted(x for x in encoded if len(x) > 1)))

    def _containing(self, text: str) -> list[int]:
        if self._joined is None:
            token_texts = self._tokenizer.token_texts()
            ends = list(accumulate(len(token_text) + 1 for token_text in token_texts))
            self._joined = _SEPARATOR.join(token_texts), ends
        joined, ends = self._joined
        found = []
        start = joined.find(text)
        while start >= 0:
            found.append(bisect_right(ends, start))
            start = joined.find(text, ends[found[-1]])
        return found
