"""The engine: a thread that runs the loop of core and workers, and the commands of other threads for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from lineclear.errors import LineclearError
from lineclear.process.exception_location import exception_fields
from lineclear.scheduler.core.prefix_keys import Prefix
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.engine.engine_loop import EngineLoop
from lineclear.scheduler.engine.engine_stats import EngineSnapshot, WorkerStatus
from lineclear.scheduler.observe.scheduler_state import TakenState, take_state
from lineclear.wire.messages import LogLevel, Profiled

log = structlog.get_logger()

_STOP_SECONDS = 10.0


class EngineStuck(Exception):
    """The engine's thread does not end. Only the end of the process ends it."""


class Engine:
    """Runs an `EngineLoop` on a thread. Requests, cancellations and the like come from any thread and never block."""

    def __init__(self, loop: EngineLoop) -> None:
        self.failure: BaseException | None = None
        """Why the thread died."""
        self._loop, self._core, self._subscribers = loop, loop.core, loop.subscribers
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread, which owns core and link from here on."""
        self._thread.start()

    def stop(self, timeout_seconds: float = _STOP_SECONDS) -> None:
        """End the thread. Live requests get no further events; the caller owns the link again.

        Raises EngineStuck if the thread does not end in time. It may still use the link then.
        """
        self._loop.is_stopped = True
        self._loop.link.wake()
        if self._thread.ident is None:
            return
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            self._loop.link.abandon()
            log.error("engine_not_stopped", busy_seconds=round(self.busy_seconds(), 1))
            raise EngineStuck(f"the engine did not stop within {timeout_seconds:g} s")

    def submit(self, request: Request, *siblings: Request) -> None:
        """Queue a request and its siblings, all or none. First event of each: Admitted, or Failed with the reason.

        `request_id` must not be in use: the Failed of a duplicate would look like that of the original.
        """
        requests = (request, *siblings)
        self._loop.inbox.submit(requests, partial(self._loop.submit, requests))

    def cancel(self, request_id: str, error: LineclearError | None = None) -> None:
        """End a live request with Failed(error or Cancelled)."""
        self._loop.inbox.add(partial(self._core.cancel, request_id, error))

    def finish(self, request_id: str, num_tokens: int) -> None:
        """Complete a live request after `num_tokens` output tokens: its text has a stop string there."""
        self._loop.inbox.add(partial(self._core.finish_at_stop_string, request_id, num_tokens))

    def prepare_grammar(self, grammar: str, done: Callable[[], None]) -> None:
        """Have each joined worker compile a grammar, then call `done()` on the engine's thread."""
        self._loop.inbox.add(partial(self._subscribers.grammars.prepare, grammar, done))

    def drain(self) -> None:
        """Refuse new requests from now on; live ones run to their end."""
        self._loop.inbox.add(self._core.drain)

    def release_worker(self) -> None:
        """Let a stopping worker exit at once: its further results are not needed."""
        self._loop.inbox.add(self._subscribers.stopping.release_all)

    def clear_prefix_cache(self) -> None:
        self._loop.inbox.add(self._core.clear_prefix_cache)

    def prefixes(self, cache_salt: bytes) -> Future[tuple[bytes, list[Prefix]]]:
        """Return the start of a salt's chains, and the cached blocks of prompts of all workers and salts."""
        found: Future[tuple[bytes, list[Prefix]]] = Future()
        self.call_on_engine_thread(lambda: found.set_result(self._core.prefixes(cache_salt)))
        return found

    def load_adapter(self, key: bytes, path: str) -> Future[None]:
        """Load an adapter on every joined worker. The future raises AdapterRefused or AdapterLimitReached."""
        done: Future[None] = Future()
        self._loop.inbox.add(partial(self._subscribers.adapters.load, key, path, done))
        return done

    def unload_adapter(self, key: bytes) -> Future[int]:
        """Take no further requests for an adapter. The future has the number of those that use it."""
        done: Future[int] = Future()
        self._loop.inbox.add(partial(self._subscribers.adapters.unload, key, done))
        return done

    def switch(self, **changes: Any) -> None:
        """Replace fields of the core's limits before the next plan."""
        self._loop.inbox.add(lambda now: self._core.switch(replace(self._core.limits, **changes), now))

    def set_log_level(self, level: str) -> None:
        """Have each worker log from `level` upwards, also those that join later."""
        self._loop.inbox.add(partial(self._subscribers.log_levels.set, LogLevel[level.upper()]))

    def profile(self, num_steps: int, worker: int, done: Future[Profiled]) -> None:
        """Have a worker record its next steps; `done` gets its answer, or the problem. With 0 steps it answers now."""
        self._loop.inbox.add(partial(self._subscribers.profiles.ask, num_steps, worker, done))

    def worker_exited(self, pid: int, exit_code: int | None = None) -> None:
        """Handle the exit of a process. The requests of a joined worker continue on the others, or on the next one.

        `exit_code` is negative for a signal, None if unknown.
        """
        self._loop.inbox.add(partial(self._loop.worker_exited, pid, exit_code))

    def call_on_engine_thread(self, call: Callable[[], object]) -> None:
        """Call `call()` on the engine's thread, between two changes of the core. It must not raise or block."""

        def command(now: float) -> None:
            call()

        self._loop.inbox.add(command)

    def snapshot(self) -> EngineSnapshot:
        """Return counters and gauges of at most 50 ms ago. Never waits for the engine."""
        return self._loop.snapshot

    def fresh_snapshot(self) -> Future[EngineSnapshot]:
        """Return counters and gauges that include every event published before this call."""
        taken: Future[EngineSnapshot] = Future()

        def command(now: float) -> None:
            self._loop.take_snapshot(now)
            if taken.set_running_or_notify_cancel():
                taken.set_result(self._loop.snapshot)

        self._loop.inbox.add(command)
        return taken

    def busy_seconds(self) -> float:
        """Return how long the current iteration has taken; 0 while the engine waits. Any thread."""
        started_at = self._loop.iteration_started_at
        return 0.0 if started_at is None else self._loop.clock() - started_at

    @property
    def worker_status(self) -> WorkerStatus:
        """Which workers are joined, at this moment."""
        return self._loop.workers.status

    def take_state(self) -> TakenState:
        """Return the state of the scheduler now. On the engine's thread: see `call_on_engine_thread`."""
        loop = self._loop
        num_wanted = len(loop.pool.wanted())
        return take_state(loop.core.state, loop.steps.worker_indices, loop.clock(), num_wanted)

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:
            self.failure = error
            self._loop.callbacks.on_fatal(error)  # first, because the next calls may fail too
            self._loop.callbacks.on_anomaly(f"the engine died: {type(error).__name__}")
            log.error("engine_died", **exception_fields(error))
