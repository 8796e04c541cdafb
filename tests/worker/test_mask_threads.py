"""A step waits for masks for a bounded time; late ones go on, and the request of one that never comes fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest
from support.toy_grammar import ToyGrammars, ToyMatcher, grammar

from lineclear.wire.messages import Sampling, SlotInit
from lineclear.worker.structured_output import mask_threads
from lineclear.worker.structured_output.grammar_constraints import ConstraintTable, Masks, Matcher
from lineclear.worker.structured_output.mask_threads import Bits, MaskThreads

VOCABULARY = 97
PATIENCE_SECONDS = 30.0
FORM, GATED, UNCOMPILED = grammar(1, 40), grammar(2, 40), grammar(3, 40)


class GatedGrammars(ToyGrammars):
    """Holds back the masks of the grammar GATED until `gate` is set."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.gate = threading.Event()
        self.began = threading.Event()
        self.gated: list[Matcher] = []
        self.num_filled = 0
        self.uncompiled: Future[Matcher] = Future()

    def matcher(self, grammar: str) -> Future[Matcher]:
        if grammar == UNCOMPILED:
            return self.uncompiled
        found = super().matcher(grammar)
        if grammar == GATED:
            self.gated.append(found.result())
        return found

    def fill(self, matcher: Matcher, bits: Bits) -> None:
        if any(matcher is gated for gated in self.gated):
            self.began.set()
            assert self.gate.wait(PATIENCE_SECONDS)
        super().fill(matcher, bits)
        self.num_filled += 1


