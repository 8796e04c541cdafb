"""How many calls of Generate a client has open, and through what the next one goes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from lineclear.v1 import inference_pb2 as pb

from .channel import Pairs
from .retry import MAX_TIMEOUT_SECONDS, log

_REFUSED_SECONDS = 10.0
"""After a server refused a session, none is asked for again for this long at least."""

S = TypeVar("S", bound=Any)


class SessionMultiplexer(Generic[S]):
    """The open calls of one transport and the session they share; from any thread.

    `S` is a session: `is_over` and `is_closing` say that it takes no more requests, `refusal` that the server did not
    begin it, `is_missing` that it never begins one, and `begin` begins a request. `wanted` says whether there is to be
    one at all.
    """

    def __init__(
        self, wanted: bool, open_session: Callable[[Pairs], S], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_welcome = wanted  # the server has sessions, as far as we know, and we want them
        self._refused_until = -math.inf  # on `clock`: it had no room for one
        self._open_session = open_session
        self._clock = clock
        self._lock = threading.Lock()  # also for an event loop, which never waits for it
        self._session: S | None = None
        self._open = 0
        self._metadata: Pairs | None = None

    @property
    def session(self) -> S | None:
        """The last one that was opened."""
        with self._lock:
            return self._session

    def start(
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
            self._session = self._following(self._session, metadata)
        return self._session

    def _following(self, ended: S | None, metadata: Pairs) -> S | None:
        """Open the session after the one that `ended`, None where the server does not take one now."""
        if ended is not None and ended.refusal is not None:
            log.info("the server refused a session (%s); requests are calls of their own", ended.refusal.reason)
            self._is_welcome = not ended.is_missing
            pause_seconds = max(_REFUSED_SECONDS, min(ended.refusal.retry_after_seconds or 0.0, MAX_TIMEOUT_SECONDS))
            self._refused_until = self._clock() + pause_seconds
        elif ended is not None:
            log.info("a session has ended; another begins")
        return self._open_session(metadata) if self._is_welcome and self._clock() >= self._refused_until else None


class TrackedCall:
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
