"""Replace special tokens by random private names, which no caller can guess.

Imports no other module of lineclear, because the processes that render chat templates load it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


class Seal:
    """The private names of a tokenizer's special tokens."""

    def __init__(self, private: Mapping[str, str]) -> None:
        self.private = dict(private)
        """The private name of each special token as tokenizer.json spells it."""
        # Longest first: of the tokens at one position the library takes the longest.
        words = sorted(self.private, key=len, reverse=True)
        self._pattern = re.compile("|".join(re.escape(word) for word in words))

    def __call__(self, text: str) -> str:
        """Return `text` with its special tokens under their private names."""
        return self._pattern.sub(lambda match: self.private[match[0]], text) if self.private else text
