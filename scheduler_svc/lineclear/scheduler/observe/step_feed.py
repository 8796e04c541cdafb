"""Watchers of the steps: each has a place in the history, reads when it likes, and delays nobody.

The engine does not know them. Only the state is taken on its thread, for all watchers together and at most every
STATE_SECONDS.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from lineclear.errors import TooManyWatchers
from lineclear.scheduler.observe.scheduler_state import TakenState
from lineclear.scheduler.observe.step_history import StepHistory
from lineclear.v1 import steps_pb2 as pb

STATE_SECONDS = 0.1
"""Shortest time between two states."""
REPLACE_SECONDS = 60.0
"""Age from which a watcher makes room for a new one: while little is sent, one that never reads looks like others."""
MAX_READ_ROWS = 2**15
"""Rows of one read: about half a megabyte."""


class StepFeed:
    """Gives places to watchers, at most `max_watchers`, and takes the state for them. Thread-safe."""

    def __init__(
        self,
        history: StepHistory,
        call_on_engine_thread: Callable[[Callable[[], object]], None],
        take_state: Callable[[], TakenState],
        max_watchers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history = history
        self._call_on_engine_thread, self._take_state = call_on_engine_thread, take_state
        self._max_watchers = max_watchers
        self._clock = clock
        self._closed = threading.Event()
        self._lock = threading.Condition()
        self._watchers: dict[StepWatcher, float] = {}  # since when; the oldest first
        self._state: Future[TakenState] | None = None
        self._state_at = 0.0

    @property
    def is_closed(self) -> bool:
        """The server stops: watchers end."""
        return self._closed.is_set()

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def close(self) -> None:
        """End every watcher, at its next read."""
        self._closed.set()

    def wait_until_idle(self, seconds: float) -> None:
        """Wait until every watcher has left, at most `seconds`."""
        with self._lock:
            self._lock.wait_for(lambda: not self._watchers, seconds)

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`, or until `close`."""
        self._closed.wait(seconds)

    def watch(self, history: int = 0) -> StepWatcher:
        """Return a watcher that begins up to `history` steps before the next one. Raises TooManyWatchers.

        If there is no place, the oldest watcher is replaced once it is REPLACE_SECONDS old.
        """
        with self._lock:
            now = self._clock()
            if len(self._watchers) >= self._max_watchers:
                oldest = next(iter(self._watchers), None)
                if oldest is None or now - self._watchers[oldest] < REPLACE_SECONDS:
                    raise self._too_many()
                oldest.is_replaced = True
                del self._watchers[oldest]
            first = self._history.last - min(history, self._history.size)
            watcher = StepWatcher(self, self._history, max(0, first))
            self._watchers[watcher] = now
            return watcher

    def leave(self, watcher: StepWatcher) -> None:
        """Free the place of a watcher, unless another one has it."""
        with self._lock:
            self._watchers.pop(watcher, None)
            self._lock.notify_all()

    def _too_many(self) -> TooManyWatchers:
        return TooManyWatchers(
            f"{len(self._watchers)} calls watch the steps, the limit is --max-step-watchers; end one of them, or try "
            f"again when the oldest is {REPLACE_SECONDS:g} s old",
            metadata={"limit": str(self._max_watchers)},
        )

    def state(self) -> Future[TakenState]:
        """Return the state, at most STATE_SECONDS old or about to be taken. It is never done once the engine stops."""
        with self._lock:
            now = self._clock()
            if self._state is None or (self._state.done() and now >= self._state_at + STATE_SECONDS):
                self._state, self._state_at = Future[TakenState](), now
                self._call_on_engine_thread(lambda state=self._state: self._take(state))  # type: ignore[misc]
            return self._state

    def _take(self, future: Future[TakenState]) -> None:
        if future.set_running_or_notify_cancel():
            future.set_result(self._take_state())


class StepWatcher:
    """One reader of the steps. A context manager: leaving it frees its place."""

    def __init__(self, feed: StepFeed, history: StepHistory, number: int) -> None:
        self._feed, self._history = feed, history
        self._number = number  # of the last step read
        self._sent: pb.SchedulerState | None = None
        self.is_replaced = False
        """Another watcher has its place: it must end."""

    def __enter__(self) -> StepWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._feed.leave(self)

    @property
    def has_more(self) -> bool:
        return self._number < self._history.last

    def read(self, state: TakenState | None = None, *, block_maps: bool = False) -> pb.WatchStepsResponse:
        """Return the next steps, of MAX_READ_ROWS rows at most, and `state` if anything in it has changed."""
        steps, skipped = self._history.after(self._number, MAX_READ_ROWS)
        self._number += len(steps) + skipped
        response = pb.WatchStepsResponse(steps=steps, skipped=skipped)
        if state is not None and self._has_changed(state.message):
            response.state.CopyFrom(state.with_block_maps() if block_maps else state.message)
        return response

    def _has_changed(self, state: pb.SchedulerState) -> bool:
        """Return whether a state differs from the last one in more than its time."""
        before, self._sent = self._sent, pb.SchedulerState()
        self._sent.CopyFrom(state)
        if before is not None:
            before.taken_at.CopyFrom(state.taken_at)
        return before != state
