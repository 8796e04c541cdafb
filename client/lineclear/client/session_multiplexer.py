"""Choose between a direct call and the shared Session for each request of a client."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from lineclear.v1 import inference_pb2 as pb

from .channel import Pairs
from .requests import TENANT_KEY
from .retry import MAX_TIMEOUT_SECONDS, log

_MIN_REFUSAL_SECONDS = 10.0
"""Shortest time for which requests are direct calls after the server refused a Session."""

S = TypeVar("S", bound=Any)


class SessionMultiplexer(Generic[S]):
    """The open calls of one transport and the Session they share. Safe from any thread, and from an event loop.

    `S` has the attributes and the `start` of `_async.session.AsyncSession`. `shares` False makes every call direct.
    """

    def __init__(
        self, shares: bool, open_session: Callable[[Pairs], S], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shares = shares
        self._refused_until = -math.inf  # on `clock`
        self._open_session = open_session
        self._clock = clock
        self._lock = threading.Lock()
        self._session: S | None = None
        self._num_open = 0
        self._metadata: Pairs | None = None

    @property
    def session(self) -> S | None:
        """The Session opened last."""
        with self._lock:
            return self._session

    def start(
        self,
        request: pb.GenerateRequest,
        timeout_seconds: float | None,
        metadata: Pairs,
        make_direct_call: Callable[[], Any],
    ) -> Any:
        """Start a call, through the Session or by `make_direct_call`. It counts as open until `on_end`."""
        tenant = next((str(value) for key, value in metadata if key == TENANT_KEY), "")
        try:
            with self._lock:
                session = self._choose(tuple(pair for pair in metadata if pair[0] != TENANT_KEY))
            if session is None:
                return make_direct_call()
            return session.start(request, timeout_seconds, make_direct_call, tenant)
        except BaseException:
            self.on_end()
            raise

    def on_end(self) -> None:
        """Decrement the number of open calls."""
        with self._lock:
            self._num_open -= 1

    def _choose(self, metadata: Pairs) -> S | None:
        """Count one more open call and return the Session for it, None for a direct call.

        The only open call is a direct one. A Session has the metadata of one caller: that of the first call which
        shares, without its tenant, which each request names. Calls with other metadata are direct.
        """
        self._num_open += 1
        if self._num_open == 1 or not self._shares:
            return None
        if self._metadata is None:
            self._metadata = metadata
        if metadata != self._metadata:
            return None
        if self._session is None or self._session.is_over or self._session.is_closing:
            self._session = self._replace(self._session, metadata)
        return self._session

    def _replace(self, ended: S | None, metadata: Pairs) -> S | None:
        """Open a Session in the place of `ended`, None while the server has no room for one."""
        if ended is not None and ended.refusal is not None:
            refusal = ended.refusal
            log.info("the server refused a session (%s); requests are calls of their own", refusal.reason)
            pause_seconds = min(refusal.retry_after_seconds or 0.0, MAX_TIMEOUT_SECONDS)
            self._refused_until = self._clock() + max(_MIN_REFUSAL_SECONDS, pause_seconds)
        elif ended is not None:
            log.info("a session has ended; another is opened")
        return self._open_session(metadata) if self._clock() >= self._refused_until else None
