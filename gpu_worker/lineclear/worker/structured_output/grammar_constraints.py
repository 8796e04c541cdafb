"""Structured output: which tokens the grammars of the slots allow next, as one bit a token.

A matcher follows the output of one slot. It starts from the output tokens in the slot's initialisation, and takes each
token that the slot samples. So a preemption, a resumed answer or another worker needs nothing else. No torch here: the
sampler applies the bits to the logits.

A row whose mask is not ready in time is *deferred*: it samples nothing, and the other rows go on. Rows of its slot that
are in flight behind it lack its token and are deferred, too. The core plans its position again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from lineclear.wire.messages import SlotInit

from .mask_threads import Bits, Mask, MaskThreads

_ALL = np.uint32(0xFFFFFFFF)
_WORD_BITS = 32


class Matcher(Protocol):
    """Follows one output through a grammar. llguidance's `LLMatcher` is one."""

    def consume_token(self, token: int, /) -> bool:
        """Take the next token of the output. One that the grammar does not allow makes the matcher fail for good."""

    def is_accepting(self) -> bool:
        """Return whether the output so far is complete."""

    def is_error(self) -> bool:
        """Return whether the grammar does not allow the output, or is too complex to continue."""


class Grammars(Protocol):
    """Compiles grammars and computes masks."""

    def matcher(self, grammar: str) -> Future[Matcher]:
        """Return a new matcher at the start of the grammar; it may take a while. The future may raise."""

    def fill(self, matcher: Matcher, bits: Bits) -> None:
        """Write the allowed next tokens of a matcher."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, of a special one those of its name."""

    @property
    def end_ids(self) -> Sequence[int]:
        """Tokens that `fill` may allow where the grammar may end. Requests may have others."""


class Masks(NamedTuple):
    """The allowed tokens of some sampling rows of a step."""

    rows: list[int]
    """Indices of sampling rows, ascending."""
    bits: Bits
    """[num_rows, words]."""
    deferred: Sequence[int] = ()
    """Indices of the sampling rows whose mask is not ready."""
    void: Sequence[int] = ()
    """Those of them whose input is not known, because an earlier row was deferred: their values mean nothing."""


