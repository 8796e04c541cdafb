"""Read WatchSteps in a thread, so that a command can also wait for time, signals and the size of the terminal."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from lineclear.client import AdminClient, Client
from lineclear.errors import LineclearError
from lineclear.v1 import steps_pb2 as pb

RETRY_SECONDS = 1.0
"""Between two attempts to reach a server that is away."""


class StepReader:
    """The responses of WatchSteps in order. A context manager.

    `retries`: connect again, for ever, when the server is unavailable. Each attempt has a client of its own, because
    gRPC's channels wait longer and longer between attempts.
    """

    def __init__(self, connect: Callable[[], Client], *, retries: bool = False, **watch: Any) -> None:
        self._connect, self._retries, self._watch = connect, retries, watch
        self._items: queue.SimpleQueue[pb.WatchStepsResponse | LineclearError | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._client: Client | None = None
        self.signals: list[int] = []
        """Signals that `on_signals` has received."""
        self.has_ended = False
        """The server has ended the stream."""
        threading.Thread(target=self._run, name="step reader", daemon=True).start()

    def __enter__(self) -> StepReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if (client := self._client) is not None:
            client.close()

    def get(self, timeout_seconds: float | None) -> pb.WatchStepsResponse | LineclearError | None:
        """Return the next response, or None after the time, after a signal and at the end of the stream.

        Raises the error that ended the stream. With retries, returns the error of an unavailable server instead.
        """
        with contextlib.suppress(queue.Empty):
            item = self._items.get(timeout=timeout_seconds)
            if isinstance(item, LineclearError) and not self._may_retry(item):
                raise item
            return item
        return None

    def responses(self, seconds: float | None) -> Iterator[pb.WatchStepsResponse]:
        """Yield each response until `seconds` have passed, a signal or the end of the stream, whose error is raised."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self.signals:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return
            item = self.get(left)
            if isinstance(item, pb.WatchStepsResponse):
                yield item
            elif self.has_ended:
                return

    @contextlib.contextmanager
    def on_signals(self, *and_wake: int) -> Iterator[list[int]]:
        """Record SIGINT and SIGTERM instead of an end in the middle of a write. They and `and_wake` end a wait."""

        def record(number: int, _: object) -> None:
            if number not in and_wake:
                self.signals.append(number)
            self._items.put(None)

        before = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM, *and_wake)}
        try:
            yield self.signals
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _may_retry(self, error: LineclearError) -> bool:
        return self._retries and error.code == "UNAVAILABLE"

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with self._connect() as self._client:
                    for response in AdminClient(self._client).watch_steps(**self._watch):
                        self._items.put(response)
            except LineclearError as error:
                if self._closed.is_set():
                    return
                self._items.put(error)
                if not self._may_retry(error):
                    return
            if not self._retries:
                self.has_ended = True
                self._items.put(None)
                return
            self._items.put(None)
            self._closed.wait(RETRY_SECONDS)
