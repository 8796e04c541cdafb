"""Read WatchSteps in a thread, so that a command can also wait for time, Ctrl-C and the size of the terminal."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from lineclear.client import AdminClient, Client, WatchedSteps
from lineclear.errors import LineclearError

RETRY_SECONDS = 1.0
"""Between two attempts to reach a server that is away."""


class StepFeed:
    """The responses of WatchSteps in order. Close it, or use it as a context manager.

    `retries`: connect again, for ever, when the server is unavailable. Each attempt has a client of its own, because
    gRPC's channels wait longer and longer between attempts.
    """

    def __init__(self, connect: Callable[[], Client], *, retries: bool, **watch: Any) -> None:
        self._connect, self._retries, self._watch = connect, retries, watch
        self._items: queue.SimpleQueue[WatchedSteps | LineclearError | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._client: Client | None = None
        self._thread = threading.Thread(target=self._run, name="step feed", daemon=True)
        self._thread.start()

    def __enter__(self) -> StepFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the call."""
        self._closed.set()
        if (client := self._client) is not None:
            client.close()

    def wake(self) -> None:
        """End a wait in `get`, from a signal handler as well."""
        self._items.put(None)

    def get(self, timeout_seconds: float | None) -> WatchedSteps | LineclearError | None:
        """Return the next response, or None after the time, after `wake` and at the end of the stream.

        Raises the error that ended the stream. With retries, returns the error of an unavailable server instead.
        """
        with contextlib.suppress(queue.Empty):
            item = self._items.get(timeout=timeout_seconds)
            if isinstance(item, LineclearError) and not self._may_retry(item):
                raise item
            return item
        return None

    @property
    def is_at_end(self) -> bool:
        """Whether the server has ended the stream and all responses were returned."""
        return not self._thread.is_alive() and self._items.empty()

    def _may_retry(self, error: LineclearError) -> bool:
        return self._retries and error.code == "UNAVAILABLE"

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with self._connect() as self._client:
                    for watched in AdminClient(self._client).watch_steps(**self._watch):
                        self._items.put(watched)
            except LineclearError as error:
                if self._closed.is_set():
                    return
                self._items.put(error)
                if not self._may_retry(error):
                    return
            self._items.put(None)
            if not self._retries:
                return
            self._closed.wait(RETRY_SECONDS)
