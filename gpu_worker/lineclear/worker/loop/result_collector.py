"""The collector thread: waits for in-flight steps in launch order and sends their results."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import structlog

from lineclear.process.exception_location import exception_fields, exception_summary
from lineclear.wire.messages import AdapterLoaded, Goodbye, Hello, Profiled, StepError, StepErrorKind, Stopping
from lineclear.worker.loop.heartbeat import StepProgress
from lineclear.worker.loop.runner_interface import InflightStep, StepFailed
from lineclear.worker.loop.scheduler_link import ResultSocket, Waker

log = structlog.get_logger()

_POLL_SECONDS = 0.5


class DeviceStuck(Exception):
    """The device does not finish its steps, and the worker must stop."""


class _Launched(NamedTuple):
    step: int
    inflight: InflightStep


_Item = _Launched | Hello | Goodbye | Stopping | AdapterLoaded | Profiled | threading.Event | None


class ResultCollector:
    """A thread that shares the result socket with the launch thread. Only the launch thread calls the methods.

    Hello, results, errors and Goodbye use one socket, so the scheduler receives them in the order of the calls. The
    launch thread sends complete results itself while the collector is idle: waking the collector takes longer, and it
    would then compete with the next step for the interpreter lock.

    While the worker serves, the scheduler watches for a device that hangs. Once `is_overdue()` returns True, the
    methods that wait raise DeviceStuck.
    """

    def __init__(
        self,
        socket: ResultSocket,
        progress: StepProgress,
        waker: Waker,
        *,
        max_inflight_steps: int,
        linger_seconds: float,
        is_overdue: Callable[[], bool] = lambda: False,
    ) -> None:
        self.failure: StepErrorKind | None = None
        """Why the epoch cannot continue. Setting it wakes the launch thread."""
        self._socket, self._progress, self._waker = socket, progress, waker
        self._linger_seconds, self._is_overdue = linger_seconds, is_overdue
        self._epoch, self._discards = 0, False
        self._items: queue.Queue[_Item] = queue.Queue(max_inflight_steps)
        self._thread = threading.Thread(target=self._run, name="collector", daemon=True)
        self._thread.start()

    def start_epoch(self, hello: Hello) -> None:
        """Send Hello for a new epoch. Call `wait_idle` for the previous epoch first."""
        self.failure, self._discards, self._epoch = None, False, hello.epoch
        self._put(hello)

    def collect(self, step: int, inflight: InflightStep) -> None:
        """Send the result of a step behind those before it: at once if it is complete and none is queued."""
        launched = _Launched(step, inflight)
        if inflight.is_complete and not self._items.unfinished_tasks:
            self._finish(launched)
        else:
            self._put(launched)

    def send(self, message: Goodbye | Stopping | AdapterLoaded | Profiled) -> None:
        self._put(message)

    def discard(self) -> None:
        """Discard the results of in-flight steps. The collector still waits for them, because the device runs them."""
        self._discards = True

    def wait_idle(self) -> StepErrorKind | None:
        """Wait until no step is in flight, end the epoch, and return `failure`."""
        idle = threading.Event()
        self._put(idle)
        while not idle.wait(_POLL_SECONDS):
            self._check_overdue()
        return self.failure

    def close(self) -> bool:
        """Send the queued messages and stop the thread. Returns False if a step does not finish in time."""
        try:
            self._items.put(None, timeout=self._linger_seconds)
        except queue.Full:
            return False
        self._thread.join(self._linger_seconds)
        return not self._thread.is_alive()

    def _put(self, item: _Item) -> None:
        while True:
            try:
                return self._items.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                self._check_overdue()

    def _check_overdue(self) -> None:
        if self._is_overdue():
            raise DeviceStuck

    # --- collector thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            if isinstance(item, _Launched):
                self._finish(item)
            elif isinstance(item, threading.Event):
                self._progress.end_epoch()
            else:
                if isinstance(item, Hello):
                    self._progress.start_epoch(item.epoch)
                self._socket.send(item)
            self._items.task_done()  # after this the launch thread may use the socket
            if isinstance(item, threading.Event):
                item.set()
        self._socket.close(self._linger_seconds)

    def _finish(self, launched: _Launched) -> None:
        try:
            result = launched.inflight.result()
            # After a failure the slots are undefined, and so are the results of later steps.
            if self.failure is None and not self._discards:
                self._socket.send(result)
        except StepFailed as failed:
            self._fail(launched.step, failed.kind, failed.summary, failed)
        except Exception as error:
            self._fail(launched.step, StepErrorKind.EXCEPTION, exception_summary(error), error)
        self._progress.on_finish(launched.step)

    def _fail(self, step: int, kind: StepErrorKind, summary: str, error: Exception) -> None:
        if self.failure is not None:
            if kind is StepErrorKind.EXCEPTION:  # the process must not go on, as it may after a lack of memory
                self.failure = kind
            return
        log.error("step_failed", step=step, kind=kind.name.lower(), summary=summary, **exception_fields(error))
        if not self._discards:
            self._socket.send(StepError(self._epoch, step, kind, summary))
        self.failure = kind
        self._waker.wake()
