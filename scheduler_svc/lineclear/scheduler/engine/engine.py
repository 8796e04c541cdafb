"""The engine thread: owns the core and carries requests in, plans out, results in and events out.

The core decides what runs, `WorkerRegistry` which workers may join, `WorkerSession` when one is lost, and
`WorkerChanges` carries that out. `WorkerLink` sends and receives, the supervisor starts and kills processes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from lineclear.errors import LineclearError
from lineclear.process.exception_location import exception_fields
from lineclear.scheduler.core.events import Event
from lineclear.scheduler.core.inflight_step import BadResult
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.engine.adapter_loads import AdapterLoads
from lineclear.scheduler.engine.command_inbox import CommandInbox, refusal
from lineclear.scheduler.engine.engine_stats import (
    MAX_STEP_TIMES,
    EngineCounters,
    EngineSnapshot,
    WorkerStatus,
)
from lineclear.scheduler.engine.invariant_checks import InvariantChecks
from lineclear.scheduler.engine.supervisor_interface import Supervisor
from lineclear.scheduler.engine.worker_changes import WorkerChanges
from lineclear.scheduler.engine.worker_link import WorkerGone, WorkerLink
from lineclear.scheduler.engine.worker_process import loss_by_exit
from lineclear.scheduler.engine.worker_registry import WorkerRegistry
from lineclear.scheduler.engine.worker_session import WorkerSession
from lineclear.scheduler.engine.worker_timeouts import WorkerTimeouts
from lineclear.scheduler.observe.scheduler_state import TakenState, take_state
from lineclear.scheduler.observe.step_history import StepHistory
from lineclear.wire.messages import Hello, LogLevel, StepPlan, StepResult

log = structlog.get_logger()

_SNAPSHOT_SECONDS = 0.05
_SUSPENDED_SECONDS = 1.0
_STOP_SECONDS = 10.0


class EngineStuck(Exception):
    """The engine's thread does not end. Only the end of the process ends it."""


