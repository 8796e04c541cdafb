"""Sends adapters to the workers and collects their answers. All methods run on the engine's thread.

A load succeeds when every joined worker has answered. A worker that joins gets all adapters first, and no plan before
it has answered for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog

from lineclear.errors import AdapterNotFound, AdapterRefused, LineclearError
from lineclear.scheduler.core.events import Event
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.engine.worker_link import WorkerLink
from lineclear.scheduler.engine.worker_registry import WorkerRegistry
from lineclear.scheduler.engine.worker_session import Joined, Lost
from lineclear.wire.messages import AdapterLoaded, LoadAdapter, UnloadAdapter

log = structlog.get_logger()

_MAX_UNANSWERED = 4
"""Adapters that a worker loads at a time. Its socket has space for few messages, and a message it refuses is lost."""


@dataclass(slots=True)
class _Held:
    """An adapter that the workers hold or load."""

    index: int
    path: str
    waits: list[Future[None]] = field(default_factory=list)  # callers of `load`


class AdapterLoads:
    """The adapters of all workers. `on_failed(key, problem)` is called when a worker that joins cannot load one."""

    def __init__(
        self, core: Scheduler, link: WorkerLink, workers: WorkerRegistry, on_failed: Callable[[bytes, str], object]
    ) -> None:
        self._core, self._link, self._workers, self._on_failed = core, link, workers, on_failed
        self._held: dict[bytes, _Held] = {}
        self.unloading: dict[bytes, _Held] = {}
        """Unloaded adapters by key, until the last request of each has ended. See `drop_unused`."""
        self._pending: dict[int, set[bytes]] = {}  # by epoch: adapters without an answer
        self._unsent: dict[int, deque[bytes]] = {}  # by epoch: those of them that are not sent yet
        self.joining: set[int] = set()
        """Epochs of workers that get no plan yet."""

    def load(self, key: bytes, path: str, done: Future[None], now: float) -> None:
        """Load an adapter on the joined workers; `done` gets the outcome."""
        self.drop_unused(now)
        try:
            index = self._core.load_adapter(key, now)
        except LineclearError as error:
            done.set_exception(error)
            return
        held = self._held.setdefault(key, _Held(index, path))
        self.unloading.pop(key, None)
        held.waits.append(done)
        for epoch in self._workers.joined_epochs:
            self._send(epoch, key)
        self._complete(key)

    def unload(self, key: bytes, done: Future[int], now: float) -> None:
        """Take no further requests for an adapter; `done` gets the number of those that still use it."""
        if key in self._held:
            self.unloading[key] = self._held.pop(key)
        done.set_result(self._core.unload_adapter(key, now))

    def drop_unused(self, now: float) -> None:
        """Have the workers drop unloaded adapters whose last request has ended."""
        used = self._core.adapters
        for key in [key for key in self.unloading if key not in used]:
            index = self.unloading.pop(key).index
            for epoch in self._workers.joined_epochs:
                self._link.send_control(UnloadAdapter(epoch, index))

    def worker_joined(self, joined: Joined, now: float) -> None:
        """Send all adapters to a worker, also unloaded ones: their requests may continue on it."""
        epoch = joined.hello.epoch
        self._pending[epoch], self._unsent[epoch] = set(), deque()
        for key in self._core.adapters:
            self._send(epoch, key)
        if self._pending[epoch]:
            self.joining.add(epoch)

    def worker_lost(self, lost: Lost, now: float) -> None:
        """Wait no longer for the answers of a worker."""
        epoch = lost.hello.epoch
        self.joining.discard(epoch)
        self._unsent.pop(epoch, None)
        for key in self._pending.pop(epoch, set()):
            self._complete(key)

    def answered(self, message: AdapterLoaded, now: float) -> list[Event]:
        """Handle the answer of a worker; return the ends of requests whose adapter it cannot load."""
        pending = self._pending.get(message.epoch, set())
        held = self._held.get(message.key) or self.unloading.get(message.key)
        if message.key not in pending:
            return []
        pending.discard(message.key)
        self._send_next(message.epoch)
        if not pending:
            self.joining.discard(message.epoch)
        if held is None or not message.problem:
            self._complete(message.key)
            return []
        return self._fail(message.key, held, message.problem, now)

    def _fail(self, key: bytes, held: _Held, problem: str, now: float) -> list[Event]:
        log.error("adapter_refused", index=held.index, key=key.hex()[:16], problem=problem)
        self.unloading[key] = self._held.pop(key, held)
        for epoch, pending in self._pending.items():
            pending.discard(key)
            self._unsent[epoch] = deque(other for other in self._unsent[epoch] if other != key)
        self.joining.intersection_update([epoch for epoch in self.joining if self._pending[epoch]])
        self._core.unload_adapter(key, now)
        events: list[Event] = []
        error = AdapterNotFound(f"a worker cannot load the adapter: {problem}")
        for request_id in self._core.requests_with_adapter(key):
            events += self._core.cancel(request_id, error, now)
        if not held.waits:
            self._on_failed(key, problem)
        while held.waits:
            held.waits.pop().set_exception(AdapterRefused(f"the adapter cannot be loaded: {problem}"))
        return events

    def _send(self, epoch: int, key: bytes) -> None:
        self._pending.setdefault(epoch, set()).add(key)
        self._unsent.setdefault(epoch, deque()).append(key)
        self._send_next(epoch)

    def _send_next(self, epoch: int) -> None:
        """Send as many adapters as the worker may load at a time. One that cannot be sent has no worker to load it."""
        pending, unsent = self._pending[epoch], self._unsent[epoch]
        while unsent and len(pending) - len(unsent) < _MAX_UNANSWERED:
            key = unsent.popleft()
            held = self._held.get(key) or self.unloading.get(key)
            if held is None or not self._link.send_control(LoadAdapter(epoch, held.index, key, held.path)):
                pending.discard(key)
                self._complete(key)

    def _complete(self, key: bytes) -> None:
        """Answer the callers of `load` once no worker still loads the adapter."""
        held = self._held.get(key)
        if held is None or not held.waits or any(key in pending for pending in self._pending.values()):
            return
        for done in held.waits:
            done.set_result(None)
        held.waits = []
