"""One iteration of the engine: carries commands of other threads in, plans out, results in and events out.

The core decides what runs, `WorkerRegistry` which workers may join, and `WorkerSession` when one is lost. Subscribers
follow these changes. `WorkerLink` sends and receives, the worker pool starts and kills processes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field

import structlog

from lineclear.errors import LineclearError
from lineclear.scheduler.core import invariants
from lineclear.scheduler.core.events import Event, Failed, RequestStats
from lineclear.scheduler.core.inflight_step import BadResult
from lineclear.scheduler.core.limits import queue_full
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.engine.engine_stats import MAX_STEP_TIMES, EngineCounters, EngineSnapshot
from lineclear.scheduler.engine.worker_link import WorkerGone, WorkerLink
from lineclear.scheduler.engine.worker_pool import WorkerPool
from lineclear.scheduler.engine.worker_process import loss_by_exit
from lineclear.scheduler.engine.worker_registry import WorkerRegistry
from lineclear.scheduler.engine.worker_session import SessionEvent, WorkerSession, WorkerTimeouts
from lineclear.scheduler.engine.worker_subscribers import EngineCallbacks, WorkerSubscribers
from lineclear.scheduler.observe.step_history import StepHistory
from lineclear.wire.messages import StepResult

log = structlog.get_logger()

_MAX_COMMANDS_PER_ITERATION = 64  # a burst of requests does not delay the results of running ones
_SNAPSHOT_SECONDS = 0.05
_SUSPENDED_SECONDS = 1.0
_CHECK_PAUSE = 50
"""Shortest time between two checks, in durations of the first of them: checks take at most 2 % of the time."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Which workers may join, how long they may take, and what the engine keeps for other threads."""

    timeouts: WorkerTimeouts = field(default_factory=WorkerTimeouts)
    max_workers: int = 64
    max_inbox: int = 4096
    """Unread commands; see `CommandInbox`."""
    check_every_steps: int = 64
    """See `InvariantChecks`. A violation ends the thread, because the core's next decision could be wrong."""
    text_fingerprint: str = ""
    """A worker whose Hello has another one is rejected; empty: not compared."""


