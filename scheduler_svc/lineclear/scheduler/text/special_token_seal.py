"""Special tokens under private names, so that no text of a caller can write one.

`seal` replaces the special tokens that a model's author wrote by names that nobody else can guess. Imports nothing of
lineclear: the processes that render chat templates load it by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


class Seal:
    """Private names by special tokens."""

    def __init__(self, private: Mapping[str, str]) -> None:
        self.private = dict(private)
        # Finds the leftmost of the tokens and of those the longest, as the library does.
        words = sorted(self.private, key=len, reverse=True)
        self._pattern = re.compile("|".join(re.escape(word) for word in words))

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Every special token, as the model writes it."""
        return tuple(self.private)

    def seal(self, text: str) -> str:
        """Return `text` with the special tokens written in it made real."""
        return self._pattern.sub(lambda match: self.private[match[0]], text) if self.private else text
