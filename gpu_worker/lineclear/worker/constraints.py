"""Structured output: which tokens the grammars of the slots allow next, as one bit a token.

A matcher follows the output of one slot. It starts from the output tokens in the slot's initialisation, and takes each
token that the slot samples. So a preemption, a resumed answer or another worker needs nothing else. No torch here: the
sampler applies the bits to the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lineclear.wire.messages import SlotInit

Bits = npt.NDArray[np.uint32]
"""[num_rows, words]: bit i % 32 of word i // 32 is set if token i is allowed."""
_ALL = np.uint32(0xFFFFFFFF)
_WORD_BITS = 32


class Matcher(Protocol):
    """Follows one output through a grammar."""

    def consume(self, token: int) -> None:
        """Take the next token of the output. One that the grammar does not allow makes the matcher fail for good."""
        ...

    @property
    def may_end(self) -> bool:
        """Whether the output so far is complete."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether the grammar does not allow the output, or is too complex to go on."""
        ...


class Grammars(Protocol):
    """Compiles grammars and computes masks."""

    def matcher(self, grammar: str) -> Future[Matcher]:
        """Return a new matcher at the start of the grammar; it may take a while. The future may raise."""
        ...

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bits: Bits) -> None:
        """Write the allowed next tokens of each matcher to its row of `bits`."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, of a special one those of its name."""
        ...

    @property
    def end_ids(self) -> Sequence[int]:
        """Tokens that `fill` may allow where the grammar may end. Requests may have others."""
        ...


class Masks(NamedTuple):
    """The allowed tokens of some sampling rows of a step."""

    rows: list[int]
    """Indices of sampling rows, ascending."""
    bits: Bits


class _Constraint:
    """The constraint of one slot."""

    def __init__(self, init: SlotInit, grammars: Grammars) -> None:
        sampling = init.sampling
        self._matcher = grammars.matcher(sampling.grammar)
        self._grammars = grammars
        self._marker = sampling.grammar_start.encode()
        self._is_started = not self._marker
        self._tail = b""  # end of the output before the marker
        self._first_end = init.prompt_len + sampling.min_tokens
        self._end_ids = sampling.stop_ids
        self._pending = list(init.tokens[init.prompt_len :])
        self.position = len(init.tokens)
        """Number of prompt and output tokens that were taken."""

    def take(self, token: int) -> None:
        """Append the token that the last step sampled."""
        self._pending.append(token)
        self.position += 1

    def advance(self) -> Matcher | None:
        """Return the matcher behind all tokens; None while the grammar does not hold yet. Raises if it has failed."""
        pending, self._pending = self._pending, []
        if not self._is_started:
            pending = self._skip_to_marker(pending)
            if not self._is_started:
                return None
        matcher = self._matcher.result()
        for token in pending:
            matcher.consume(token)
        if matcher.has_failed:
            raise ValueError("the grammar does not allow the output")
        return matcher

    def _skip_to_marker(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens behind the one that completes the marker."""
        for index, token in enumerate(tokens):
            self._tail += self._grammars.token_bytes(token)
            if self._marker in self._tail:
                self._is_started = True
                return list(tokens[index + 1 :])
            self._tail = self._tail[-len(self._marker) :]
        return []

    def set_ends(self, mask: Bits, matcher: Matcher | None) -> None:
        """Allow the tokens that end the answer exactly where the grammar may end."""
        may_end = matcher is not None and self.position >= self._first_end and matcher.may_end
        for token in {*self._grammars.end_ids, *self._end_ids}:
            mask[token // _WORD_BITS] &= ~np.uint32(1 << token % _WORD_BITS)
        for token in self._end_ids if may_end else ():
            mask[token // _WORD_BITS] |= np.uint32(1 << token % _WORD_BITS)


class ConstraintTable:
    """The constraints of all slots. The launch thread calls the methods; a helper thread computes masks."""

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._slots: dict[int, _Constraint] = {}
        self._helper: ThreadPoolExecutor | None = None

    def reset(self) -> None:
        """Free every slot."""
        self._slots.clear()

    def __contains__(self, slot: int) -> bool:
        """Return whether the sequence of a slot has a constraint."""
        return slot in self._slots

    def set_slot(self, init: SlotInit) -> None:
        """Start the constraint of the slot's new sequence, if it has one."""
        if init.sampling.grammar:
            self._slots[init.slot] = _Constraint(init, self._grammars)
        else:
            self._slots.pop(init.slot, None)

    def start(
        self,
        slots: Sequence[int],
        positions: Sequence[int],
        fetch_last_tokens: Callable[[list[int]], Callable[[], list[int]]],
    ) -> Future[Masks] | None:
        """Compute the masks of the sampling rows with these slots and positions, while the caller goes on.

        `fetch_last_tokens(rows)` is called at once for the rows that sampled their last token in an earlier step. The
        helper thread calls its result, which waits for these tokens. Returns None if no row has a constraint.
        """
        if not self._slots or self._slots.keys().isdisjoint(slots):
            return None
        found = [(row, slot) for row, slot in enumerate(slots) if slot in self._slots]
        rows, constraints = [row for row, _ in found], [self._slots[slot] for _, slot in found]
        behind = [i for i, row in enumerate(rows) if constraints[i].position < positions[row]]
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        last_tokens = fetch_last_tokens([rows[i] for i in behind]) if behind else list
        return self._helper.submit(self._masks, rows, constraints, behind, last_tokens)

    def _masks(
        self,
        rows: list[int],
        constraints: list[_Constraint],
        behind: list[int],
        last_tokens: Callable[[], list[int]],
    ) -> Masks:
        for i, token in zip(behind, last_tokens(), strict=True):
            constraints[i].take(token)
        bits: Bits = np.zeros((len(rows), -(-self._vocab_size // _WORD_BITS)), np.uint32)
        matchers: list[tuple[_Constraint, Matcher, int]] = []
        for row, constraint in enumerate(constraints):
            try:
                matcher = constraint.advance()
            except Exception:
                continue  # no token is allowed: the request fails, and no other
            if matcher is None:
                bits[row] = _ALL
                constraint.set_ends(bits[row], None)
            else:
                matchers.append((constraint, matcher, row))
        self._grammars.fill([(matcher, row) for _, matcher, row in matchers], bits)
        for constraint, matcher, row in matchers:
            if matcher.has_failed:
                bits[row] = 0
            else:
                constraint.set_ends(bits[row], matcher)
        return Masks(rows, bits)
