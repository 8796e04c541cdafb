"""The collector: waits for flights in the order of their launch and sends what they give.

Decides how a failure is told; what follows from it is the loop's business.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import structlog

from lineclear.process.logging_setup import exception_location
from lineclear.wire.messages import Goodbye, Hello, StepError, StepErrorKind, Stopping
from lineclear.worker.heartbeat import StepProgress
from lineclear.worker.runner_interface import InflightStep, StepFailed
from lineclear.worker.scheduler_link import ResultSocket, Waker

log = structlog.get_logger()


_LOOK_SECONDS = 0.5


class FlightsStuck(Exception):
    """The device does not give the results of its steps, and the worker is to stop."""


class _Launched(NamedTuple):
    step: int
    flight: InflightStep


_Item = _Launched | Hello | Goodbye | Stopping | threading.Event | None


class ResultCollector:
    """A thread with the sending socket, which both own from here on. All methods are for the launch thread.

    Hello, results, errors and Goodbye leave through one socket, so the scheduler hears them in the order of the calls.
    The launch thread sends itself what need not be waited for, while the other one has nothing to do: to wake it would
    take longer, and then it would compete with the next step for the interpreter.

    A device that hangs is waited for until `is_overdue()`; while the worker serves, the scheduler judges that. Then
    the methods that wait raise FlightsStuck.
    """

    def __init__(
        self,
        socket: ResultSocket,
        progress: StepProgress,
        bell: Waker,
        *,
        max_flights: int,
        farewell_seconds: float,
        is_overdue: Callable[[], bool] = lambda: False,
    ) -> None:
        self.failure: StepErrorKind | None = None
        """Why the epoch cannot go on. The bell rings when this is set."""
        self._socket = socket
        self._progress = progress
        self._waker = bell
        self._farewell_seconds = farewell_seconds
        self._is_overdue = is_overdue
        self._epoch = 0
        self._abandoned = False
        self._items: queue.Queue[_Item] = queue.Queue(max_flights)
        self._thread = threading.Thread(target=self._run, name="collector", daemon=True)
        self._thread.start()

    def begin(self, hello: Hello) -> None:
        """Say Hello: a new epoch. The one before must have settled."""
        self.failure, self._abandoned, self._epoch = None, False, hello.epoch
        self._put(hello)

    def collect(self, step: int, flight: InflightStep) -> None:
        """Collect `flight` after those before it: at once where nothing has to be waited for.

        Else it is queued; blocks while the queue is full.
        """
        launched = _Launched(step, flight)
        if flight.is_over and not self._items.unfinished_tasks:
            self._finish(launched)
        else:
            self._put(launched)

    def send(self, message: Goodbye | Stopping) -> None:
        """Send a message behind everything put before."""
        self._put(message)

    def discard(self) -> None:
        """Nobody wants the results any more. Flights are still waited for, because the device works on them."""
        self._abandoned = True

    def wait_idle(self) -> StepErrorKind | None:
        """Wait until nothing is in flight, end the epoch, and return `failure`."""
        settled = threading.Event()
        self._put(settled)
        while not settled.wait(_LOOK_SECONDS):
            self._check()
        return self.failure

    def close(self) -> bool:
        """Send what is queued and end the thread. False when a flight did not land within `farewell_seconds`."""
        try:
            self._items.put(None, timeout=self._farewell_seconds)
        except queue.Full:
            return False
        self._thread.join(self._farewell_seconds)
        return not self._thread.is_alive()

    def _put(self, item: _Item) -> None:
        while True:
            try:
                return self._items.put(item, timeout=_LOOK_SECONDS)
            except queue.Full:
                self._check()

    def _check(self) -> None:
        if self._is_overdue():
            raise FlightsStuck

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            if isinstance(item, _Launched):
                self._finish(item)
            elif isinstance(item, threading.Event):
                self._progress.end()
            else:
                if isinstance(item, Hello):
                    self._progress.begin(item.epoch)
                self._socket.send(item)
            self._items.task_done()  # from here on the launch thread may use the socket
            if isinstance(item, threading.Event):
                item.set()
        self._socket.close(self._farewell_seconds)

    def _finish(self, launched: _Launched) -> None:
        try:
            result = launched.flight.result()
            # After a failure the slots are in no promised state: what later flights give means nothing.
            if self.failure is None and not self._abandoned:
                self._socket.send(result)
        except StepFailed as failed:
            self._fail(launched.step, failed.kind, failed.summary, failed)
        except Exception as error:
            self._fail(launched.step, StepErrorKind.EXCEPTION, _describe(error), error)
        self._progress.finished(launched.step)

    def _fail(self, step: int, kind: StepErrorKind, summary: str, error: Exception) -> None:
        if self.failure is not None:
            return
        log.error("step_failed", step=step, kind=kind.name.lower(), summary=summary, places=exception_location(error))
        if not self._abandoned:
            self._socket.send(StepError(self._epoch, step, kind, summary))
        self.failure = kind
        self._waker.wake()


def _describe(error: Exception) -> str:
    """Type and place. Not the message: it may quote what a user wrote."""
    where = exception_location(error)
    return f"{type(error).__name__} at {where[-1]}" if where else type(error).__name__
