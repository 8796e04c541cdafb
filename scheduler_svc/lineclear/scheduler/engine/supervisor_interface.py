"""The owner of the worker processes, as the engine uses it."""

from __future__ import annotations

from typing import Protocol

from lineclear.wire.messages import Hello


class Supervisor(Protocol):
    """Owner of the worker processes, as the engine uses it: on its thread, without blocking."""

    @property
    def num_wanted(self) -> int:
        """Workers that it keeps running, those that it has given up included; 0 if another program starts them."""
        ...

    def number_of(self, hello: Hello) -> int | None:
        """Return the number of the worker in the log; None if another program has started it."""
        ...

    def worker_joined(self, hello: Hello) -> None:
        """A worker has joined."""

    def worker_broken(self, hello: Hello, reason: str) -> bool:
        """Kill this worker; return whether that is being done. Its process may not join again then."""
        ...

    def worker_waits(self, hello: Hello) -> None:
        """A worker waits until those of another model have left."""

    def worker_progressed(self, hello: Hello) -> None:
        """A worker has made progress, in the sense of `crash_budget`. Once for each join."""

    def crashes_explained(self) -> None:
        """The last crashes were the fault of a request, which has failed now."""