class _Constraint:
    def __init__(self, init: SlotInit, grammars: Grammars) -> None:
        sampling, self._grammars = init.sampling, grammars
        self._matcher = grammars.matcher(sampling.grammar)
        self._marker = sampling.grammar_start.encode()
        self._is_started = not self._marker
        self._tail = b""  # end of the output before the marker
        self._first_end = init.prompt_len + sampling.min_tokens
        self._end_ids = sampling.stop_ids
        self._pending = list(init.tokens[init.prompt_len :])
        self.position = len(init.tokens)
        """Number of prompt and output tokens that were taken."""
        self.mask: Mask | None = None
        """Of the present step, or of a row that was deferred."""
        self.mask_position = 0
        """Position of the token that the mask is for."""
        self.is_slow = False
        """Whether the last mask was slow."""

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
            matcher.consume_token(token)
        if matcher.is_error():
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

    @property
    def is_compiled(self) -> bool:
        """Whether a mask can be computed without a wait for the compiler."""
        return self._matcher.done()

    @property
    def compiled(self) -> Future[Matcher] | None:
        """The compilation that the next mask waits for; None if the grammar is compiled, or does not hold yet."""
        return None if self._matcher.done() or not self._is_started else self._matcher

    def allowed(self, num_words: int) -> Bits:
        """Return the mask behind all tokens; nothing is allowed where the matcher fails."""
        bits: Bits = np.zeros(num_words, np.uint32)
        try:
            matcher = self.advance()
            if matcher is None:
                bits[:] = _ALL
            else:
                self._grammars.fill(matcher, bits)
                if matcher.is_error():
                    bits[:] = 0
                    return bits
            self._set_ends(bits, matcher)
        except Exception:
            bits[:] = 0  # the request fails, and no other
        return bits

    def _set_ends(self, mask: Bits, matcher: Matcher | None) -> None:
        """Allow the tokens that end the answer exactly where the grammar may end."""
        may_end = matcher is not None and self.position >= self._first_end and matcher.is_accepting()
        for token in {*self._grammars.end_ids, *self._end_ids}:
            mask[token // _WORD_BITS] &= ~np.uint32(1 << token % _WORD_BITS)
        for token in self._end_ids if may_end else ():
            mask[token // _WORD_BITS] |= np.uint32(1 << token % _WORD_BITS)


class PendingMasks(NamedTuple):
    """The masks of a step, which are computed beside its forward pass."""

    result: Callable[[], Masks]
    """Waits for the masks as long as the step may, and returns those that are ready."""
    held: Sequence[int] = ()
    """Slots whose rows may be deferred or are void."""


class ConstraintTable:
    """The constraints of all slots. The launch thread calls the methods; other threads compute masks."""

    def __init__(
        self, grammars: Grammars, vocab_size: int, threads: MaskThreads | None = None, *, may_defer: bool = True
    ) -> None:
        self._grammars = grammars
        self._num_words = -(-vocab_size // _WORD_BITS)
        self.slots: dict[int, _Constraint] = {}
        """The constraints by slot. A step without any needs no call."""
        self.may_defer = may_defer
        """Steps do not wait for masks that are late."""
        self._threads = threads or MaskThreads()

    def reset(self) -> None:
        self.slots.clear()

    def set_slot(self, init: SlotInit) -> None:
        """Start the constraint of the slot's new sequence, if it has one."""
        if init.sampling.grammar:
            self.slots[init.slot] = _Constraint(init, self._grammars)
        else:
            self.slots.pop(init.slot, None)

    def start(
        self,
        slots: Sequence[int],
        positions: Sequence[int],
        fetch_last_tokens: Callable[[list[int]], Callable[[], list[int]]],
        single_slots: Container[int] | None = None,
    ) -> PendingMasks | None:
        """Compute the masks of the sampling rows with these slots and positions, while the caller goes on.

        `fetch_last_tokens(rows)` is called at once for the rows that sampled their last token in an earlier step. A
        helper thread calls its result, which waits for these tokens. Returns None if no row has a constraint.

        With a recurrent state, which the caller can bring back behind a row of one token, `single_slots` are the slots
        with such rows. Only their rows are deferred, and only for masks that are slow: the others are waited for.
        """
        if not self.slots or self.slots.keys().isdisjoint(slots):
            return None
        masked, void = dict[int, _Constraint](), list[int]()  # the constraints by sampling row, and rows without input
        new, behind = list[Mask](), list[int]()
        for row, slot in enumerate(slots):
            constraint = self.slots.get(slot)
            if constraint is None:
                continue
            if constraint.mask is not None and positions[row] > constraint.mask_position:
                void.append(row)
                continue
            masked[row] = constraint
            if constraint.mask is None:
                if constraint.position < positions[row]:
                    behind.append(row)
                new.append(self._new_mask(constraint, positions[row]))
                constraint.mask = new[-1]
        last_tokens = fetch_last_tokens(behind) if behind else list
        taking = [self.slots[slots[row]] for row in behind]

        def take_tokens() -> None:
            for constraint, token in zip(taking, last_tokens(), strict=True):
                constraint.take(token)

        self._threads.start(new, take_tokens)
        masks = {row: constraint.mask for row, constraint in masked.items() if constraint.mask is not None}
        required = dict[int, Mask]()  # that the step waits for
        if not self.may_defer or single_slots is not None:
            singles = single_slots if self.may_defer and single_slots is not None else ()
            required = {row: mask for row, mask in masks.items() if slots[row] not in singles or not mask.is_slow}
        held = [slots[row] for row in (*void, *(row for row in masks if row not in required))]
        is_alone = len(masks) + len(void) == len(slots)
        return PendingMasks(partial(self._ready, masked, masks, void, list(required.values()), is_alone), held)

    def _ready(
        self,
        masked: Mapping[int, _Constraint],
        masks: Mapping[int, Mask],
        void: Sequence[int],
        required: Sequence[Mask],
        is_alone: bool,
    ) -> Masks:
        self._threads.wait(list(masks.values()), is_alone=is_alone)
        while late := [x for x in required if x.bits is None and not self._threads.is_overdue(x)]:
            self._threads.wait(late, is_alone=True)
        found, deferred = dict[int, Bits](), list(void)
        for row, mask in masks.items():
            bits = mask.bits
            if bits is None and self._threads.is_overdue(mask):
                bits = np.zeros(self._num_words, np.uint32)  # the request fails
            if bits is None:
                deferred.append(row)
                continue
            masked[row].mask, masked[row].is_slow = None, mask.is_slow
            found[row] = bits
        all_bits: Bits = np.stack(list(found.values())) if found else np.zeros((0, self._num_words), np.uint32)
        return Masks(list(found), all_bits, deferred, void)

    def _new_mask(self, constraint: _Constraint, position: int) -> Mask:
        constraint.mask_position = position
        is_slow = constraint.is_slow or not constraint.is_compiled
        return Mask(partial(constraint.allowed, self._num_words), is_slow=is_slow, compiled=constraint.compiled)
