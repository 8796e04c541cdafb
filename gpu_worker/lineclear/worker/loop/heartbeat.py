"""The worker's heartbeat thread, with its own socket. Reports which step runs and for how long; the scheduler decides
when that is too long."""

from __future__ import annotations

import threading
import time
from collections import deque

import structlog

from lineclear.wire.messages import Heartbeat
from lineclear.worker.loop.scheduler_link import ResultSocket

log = structlog.get_logger()

_JOIN_SECONDS = 2.0


class StepProgress:
    """The current epoch and step. Written by the launch and collector threads, read by the heartbeat thread.

    Without a lock: every field is one word, and a heartbeat that mixes two moments does no harm.
    """

    def __init__(self) -> None:
        self.epoch = 0  # 0: no epoch
        self._launched = self._finished = 0
        self._started_at = 0.0  # of the running step
        self._prepared: deque[tuple[int, int]] = deque()  # epoch and number of grammars to report
        self.changed = threading.Event()
        """Set when a heartbeat should be sent at once."""

    def start_epoch(self, epoch: int) -> None:
        self._launched = self._finished = 0
        self.epoch = epoch

    def end_epoch(self) -> None:
        self.epoch = 0

    def on_launch(self, step: int) -> None:
        if self._launched == self._finished:
            self._started_at = time.monotonic()
        self._launched = step

    def on_finish(self, step: int) -> None:
        """Record the result of `step`. The next launched step, if any, starts now."""
        self._started_at = time.monotonic()
        self._finished = step

    def on_prepared(self, epoch: int, number: int) -> None:
        """Report with a heartbeat that a grammar is compiled. Any thread."""
        self._prepared.append((epoch, number))
        self.changed.set()

    def heartbeat(self) -> Heartbeat:
        """Return the running step and its age as a message, with the grammars that were compiled."""
        epoch, prepared = self.epoch, list[int]()
        while self._prepared:
            of_epoch, number = self._prepared.popleft()
            prepared += [number] if of_epoch == epoch else []
        if self._finished >= self._launched:
            return Heartbeat(epoch, 0, prepared=tuple(prepared))
        return Heartbeat(epoch, self._finished + 1, time.monotonic() - self._started_at, tuple(prepared))


class HeartbeatThread:
    """Sends a heartbeat every `interval_seconds` during an epoch. Owns its socket."""

    def __init__(self, socket: ResultSocket, progress: StepProgress, interval_seconds: float) -> None:
        self._socket, self._progress, self._interval_seconds = socket, progress, interval_seconds
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Stop the thread, which closes the socket. Returns False if it does not stop in time."""
        self._is_stopped = True
        self._progress.changed.set()
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            log.warning("heartbeat_thread_stuck", hint="the process exits without it")
            return False
        return True

    def _run(self) -> None:
        last_epoch = 0
        changed = self._progress.changed
        while not (changed.wait(self._interval_seconds) and self._is_stopped):
            changed.clear()
            heartbeat = self._progress.heartbeat()
            # Skip the interval of the Hello: it uses another socket, and a heartbeat that overtakes it has an epoch
            # that the scheduler does not know yet. It knows one that it sent a grammar to.
            if heartbeat.epoch and (heartbeat.epoch == last_epoch or heartbeat.prepared):
                self._socket.send(heartbeat)
            last_epoch = heartbeat.epoch
        self._socket.close()
