"""How many calls of Generate a client has open, and through what the next one goes. Decides, and opens nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .channels import Pairs

S = TypeVar("S", bound=Any)


class Crowd(Generic[S]):
    """The open calls of one transport and the session they share. A caller with threads holds a lock around each call.

    `S` is a session: `is_over` says that it takes no more requests, `is_missing` that the server has none.
    """

    def __init__(self, wanted: bool) -> None:
        self.session: S | None = None
        self._is_welcome = wanted  # the server has sessions, as far as we know, and we want them
        self._open = 0
        self._metadata: Pairs | None = None

    def enter(self, metadata: Pairs, open_session: Callable[[Pairs], S]) -> S | None:
        """One more call: the session it goes through, or None where it is a call of its own.

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
        if self.session is None or self.session.is_over:
            self._is_welcome = self.session is None or not self.session.is_missing
            self.session = open_session(metadata) if self._is_welcome else None
        return self.session

    def leave(self) -> None:
        """One less."""
        self._open -= 1


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