class EngineLoop:
    """The parts of the engine that its thread owns. `step_history` gets every executed step."""

    def __init__(
        self,
        core: Scheduler,
        link: WorkerLink,
        pool: WorkerPool,
        callbacks: EngineCallbacks,
        limits: EngineLimits | None = None,
        step_history: StepHistory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = limits or EngineLimits()
        self.core, self.link, self.pool = core, link, pool
        self.callbacks, self.clock = callbacks, clock
        self._state = core.state
        self.steps = step_history or StepHistory()
        self.inbox = CommandInbox(limits.max_inbox, link.wake)
        self.is_stopped = False
        """The current iteration is the last one."""
        self.snapshot = EngineSnapshot(core.snapshot())
        """Replaced, never changed: other threads read it."""
        self.iteration_started_at: float | None = None
        """None while waiting."""
        self.workers = WorkerRegistry(
            limits.timeouts,
            max_workers=limits.max_workers,
            text_fingerprint=limits.text_fingerprint,
            number_of=pool.number_of,
        )
        self.subscribers = WorkerSubscribers(core, link, self.workers, pool, self.steps, callbacks)
        self._joining = self.subscribers.adapters.joining
        self._step_seconds: deque[tuple[int, float]] = deque(maxlen=MAX_STEP_TIMES)
        self._counters = EngineCounters()
        self._checks = InvariantChecks(core, limits.check_every_steps, self._counters, clock)
        self._next_wakeup = math.inf  # latest time at which the next iteration is to begin
        self._next_worker_check = -math.inf
        self._snapshot_at = -math.inf
        self._is_snapshot_current = True

    def run(self) -> None:
        """Iterate until `is_stopped`. Raises what goes wrong."""
        while not self.is_stopped:
            self._run_once()

    def _run_once(self) -> None:
        now = self.iteration_started_at = self.clock()
        self._counters.iterations += 1
        self._is_snapshot_current = False
        if now > self._next_wakeup + _SUSPENDED_SECONDS:
            # Messages that the worker sent in the meantime are still to be received.
            log.warning("process_was_suspended", seconds=round(now - self._next_wakeup, 3))
            self.workers.extend_deadlines(now)
        self._next_wakeup = now  # of the next iteration, unless this one waits
        events = self.inbox.run(now, self.snapshot.core.predicted_wait_seconds)
        for fact in self.link.receive(self.workers, now):
            if isinstance(fact, StepResult):
                self._apply(fact, events, now)
            else:
                self.subscribers.handle(fact, events, now)
        self._check_workers(events, now)
        events += self.core.expire(now)
        # Before the plans, so that requests of a released worker continue in this iteration.
        for waiting, work in self.subscribers.waiting_work:
            if waiting:
                self.subscribers.carry_out(work(now) or (), events, now)
        self._send_plans(events, now)
        if events:
            begin = time.perf_counter()
            self.callbacks.publish(events)
            self._counters.publish_seconds += time.perf_counter() - begin
        # After the plans and events of this iteration are sent.
        is_idle = self.workers.is_idle
        self._checks.check_if_due(now, is_idle=is_idle)
        if now >= self._snapshot_at + _SNAPSHOT_SECONDS:
            self.take_snapshot(now)
        if not self.inbox and not self.is_stopped:
            self._wait(now, is_idle=is_idle)

    def _wait(self, now: float, *, is_idle: bool) -> None:
        deadline = self.core.next_deadline(self.workers.joined_epochs - self._joining)
        self._next_worker_check = self.workers.next_check(now)
        self._next_wakeup = min(
            self._next_worker_check,
            math.inf if deadline is None else deadline,
            self._checks.next_check() if is_idle else math.inf,
            math.inf if self._is_snapshot_current else self._snapshot_at + _SNAPSHOT_SECONDS,
        )
        self.iteration_started_at = None
        self.link.wait(self._next_wakeup)

    def submit(self, requests: Sequence[Request], now: float) -> list[Event]:
        """Submit requests to the core; a refusal is an event, too."""
        events: list[Event] = []
        try:
            for request in requests:  # what the core accepts of the first, it accepts of its siblings
                events += self.core.submit(request, now)
        except LineclearError as error:
            events += [refusal(request, error, now) for request in requests[len(events) :]]
        return events

    def worker_exited(self, pid: int, exit_code: int | None, now: float) -> list[Event]:
        events: list[Event] = []
        self.subscribers.carry_out(self.workers.on_process_exit(pid, loss_by_exit(exit_code), now), events, now)
        return events

    def take_snapshot(self, now: float) -> None:
        self._snapshot_at, self._is_snapshot_current = now, True
        self.snapshot = EngineSnapshot(
            core=self.core.snapshot(now),
            worker=self.workers.status,
            workers=self.workers.figures(now),
            step_seconds=tuple(self._step_seconds),
            counters=copy(self._counters),
            link=copy(self.link.counters),
            membership=copy(self.workers.counters),
        )

    def _send_plans(self, events: list[Event], now: float) -> None:
        """Send each joined worker one plan after the other, in turns, until none can run more."""
        if events:
            self.steps.request_events(events)
        num_noted = len(events)
        begin = time.perf_counter()
        encode_before = self.link.counters.encode_seconds
        workers = self.workers.joined
        if len(workers) == 1:
            while self._send_plan(workers[0], events, now):
                pass
        elif workers:
            self._send_plans_in_turns(workers, events, now)
        events += self.core.drain_events()
        encode_seconds = self.link.counters.encode_seconds - encode_before
        self._counters.plan_seconds += time.perf_counter() - begin - encode_seconds
        if len(events) > num_noted:
            self.steps.request_events(events[num_noted:])

    def _send_plans_in_turns(self, workers: Sequence[WorkerSession], events: list[Event], now: float) -> None:
        first = self._counters.iterations % len(workers)  # each iteration another worker is first to admit requests
        workers = [*workers[first:], *workers[:first]]
        # A plan of one worker may let another one run more: a preemption gives the other a request that waits.
        while sum(self._send_plan(worker, events, now) for worker in workers if worker.is_joined):
            pass  # a worker that its plan could not be sent to is no longer joined

    def _send_plan(self, worker: WorkerSession, events: list[Event], now: float) -> bool:
        """Send a worker its next plan; return False if it gets no further one now."""
        if worker.epoch in self._joining:
            return False  # it still loads adapters
        plan = self.core.plan(worker.epoch, now)
        if plan is None:
            return False
        try:
            self.link.send(plan)
        except WorkerGone:
            self.subscribers.carry_out(self.workers.handle(worker, SessionEvent.DISCONNECTED, now), events, now)
            return False
        state = self._state.workers[worker.epoch]
        base, per_token, _ = state.step_time.coefficients
        worker.timer.plan_sent(plan.step, base + per_token * state.last_step_tokens, now)
        planning = self.core.drain_events()
        events += planning
        self.steps.planned(plan, self._state, planning, now)
        return True

    def _apply(self, result: StepResult, events: list[Event], now: float) -> None:
        worker = self.workers[result.epoch]
        begin = time.perf_counter()
        try:
            found = self.core.apply(result, now)
        except BadResult as error:
            problem = f"it sent a result that cannot be: {error}"
            failed = self.workers.handle(worker, SessionEvent.FAILED, now, problem, WorkerLoss.CLEAN)
            self.subscribers.carry_out(failed, events, now)
            return
        events += found
        self._counters.apply_seconds += time.perf_counter() - begin
        self._checks.result_applied()
        is_slow = worker.result_applied(result, now)
        self.steps.executed(result, self._state, found, now)
        if not worker.has_progressed:
            self._report_progress(worker, now)
        if is_slow:
            self.callbacks.on_anomaly(f"step {result.step} was slow")
        self._step_seconds.append((result.epoch, result.step_seconds))

    def _check_workers(self, events: list[Event], now: float) -> None:
        """Handle the timeouts that are over, and report progress."""
        # Each wait ends at the next timeout; after an iteration without a wait, it is not known.
        next_check, self._next_worker_check = self._next_worker_check, -math.inf
        if now >= next_check:
            self.subscribers.carry_out(self.workers.check(now), events, now)
        for worker in self.workers.joined:
            if not worker.has_progressed:
                self._report_progress(worker, now)

    def _report_progress(self, worker: WorkerSession, now: float) -> None:
        if worker.take_progress(now) and worker.hello is not None:
            self.pool.worker_progressed(worker.hello)


class InvariantChecks:
    """Checks a core once `every_steps` results are unchecked, or any while no step is in flight; 0: never.

    A check takes time for each request and block, so a large pool with short steps is checked less often.
    """

    def __init__(self, core: Scheduler, every_steps: int, counters: EngineCounters, clock: Callable[[], float]) -> None:
        self._core = core
        self._every_steps = every_steps
        self._counters = counters
        self._clock = clock
        self._num_unchecked = 0
        self._paused_until = -math.inf

    def result_applied(self) -> None:
        self._num_unchecked += 1

    def check_if_due(self, now: float, *, is_idle: bool) -> None:
        """Check the core now if it is time. Raises AssertionError."""
        every, unchecked = self._every_steps, self._num_unchecked
        if not (every and unchecked and (unchecked >= every or is_idle)) or now < self._paused_until:
            return
        begin = self._clock()
        invariants.check(self._core, with_waiting_prompts=False)
        end = self._clock()
        self._num_unchecked = 0
        self._paused_until = end + _CHECK_PAUSE * (end - begin)
        self._counters.checks += 1
        self._counters.check_seconds += end - begin

    def next_check(self) -> float:
        """Return the time of the check that an idle engine has put off; infinite without one."""
        return self._paused_until if self._every_steps and self._num_unchecked else math.inf


class CommandInbox:
    """A queue of calls: bounded for requests, never blocking. Any thread adds, the engine's thread runs them.

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
