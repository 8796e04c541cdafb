"""Keys of the prefix cache, and the form in which blocks keep their tokens."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

TOKEN_BYTES = 4

BlockHash = Callable[[bytes, bytes | None, bytes], bytes]
"""(cache salt, key before or None, `token_bytes`) -> prefix-cache key. Without tokens: the start of a salt's chain."""


class BlockHasher:
    """The BlockHash of a serving core: 256-bit keys, chained from block to block and keyed with `secret`.

    Requests with different cache salts share no block.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret[:64]
        self._last_salt: bytes | None = None
        self._last_root = b""

    def __call__(self, cache_salt: bytes, parent: bytes | None, tokens: bytes) -> bytes:
        if parent is None:
            if cache_salt != self._last_salt:  # mostly it is that of the last call
                self._last_root = blake2b(cache_salt, key=self._secret, digest_size=32).digest()
                self._last_salt = cache_salt
            parent = self._last_root
        if not tokens:
            return parent
        return blake2b(tokens, key=parent, digest_size=32).digest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return tokens as big-endian integers of TOKEN_BYTES, so that the order of bytes is the order of tokens.

    A block keeps its tokens in this form: 16 of them are one object of 97 bytes, and 17 objects of 616 as a tuple.
    """
    return struct.pack(f">{len(tokens)}i", *tokens)


class Prefix(NamedTuple):
    """A block in the prefix cache: its key, that of the block before, and its `token_bytes`."""

    key: bytes
    parent: bytes
    tokens: bytes
