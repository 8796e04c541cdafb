"""Grammars of the toy worker. A grammar is a text of four numbers, and its matcher a hash of the tokens it took.

So a token that the matcher misses or takes twice changes all masks behind it. Other texts constrain nothing. The toy
worker uses the product's ConstraintTable with these matchers; `permitted` computes the same from the whole output.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from lineclear.wire.messages import Sampling, SlotInit
from lineclear.worker.structured_output.grammar_constraints import Bits, Matcher

END_IDS = (0,)
_PREFIX = "toy "
_FIRST_BYTE = 30  # of token 0: markers are printable
_WORD_BITS = 32


def grammar(key: int, longest: int, stuck_at: int = -1, *, is_broken: bool = False) -> str:
    """Return a grammar whose outputs have at most `longest` tokens.

    It allows no token behind `stuck_at` tokens, and cannot be compiled if `is_broken`.
    """
    return f"{_PREFIX}{key} {longest} {stuck_at} {int(is_broken)}"


def marker(tokens: Sequence[int]) -> str:
    """Return the text of `tokens`, to start a grammar."""
    return "".join(chr(_FIRST_BYTE + token) for token in tokens)


class ToyMatcher:
    """Follows an output. Raises ValueError for a grammar that cannot be compiled."""

    def __init__(self, text: str) -> None:
        self._state, self._longest, self._stuck_at, is_broken = map(int, text.removeprefix(_PREFIX).split())
        if is_broken:
            raise ValueError("the grammar cannot be compiled")
        self._count = 0
        self._is_over = False

    def consume_token(self, token: int, /) -> bool:
        self._is_over |= not self._is_allowed(token)
        self._state, self._count = hash((self._state, token)), self._count + 1
        return not self._is_over

    def is_accepting(self) -> bool:
        """Return whether the output may end here: always at its greatest length, by chance before."""
        return not self.is_error() and (self._count == self._longest or self._state % 5 == 0)

    def is_error(self) -> bool:
        """Return whether the output is not allowed, or nothing may follow it."""
        return self._is_over or self._count == self._stuck_at

    def allowed(self, vocab_size: int) -> list[int]:
        """Return the tokens that may follow, ends left out."""
        return [token for token in range(vocab_size) if token not in END_IDS and self._is_allowed(token)]

    def _is_allowed(self, token: int) -> bool:
        return not self.is_error() and self._count < self._longest and hash((self._state, token)) % 3 != 0


class ToyGrammars:
    """The `Grammars` of a toy worker."""

    end_ids: Sequence[int] = END_IDS

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def matcher(self, grammar: str) -> Future[Matcher]:
        found: Future[Matcher] = Future()
        try:
            found.set_result(ToyMatcher(grammar))
        except ValueError as error:
            found.set_exception(error)
        return found

    def fill(self, matcher: Matcher, bits: Bits) -> None:
        assert isinstance(matcher, ToyMatcher)
        for token in matcher.allowed(self._vocab_size):
            bits[token // _WORD_BITS] |= np.uint32(1 << token % _WORD_BITS)

    def token_bytes(self, token: int) -> bytes:
        return bytes([_FIRST_BYTE + token])


def applied(init: SlotInit) -> SlotInit:
    """Return `init` without a grammar that is not one of the toy worker."""
    if init.sampling.grammar.startswith(_PREFIX) or not init.sampling.grammar:
        return init
    return replace(init, sampling=replace(init.sampling, grammar="", grammar_start=""))


def tokens_of(bits: Bits, row: int, vocab_size: int) -> set[int]:
    """Return the tokens whose bit is set in a row."""
    return {token for token in range(vocab_size) if bits[row, token // _WORD_BITS] >> (token % _WORD_BITS) & 1}


def permitted(sampling: Sampling, output: Sequence[int], vocab_size: int) -> set[int] | None:
    """Return the tokens that the constraint of a request allows behind `output`; None: it has none."""
    if not sampling.grammar.startswith(_PREFIX):
        return None
    ends = {*END_IDS, *sampling.stop_ids}
    start = _first_constrained(sampling, output)
    if start is None:
        return {*range(vocab_size)} - ends
    try:
        matcher = ToyMatcher(sampling.grammar)
    except ValueError:
        return set()
    for token in output[start:]:
        matcher.consume_token(token)
    may_end = matcher.is_accepting() and len(output) >= sampling.min_tokens
    return {*matcher.allowed(vocab_size)} - ends | ({*sampling.stop_ids} if may_end else set())


def _first_constrained(sampling: Sampling, output: Sequence[int]) -> int | None:
    """Return the index of the first output token that the grammar counts; None: its marker has not come."""
    if not sampling.grammar_start:
        return 0
    text = marker(output)
    place = text.find(sampling.grammar_start)
    return None if place < 0 else place + len(sampling.grammar_start)
