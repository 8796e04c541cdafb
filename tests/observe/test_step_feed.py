"""Watchers of the steps: their places, what they miss, and the work that they cause."""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from lineclear.errors import TooManyWatchers
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.observe import step_feed, step_history
from lineclear.scheduler.observe.scheduler_state import TakenState, take_state
from lineclear.scheduler.observe.step_feed import REPLACE_SECONDS, STATE_SECONDS, StepFeed
from lineclear.scheduler.observe.step_history import StepHistory
from lineclear.v1 import steps_pb2 as pb
from lineclear.wire.messages import Decodes, Hello, StepPlan, StepResult

HELLO = Hello(7, 16, 4, 4, 64, 97, (), 64)
NOTHING = pb.WatchStepsResponse()


class Harness:
    """A feed over a history that the test fills, with a clock and an engine's thread that the test moves."""

    def __init__(self, size: int = 8, max_watchers: int = 2) -> None:
        self.now = 100.0
        self.num_states = 0
        self.calls: list[Callable[[], object]] = []
        self.core = Scheduler(CoreLimits())
        self.core.worker_joined(HELLO, self.now)
        self.history = StepHistory(size)
        self.history.worker_joined(HELLO, 0)
        self.feed = StepFeed(
            self.history, self.calls.append, self.state, max_watchers=max_watchers, clock=lambda: self.now
        )

    def state(self) -> TakenState:
        self.num_states += 1
        return take_state(self.core.state, self.history.worker_indices, self.now, 1)

    def run(self, count: int = 1) -> None:
        for _ in range(count):
            plan = StepPlan(7, self.history.last + 1, decodes=Decodes((0, 1), (5, 6)))
            self.history.planned(plan, self.core.state, (), self.now)
            result = StepResult(7, self.history.last + 1, (), step_seconds=0.001)
            self.history.executed(result, self.core.state, (), self.now + 0.002)


def test_a_watcher_reads_each_step_once() -> None:
    harness = Harness()
    harness.run(3)
    with harness.feed.watch() as new, harness.feed.watch(history=2) as old:
        first, second = old.read().steps
        assert (first.number, second.number) == (2, 3)
        times = (first.planned_at, first.step_time, first.total_time)
        assert [moment.ToMilliseconds() for moment in times] == [100_000, 1, 2]
        assert first.planned_time.ToSeconds() == pytest.approx(100 + time.time() - time.monotonic(), abs=2)
        assert new.read() == NOTHING
        harness.run(2)
        assert new.has_more
        assert [step.number for step in new.read().steps] == [step.number for step in old.read().steps] == [4, 5]
        assert not new.has_more


def test_a_slow_watcher_misses_steps_and_is_told_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that asks for more history than is kept missed nothing. A read has a bounded number of rows."""
    harness = Harness(size=8)
    with harness.feed.watch() as watcher:
        harness.run(20)
        response = watcher.read()
        assert ([step.number for step in response.steps], response.skipped) == ([*range(13, 21)], 12)
        assert watcher.read() == NOTHING
    with harness.feed.watch(history=10**9) as watcher:
        assert watcher.read().skipped == 0
    monkeypatch.setattr(step_feed, "MAX_READ_ROWS", 4)  # of two steps
    with harness.feed.watch(history=3) as watcher:
        assert [len(watcher.read().steps) for _ in range(2)] == [2, 1]


def test_the_oldest_watcher_of_a_minute_makes_room() -> None:
    """A watcher that never reads cannot be found while little is sent, so age decides."""
    harness = Harness(max_watchers=2)
    oldest = harness.feed.watch()
    harness.now += 1.0
    other = harness.feed.watch()
    harness.now += REPLACE_SECONDS - 1.5
    with pytest.raises(TooManyWatchers, match="the limit is"):
        harness.feed.watch()
    harness.now += 0.5
    with harness.feed.watch() as new:
        assert (oldest.is_replaced, other.is_replaced, new.is_replaced) == (True, False, False)
        assert harness.feed.num_watchers == 2
        oldest.__exit__()
        assert harness.feed.num_watchers == 2, "its place is the new one's"
        with pytest.raises(TooManyWatchers):
            harness.feed.watch()
    other.__exit__()
    assert harness.feed.num_watchers == 0


def test_all_watchers_share_one_state() -> None:
    """However many ask and however often: the engine takes a state at most every STATE_SECONDS."""
    harness = Harness()
    first = harness.feed.state()
    assert all(harness.feed.state() is first for _ in range(100))
    assert len(harness.calls) == 1
    harness.now += 10 * STATE_SECONDS
    assert harness.feed.state() is first, "the engine has not answered: no second call"
    harness.calls.pop()()
    assert first.result(0).message.taken_at.seconds == harness.now
    assert harness.feed.state() is not first
    harness.calls.pop()()
    for _ in range(100):
        harness.feed.state()
        while harness.calls:
            harness.calls.pop()()
        harness.now += STATE_SECONDS / 51
    assert harness.num_states == 2 + 1, "a hundred requests within two intervals"


def test_a_reader_that_gives_up_does_not_harm_the_engine() -> None:
    harness = Harness()
    assert harness.feed.state().cancel()
    harness.calls.pop()()
    harness.now += STATE_SECONDS
    again = harness.feed.state()
    harness.calls.pop()()
    assert again.result(0).message.taken_at.ToNanoseconds() / 1e9 == harness.now


def test_a_state_is_sent_when_it_has_changed() -> None:
    harness = Harness()
    with harness.feed.watch() as plain, harness.feed.watch() as with_map:
        for watcher in (plain, with_map):
            assert watcher.read(harness.state(), block_maps=watcher is with_map).HasField("state")
        harness.now += 1.0
        assert plain.read(harness.state()) == NOTHING, "only the time differs"
        harness.core.drain(harness.now)
        assert plain.read(harness.state()).state.workers[0].block_map == b""
        assert with_map.read(harness.state(), block_maps=True).state.workers[0].block_map == bytes(16)


def test_nothing_is_computed_without_a_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are kept as they are; a message is made once, for the first who reads it."""
    made = Mock(side_effect=pb.StepRecord)
    monkeypatch.setattr(pb, "StepRecord", made)
    harness = Harness()
    harness.run(100)
    assert harness.calls == []
    assert (made.call_count, harness.num_states) == (0, 0)
    with harness.feed.watch(history=3) as first, harness.feed.watch(history=3) as second:
        assert first.read() == second.read()
    assert made.call_count == 3


def test_messages_are_dropped_with_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_history, "MAX_ROWS", 6)  # three steps of two rows
    harness = Harness()
    with harness.feed.watch() as watcher:
        for _ in range(8):
            harness.run()
            watcher.read()
    assert sum(message is not None for message in harness.history._messages) == 3