class Engine:
    """Runs a core over a link. Requests, cancellations and the like come from any thread and never block.

    `publish(events)` receives events in order and must not block; the plans of the same iteration are sent before.
    A worker whose Hello has another `text_fingerprint` is rejected, and passed to `on_rejected`; empty: not compared.
    The core's invariants are checked as `InvariantChecks` says, with `check_every_steps`. A violation ends the thread,
    because the core's next decision could be wrong.
    `step_history` gets every executed step.
    `on_adapter_failed(key, problem)` is called when a worker that joins cannot load an adapter.
    `on_anomaly(what)` is called when a worker is lost, a step is far too slow or the thread dies.
    `on_fatal(error)` is called when the thread dies; nothing is published after it, so the server must end.
    All callbacks run on the engine's thread.
    """

    def __init__(
        self,
        core: Scheduler,
        link: WorkerLink,
        publish: Callable[[Sequence[Event]], None],
        supervisor: Supervisor,
        clock: Callable[[], float] = time.monotonic,
        *,
        timeouts: WorkerTimeouts | None = None,
        text_fingerprint: str = "",
        max_workers: int = 64,
        max_inbox: int = 4096,
        check_every_steps: int = 64,
        step_history: StepHistory | None = None,
        on_rejected: Callable[[Hello], None] = lambda hello: None,
        on_adapter_failed: Callable[[bytes, str], object] = lambda key, problem: None,
        on_anomaly: Callable[[str], object] = lambda what: None,
        on_fatal: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.failure: BaseException | None = None
        """Why the thread died."""
        self._core = core
        self._link = link
        self._publish = publish
        self._clock = clock
        self._workers = WorkerRegistry(
            timeouts or WorkerTimeouts(),
            self._predicted_seconds,
            max_workers=max_workers,
            text_fingerprint=text_fingerprint,
            number_of=supervisor.number_of,
        )
        self._supervisor = supervisor
        self._on_anomaly, self._on_fatal = on_anomaly, on_fatal
        self._steps = step_history or StepHistory()
        self._adapters = AdapterLoads(core, link, on_adapter_failed)
        parts = core, link, self._workers, self._adapters, supervisor, self._steps
        self._changes = WorkerChanges(*parts, on_rejected, on_anomaly)
        self._inbox = CommandInbox(max_inbox, link.wake)
        self._step_seconds: deque[tuple[int, float]] = deque(maxlen=MAX_STEP_TIMES)
        self._counters = EngineCounters()
        self._checks = InvariantChecks(core, check_every_steps, self._counters, clock)
        self._next_wakeup = math.inf  # latest time at which wait() was to return
        self._snapshot = EngineSnapshot(core.snapshot())
        self._snapshot_at = -math.inf
        self._is_snapshot_current = True
        self._iteration_started_at: float | None = None  # None while waiting
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- from any thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which owns core and link from here on."""
        self._thread.start()

    def stop(self, timeout_seconds: float = _STOP_SECONDS) -> None:
        """End the thread. Live requests get no further events; the caller owns the link again.

        Raises EngineStuck if the thread does not end in time. It may still use the link then.
        """
        self._stopped = True
        self._link.wake()
        if self._thread.ident is None:
            return
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            self._link.abandon()
            log.error("engine_not_stopped", busy_seconds=round(self.busy_seconds(), 1))
            raise EngineStuck(f"the engine did not stop within {timeout_seconds:g} s")

    def submit(self, request: Request, *siblings: Request) -> None:
        """Queue a request and its siblings, all or none. First event of each: Admitted, or Failed with the reason.

        `request_id` must not be in use: the Failed of a duplicate would look like that of the original.
        """
        requests = (request, *siblings)
        self._inbox.submit(requests, partial(self._submit, requests))

    def cancel(self, request_id: str, error: LineclearError | None = None) -> None:
        """End a live request with Failed(error or Cancelled)."""
        self._inbox.add(partial(self._core.cancel, request_id, error))

    def finish(self, request_id: str, num_tokens: int) -> None:
        """Complete a live request after `num_tokens` output tokens: its text has a stop string there."""
        self._inbox.add(partial(self._core.finish_at_stop_string, request_id, num_tokens))

    def prepare_grammar(self, grammar: str, done: Callable[[], None]) -> None:
        """Have each joined worker compile a grammar, then call `done()` on the engine's thread."""
        self._inbox.add(partial(self._changes.prepare_grammar, grammar, done))

    def drain(self) -> None:
        """Refuse new requests from now on; live ones run to their end."""
        self._inbox.add(self._changes.drain)

    def release_worker(self) -> None:
        """Let a stopping worker exit at once: its further results are not needed."""
        self._inbox.add(self._changes.release)

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache of each worker."""
        self._inbox.add(lambda now: self._core.clear_prefix_cache())

    def load_adapter(self, key: bytes, path: str) -> Future[None]:
        """Load an adapter on every joined worker. The future raises AdapterRefused or AdapterLimitReached."""
        done: Future[None] = Future()
        self._inbox.add(lambda now: self._adapters.load(key, path, done, self._workers.joined_epochs, now))
        return done

    def unload_adapter(self, key: bytes) -> Future[int]:
        """Take no further requests for an adapter. The future has the number of those that use it."""
        done: Future[int] = Future()
        self._inbox.add(lambda now: self._adapters.unload(key, done, self._workers.joined_epochs, now))
        return done

    def switch(self, **changes: Any) -> None:
        """Replace fields of the core's limits before the next plan."""
        self._inbox.add(lambda now: self._core.switch(replace(self._core.limits, **changes), now))

    def set_log_level(self, level: str) -> None:
        """Have each worker log from `level` upwards, also those that join later."""
        self._inbox.add(partial(self._changes.set_log_level, LogLevel[level.upper()]))

    def worker_exited(self, pid: int, exit_code: int | None = None) -> None:
        """Handle the exit of a process. The requests of a joined worker continue on the others, or on the next one.

        `exit_code` is negative for a signal, None if unknown.
        """
        self._inbox.add(partial(self._worker_exited, pid, exit_code))

    def call_on_engine_thread(self, call: Callable[[], object]) -> None:
        """Call `call()` on the engine's thread, between two changes of the core. It must not raise or block."""

        def command(now: float) -> None:
            call()

        self._inbox.add(command)

    def snapshot(self) -> EngineSnapshot:
        """Return counters and gauges of at most 50 ms ago. Never waits for the engine."""
        return self._snapshot

    def fresh_snapshot(self) -> Future[EngineSnapshot]:
        """Return counters and gauges that include every event published before this call."""
        taken: Future[EngineSnapshot] = Future()

        def command(now: float) -> None:
            self._take_snapshot(now)
            if taken.set_running_or_notify_cancel():
                taken.set_result(self._snapshot)

        self._inbox.add(command)
        return taken

    def busy_seconds(self) -> float:
        """Return how long the current iteration has taken; 0 while the engine waits. Any thread."""
        started_at = self._iteration_started_at
        return 0.0 if started_at is None else self._clock() - started_at

    @property
    def worker_status(self) -> WorkerStatus:
        """Which workers are joined, at this moment."""
        return self._workers.status

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._run_once()
        except BaseException as error:
            self.failure = error
            self._on_fatal(error)  # first, because the next calls may fail too
            self._on_anomaly(f"the engine died: {type(error).__name__}")
            log.error("engine_died", **exception_fields(error))

    def _run_once(self) -> None:
        now = self._iteration_started_at = self._clock()
        self._counters.iterations += 1
        self._is_snapshot_current = False
        if now > self._next_wakeup + _SUSPENDED_SECONDS:
            # Messages that the worker sent in the meantime are still to be received.
            log.warning("process_was_suspended", seconds=round(now - self._next_wakeup, 3))
            self._workers.extend_deadlines(now)
        self._next_wakeup = math.inf
        events = self._inbox.run(now, self._snapshot.core.predicted_wait_seconds)
        for fact in self._link.receive(self._workers, now):
            if isinstance(fact, StepResult):
                self._apply(fact, events, now)
            else:
                self._changes.handle(fact, events, now)
        self._check_workers(events, now)
        events += self._core.expire(now)
        self._changes.send_log_level()
        self._adapters.drop_unused(self._workers.joined_epochs)
        self._changes.check_grammars()
        if self._workers.has_stopping:  # before the plans, so that its requests continue in this iteration
            self._changes.release_stopping(events, now)
        self._steps.request_events(events)
        num_noted = len(events)
        self._send_plans(events, now)
        if len(events) > num_noted:
            self._steps.request_events(events[num_noted:])
        if events:
            begin = time.perf_counter()
            self._publish(events)
            self._counters.publish_seconds += time.perf_counter() - begin
        # After the plans and events of this iteration are sent.
        self._checks.check_if_due(now, is_idle=self._workers.is_idle)
        if now >= self._snapshot_at + _SNAPSHOT_SECONDS:
            self._take_snapshot(now)
        if not self._inbox and not self._stopped:
            deadline = self._core.next_deadline(self._workers.joined_epochs - self._adapters.joining)
            self._next_wakeup = min(
                self._workers.next_check(now),
                math.inf if deadline is None else deadline,
                self._checks.next_check() if self._workers.is_idle else math.inf,
                math.inf if self._is_snapshot_current else self._snapshot_at + _SNAPSHOT_SECONDS,
            )
            self._iteration_started_at = None
            self._link.wait(self._next_wakeup)

    # --- commands ---------------------------------------------------------------------------------------------------

    def _submit(self, requests: Sequence[Request], now: float) -> list[Event]:
        events: list[Event] = []
        try:
            for request in requests:  # what the core accepts of the first, it accepts of its siblings
                events += self._core.submit(request, now)
        except LineclearError as error:
            events += [refusal(request, error, now) for request in requests[len(events) :]]
        return events

    def _worker_exited(self, pid: int, exit_code: int | None, now: float) -> list[Event]:
        events: list[Event] = []
        self._changes.carry_out(self._workers.on_process_exit(pid, loss_by_exit(exit_code), now), events, now)
        return events

    # --- plans and results ------------------------------------------------------------------------------------------

    def _send_plans(self, events: list[Event], now: float) -> None:
        """Send each joined worker one plan after the other, in turns, until none can run more."""
        begin = time.perf_counter()
        encode_before = self._link.counters.encode_seconds
        workers = self._workers.joined
        if len(workers) == 1:
            while self._send_plan(workers[0], events, now):
                pass
        elif workers:
            self._send_plans_in_turns(workers, events, now)
        events += self._core.drain_events()
        encode_seconds = self._link.counters.encode_seconds - encode_before
        self._counters.plan_seconds += time.perf_counter() - begin - encode_seconds

    def _send_plans_in_turns(self, workers: Sequence[WorkerSession], events: list[Event], now: float) -> None:
        first = self._counters.iterations % len(workers)  # each iteration another worker is first to admit requests
        workers = [*workers[first:], *workers[:first]]
        # A plan of one worker may let another one run more: a preemption gives the other a request that waits.
        while sum(self._send_plan(worker, events, now) for worker in workers if worker.is_joined):
            pass  # a worker that its plan could not be sent to is no longer joined

    def _send_plan(self, worker: WorkerSession, events: list[Event], now: float) -> bool:
        """Send a worker its next plan; return False if it gets no further one now."""
        if worker.epoch in self._adapters.joining:
            return False  # it still loads adapters
        plan = self._core.plan(worker.epoch, now)
        if plan is None:
            return False
        try:
            self._link.send(plan)
        except WorkerGone:
            self._changes.carry_out(self._workers.on_unsent_plan(worker, now), events, now)
            return False
        worker.plan_sent(plan, now)
        self._note_plan(plan, events, now)
        return True

    def _note_plan(self, plan: StepPlan, events: list[Event], now: float) -> None:
        planning = self._core.drain_events()
        events += planning
        self._steps.planned(plan, self._core.state, planning, now)

    def _apply(self, result: StepResult, events: list[Event], now: float) -> None:
        worker = self._workers[result.epoch]
        begin = time.perf_counter()
        try:
            found = self._core.apply(result, now)
        except BadResult as error:
            self._changes.carry_out(self._workers.on_bad_result(worker, str(error), now), events, now)
            return
        events += found
        self._counters.apply_seconds += time.perf_counter() - begin
        self._checks.result_applied()
        is_slow = worker.result_applied(result, now)
        self._steps.executed(result, self._core.state, found, now)
        self._changes.report_progress(worker, now)
        if is_slow:
            self._on_anomaly(f"step {result.step} was slow")
        self._step_seconds.append((result.epoch, result.step_seconds))

    # --- workers ----------------------------------------------------------------------------------------------------

    def _check_workers(self, events: list[Event], now: float) -> None:
        self._changes.carry_out(self._workers.check(now), events, now)
        for worker in self._workers.joined:
            self._changes.report_progress(worker, now)

    def take_state(self) -> TakenState:
        """Return the state of the scheduler now. On the engine's thread: see `call_on_engine_thread`."""
        return take_state(self._core.state, self._steps.worker_indices, self._clock(), self._supervisor.num_wanted)

    # --- statistics -------------------------------------------------------------------------------------------------

    def _predicted_seconds(self, epoch: int, num_tokens: int) -> float:
        return self._snapshot.predicted_seconds(epoch, num_tokens)

    def _take_snapshot(self, now: float) -> None:
        self._snapshot_at, self._is_snapshot_current = now, True
        self._snapshot = EngineSnapshot(
            core=self._core.snapshot(now),
            worker=self._workers.status,
            workers=self._workers.figures(now),
            step_seconds=tuple(self._step_seconds),
            counters=copy(self._counters),
            link=copy(self._link.counters),
            membership=copy(self._workers.counters),
        )
