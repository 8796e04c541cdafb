"""Token sequences of the texts in sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Encoder(Protocol):
    """The method of Tokenizer that adds no special tokens."""

    def encode_sealed(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ...


def bad_word_ids(encoder: Encoder, word: str) -> list[tuple[int, ...]]:
    """Return the token sequences of a bad word: as it is, and behind a space unless the space is a token of its own.

    vLLM keeps the second one only if it has as many tokens; small vocabularies would then still write the word.
    """
    word = word.lstrip() or word
    sequences = [tuple(encoder.encode_sealed(word)), tuple(encoder.encode_sealed(" " + word))]
    bare, spaced = sequences
    if bare and spaced[-len(bare) :] == bare:
        return [bare]
    return [sequence for sequence in sequences if sequence]


def bad_words_ids(encoder: Encoder, words: Iterable[str]) -> list[list[tuple[int, ...]]]:
    """Return the token sequences of each word."""
    return [bad_word_ids(encoder, word) for word in words]
