"""The worker's heartbeat, on a thread and a socket of its own. Says that the process lives and what it works on;
whether that takes too long is for the scheduler to judge."""

from __future__ import annotations

import threading
import time

import structlog

from lineclear.wire.messages import Heartbeat
from lineclear.worker.scheduler_link import ResultSocket

log = structlog.get_logger()

_JOIN_SECONDS = 2.0


class StepProgress:
    """What the worker works on. Written by the launch and the collector thread, read by the heart.

    No lock: every field is one word, and a heartbeat that mixes two moments does no harm.
    """

    def __init__(self) -> None:
        self.epoch = 0  # 0: in none
        self._launched = 0
        self._landed = 0
        self._since = 0.0  # when the step at work was begun

    def begin(self, epoch: int) -> None:
        """A new epoch: its steps count from 1."""
        self._launched = self._landed = 0
        self.epoch = epoch

    def end(self) -> None:
        """In no epoch: no heartbeats."""
        self.epoch = 0

    def launching(self, step: int) -> None:
        """`step` is about to be launched."""
        if self._launched == self._landed:
            self._since = time.monotonic()
        self._launched = step

    def finished(self, step: int) -> None:
        """The result of `step` is there; the next one, if launched, has the device now."""
        self._since = time.monotonic()
        self._landed = step

    def heartbeat(self) -> Heartbeat:
        """The state as a message."""
        if self._landed >= self._launched:
            return Heartbeat(self.epoch, 0)
        return Heartbeat(self.epoch, self._landed + 1, time.monotonic() - self._since)


class HeartbeatThread:
    """Beats every `interval_seconds` while the worker is in an epoch. Owns its socket from here on."""

    def __init__(self, socket: ResultSocket, progress: StepProgress, interval_seconds: float) -> None:
        self._socket = socket
        self._progress = progress
        self._interval_seconds = interval_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """End the thread, which closes the socket. False when it did not end in time."""
        self._stopped.set()
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            log.warning("heart_not_stopped", hint="the process ends without it")
            return False
        return True

    def _run(self) -> None:
        last_epoch = 0
        while not self._stopped.wait(self._interval_seconds):
            beat = self._progress.heartbeat()
            # Not in the interval in which the Hello was sent: it went through another socket, and a heartbeat that
            # overtakes it would come from a stranger.
            if beat.epoch and beat.epoch == last_epoch:
                self._socket.send(beat)
            last_epoch = beat.epoch
        self._socket.close()
