"""How many calls of Generate a client has open, and through what the next one goes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from lineclear.v1 import inference_pb2 as pb

from .channels import Pairs
from .retries import log

S = TypeVar("S", bound=Any)


class Crowd(Generic[S]):
    """The open calls of one transport and the session they share; from any thread.

    `S` is a session: `is_over` and `is_closing` say that it takes no more requests, `is_missing` that the server has
    none, and `begin` begins one. `wanted` says whether there is to be one at all.
    """

    def __init__(self, wanted: bool, open_session: Callable[[Pairs], S]) -> None:
        self._is_welcome = wanted  # the server has sessions, as far as we know, and we want them
        self._open_session = open_session
        self._lock = threading.Lock()  # also for an event loop, which never waits for it
        self._session: S | None = None
        self._open = 0
        self._metadata: Pairs | None = None

    @property
    def session(self) -> S | None:
        """The last one that was opened."""
        with self._lock:
            return self._session

    def begin(
        self,
        request: pb.GenerateRequest,
        timeout_seconds: float | None,
        metadata: Pairs,
        alone: Callable[[float | None], Any],
    ) -> Any:
        """One more call, until `leave`: through the session, or of its own, which `alone(seconds left)` makes."""
        try:
            with self._lock:
                session = self._enter(metadata)
            return alone(timeout_seconds) if session is None else session.begin(request, timeout_seconds, alone)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """One less."""
        with self._lock:
            self._open -= 1

    def _enter(self, metadata: Pairs) -> S | None:
        """What one more call goes through, or None where it is a call of its own.

        A call that is alone is one of its own. A session has one caller, whose metadata is that of the first call that
        came here so; what others say is said by calls of their own.
        """
        self._open += 1
        if self._open == 1 or not self._is_welcome:
            return None
        if self._metadata is None:
            self._metadata = metadata
        if metadata != self._metadata:
            return None
        if self._session is None or self._session.is_over or self._session.is_closing:
            if self._session is not None:
                log.info("a session has ended%s", "" if self._session.is_missing else "; another begins")
            self._is_welcome = self._session is None or not self._session.is_missing
            self._session = self._open_session(metadata) if self._is_welcome else None
        return self._session


class Counted:
    """A call that is one of the crowd until it is over: what a counted call of either kind begins as."""

    def __init__(self, call: Any, on_end: Callable[[], None]) -> None:
        self._call = call
        self._on_end: Callable[[], None] | None = on_end

    def cancel(self) -> None:
        self._call.cancel()
        self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
