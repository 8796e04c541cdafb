"""Commands of other threads for the engine: bounded for requests, never blocking."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from lineclear.errors import LineclearError
from lineclear.scheduler.core.events import Event, Failed, RequestStats
from lineclear.scheduler.core.limits import queue_full
from lineclear.scheduler.core.sequence import Request

_MAX_COMMANDS_PER_ITERATION = 64  # a burst of requests does not delay the results of running ones


class CommandInbox:
    """A queue of calls. Any thread adds, the engine's thread runs them.

    `wake()` is called for the first addition after `run` has begun. A request is refused while `max_commands` are
    unread.
    """

    def __init__(self, max_commands: int, wake: Callable[[], None]) -> None:
        self._max_commands = max_commands
        self._wake = wake
        self._commands: deque[Callable[[float], list[Event] | None]] = deque()
        self._refused: deque[Request] = deque()
        self._is_woken = False

    def __bool__(self) -> bool:
        """Whether commands are unread."""
        return bool(self._commands)

    def add(self, command: Callable[[float], list[Event] | None]) -> None:
        """Add a call. Not bounded: each admitted request adds only a few of these."""
        self._commands.append(command)
        self._wake_once()

    def submit(self, requests: Iterable[Request], command: Callable[[float], list[Event]]) -> None:
        """Add the call that submits the requests, or refuse all of them."""
        if len(self._commands) < self._max_commands:
            self._commands.append(command)
        else:
            self._refused.extend(requests)
        self._wake_once()

    def _wake_once(self) -> None:
        # A wake is a system call, which releases the interpreter lock. `run` clears the flag before it looks for
        # commands, and this thread has added one before it reads the flag: none is left behind.
        if not self._is_woken:
            self._is_woken = True
            self._wake()

    def run(self, now: float, predicted_wait: float | None = None) -> list[Event]:
        """Run the next commands and return all events. A refusal has the `predicted_wait` of the queue."""
        self._is_woken = False
        events: list[Event] = []
        for _ in range(min(len(self._commands), _MAX_COMMANDS_PER_ITERATION)):
            events += self._commands.popleft()(now) or ()
        while self._refused:
            limit = self._max_commands
            error = queue_full(f"{limit} commands are unread", limit, {"limit": limit}, predicted_wait)
            events.append(refusal(self._refused.popleft(), error, now))
        return events


def refusal(request: Request, error: LineclearError, now: float) -> Failed:
    """Return the only event of a request that was not admitted."""
    return Failed(request.request_id, error, RequestStats(now, len(request.prompt), ended_at=now))