class Table:
    """A table whose slot 0 is gated, and whose slot 1 has an ordinary form; slot 2 has none."""

    def __init__(self, slots: Sequence[int] = (0, 1, 2)) -> None:
        self.grammars = GatedGrammars()
        self.now = self.cpu_seconds = 0.0
        threads = MaskThreads(lambda: self.now, lambda thread: self.cpu_seconds)
        self.table = ConstraintTable(self.grammars, VOCABULARY, threads)
        for slot, form in zip((0, 1, 2), (GATED, FORM, ""), strict=True):
            if slot in slots:
                self.set_slot(slot, form)

    def set_slot(self, slot: int, form: str) -> None:
        self.table.set_slot(SlotInit(slot, (5, 6), 2, (), Sampling(grammar=form, stop_ids=(0,))))

    def step(self, slots: Sequence[int], positions: Sequence[int]) -> Masks:
        pending = self.table.start(slots, positions, lambda rows: lambda: [9] * len(rows))
        assert pending is not None
        return pending.result()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ordinary masks be ready on a busy machine, too: only the gated one is late."""
    monkeypatch.setattr(mask_threads, "MIN_WAIT_SECONDS", 0.5)


def allowed(form: str, output: Sequence[int] = ()) -> Bits:
    matcher = ToyMatcher(form)
    for token in output:
        matcher.consume_token(token)
    bits = np.zeros(-(-VOCABULARY // 32), np.uint32)
    ToyGrammars(VOCABULARY).fill(matcher, bits)
    if matcher.is_accepting():
        bits[0] |= np.uint32(1)
    return bits


def test_other_rows_go_on_without_a_late_mask() -> None:
    t = Table()
    masks = t.step((0, 1, 2), (2, 2, 2))
    assert (masks.rows, list(masks.deferred), list(masks.void)) == ([1], [0], [])
    assert np.array_equal(masks.bits[0], allowed(FORM))
    again = t.step((0, 1, 2), (2, 3, 3))
    assert (again.rows, list(again.deferred)) == ([1], [0]), "it is not computed twice, and not waited for"
    t.grammars.gate.set()


def test_late_mask_is_used_at_the_next_try() -> None:
    t = Table(slots=(0,))
    assert list(t.step((0, 2), (2, 2)).deferred) == [0]
    t.grammars.gate.set()
    while not (masks := t.step((0,), (2,))).rows:
        pass
    assert np.array_equal(masks.bits[0], allowed(GATED))
    assert t.grammars.num_filled == 1


def test_rows_behind_a_deferred_one_are_void() -> None:
    t = Table(slots=(0,))
    assert list(t.step((0, 2), (2, 2)).deferred) == [0]
    behind = t.step((0, 2), (3, 3))
    assert (list(behind.deferred), list(behind.void)) == ([0], [0])
    t.grammars.gate.set()
    while not t.step((0,), (2,)).rows:
        pass
    masks = t.step((0, 2), (3, 3))
    assert np.array_equal(masks.bits[0], allowed(GATED, [9])), "the token of the void row was not taken"


def test_next_owner_of_the_slot_does_not_wait_for_the_mask() -> None:
    t = Table(slots=(0,))
    assert list(t.step((0, 2), (2, 2)).deferred) == [0]
    t.set_slot(0, FORM)
    assert t.step((0, 2), (2, 2)).rows == [0]
    t.grammars.gate.set()


def test_no_token_is_allowed_without_a_mask_in_time() -> None:
    """So the request fails, and no other."""
    t = Table()
    assert list(t.step((0, 1), (2, 2)).deferred) == [0]
    t.cpu_seconds += mask_threads.MAX_WORK_SECONDS
    assert list(t.step((0, 1), (2, 3)).deferred) == [0]
    t.cpu_seconds += 0.1
    masks = t.step((0, 1), (2, 4))
    assert masks.rows == [0, 1]
    assert not masks.bits[0].any()
    t.grammars.gate.set()


def test_no_request_fails_for_a_busy_machine() -> None:
    """The thread of its mask has waited for a core, or the process was stopped."""
    t = Table()
    assert list(t.step((0, 1), (2, 2)).deferred) == [0]
    t.now += 1000.0
    assert list(t.step((0, 1), (2, 3)).deferred) == [0]
    t.grammars.gate.set()
    while not t.step((0,), (2,)).rows:
        pass


def test_cpu_time_of_a_thread_is_its_own() -> None:
    before = mask_threads.cpu_seconds_of(threading.get_ident())
    while mask_threads.cpu_seconds_of(threading.get_ident()) == before:
        pass
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    assert other.ident is not None
    assert mask_threads.cpu_seconds_of(other.ident) < time.process_time()
    stop.set()
    other.join()


def test_form_that_is_compiled_delays_no_late_mask() -> None:
    """A worker that has just joined compiles the forms of the requests that it continues."""
    t = Table(slots=())
    t.set_slot(0, UNCOMPILED)
    assert list(t.step((0, 2), (2, 2)).deferred) == [0]
    t.set_slot(1, GATED)
    t.table.slots[1].is_slow = True
    t.grammars.gate.set()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while 1 not in t.step((0, 1), (2, 2)).rows:
        assert time.monotonic() < deadline
    t.grammars.uncompiled.set_result(ToyMatcher(UNCOMPILED))
    while not (masks := t.step((0,), (2,))).rows:
        assert time.monotonic() < deadline
    assert np.array_equal(masks.bits[0], allowed(UNCOMPILED))


def test_step_does_not_wait_for_masks_of_earlier_ones() -> None:
    """All threads are busy with masks whose rows were deferred."""
    t = Table(slots=())
    busy = range(2, 8)
    for slot in busy:
        t.set_slot(slot, GATED)
    assert len(t.step((0, *busy), (2,) * 7).deferred) == 6
    t.set_slot(1, FORM)
    steps: list[Masks] = []
    step = threading.Thread(target=lambda: steps.append(t.step((0, 1, *busy), (2,) * 8)), daemon=True)
    step.start()
    step.join(PATIENCE_SECONDS / 2)
    t.grammars.gate.set()
    assert len(steps) == 1
    assert len(steps[0].deferred) == 7


def test_step_whose_rows_all_wait_waits_with_them() -> None:
    t = Table(slots=(0,))
    opener = threading.Thread(target=lambda: t.grammars.began.wait(PATIENCE_SECONDS) and t.grammars.gate.set())
    opener.start()
    tries = 1
    while not t.step((0,), (2,)).rows:
        tries += 1
    opener.join()
    assert tries < 100, "a step without other rows does not return at once"
