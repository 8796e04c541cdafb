"""The engine: the one thread that owns the core. Carries requests in, plans out, results in, events out.

Decides the order of these four, and what the loss of a worker means to everybody. What runs next is the core's
decision, when a worker has been waited for long enough the vigil's, how frames travel the link's, what events mean to a
caller the service's.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

import structlog

from lineclear.errors import LineclearError, PoisonRequest, QueueFull
from lineclear.process.logging_setup import exception_location
from lineclear.scheduler.core import invariants
from lineclear.scheduler.core.events import Event, Failed, RequestStats
from lineclear.scheduler.core.inflight_step import BadResult
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.engine.engine_stats import MAX_STEP_TIMES, EngineCounters, EngineSnapshot, StepTime
from lineclear.scheduler.engine.worker_link import CLOSED, Arrival, WorkerGone, WorkerLink
from lineclear.scheduler.engine.worker_monitor import WorkerMonitor, WorkerTimeouts, loss_by_exit
from lineclear.wire.messages import (
    Goodbye,
    Hello,
    LogLevel,
    SetLogLevel,
    StepError,
    StepErrorKind,
    StepResult,
    Stopping,
)

log = structlog.get_logger()

_MAX_COMMANDS_PER_TURN = 64  # so that a burst of requests does not hold up the results of those that run
_SNAPSHOT_SECONDS = 0.05
_STANDSTILL_SECONDS = 1.0
_STOP_SECONDS = 10.0


class EngineStuck(Exception):
    """The engine's thread does not end. Only the end of the process ends it."""


class Engine:
    """Runs a core over a link. Requests, cancellations and the like come from any thread and never block.

    `publish` gets what happened, in order, on the engine's thread, and must not block; plans are on their way by then.
    A worker joins only where `accepts(hello)`.
    `on_joined(hello)` and `on_broken(hello, reason)` tell a supervisor that a worker is up, or has to be killed; the
    latter returns whether that is being done, and then this process joins no more.
    `on_explained()` tells it that the last ends of workers were a request's fault, which has failed now;
    `on_progress()`, once for each worker, that this one has made progress (see `crash_budget`).
    The core's invariants are checked every `check_every_steps` results and whenever nothing is in flight any more; 0:
    never. A breach ends the thread: what the core would decide next could be wrong.
    `on_anomaly(what)` is called when a worker is lost, a step took far too long or the thread dies.
    `on_fatal(error)` is called when the thread dies, after which nothing is published any more: the server must end.
    All of them run on the engine's thread.
    """

    def __init__(
        self,
        core: Scheduler,
        link: WorkerLink,
        publish: Callable[[Sequence[Event]], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        patience: WorkerTimeouts | None = None,
        max_inbox: int = 4096,
        check_every_steps: int = 64,
        accepts: Callable[[Hello], bool] = lambda hello: True,
        on_joined: Callable[[Hello], None] = lambda hello: None,
        on_broken: Callable[[Hello, str], bool] = lambda hello, reason: False,
        on_explained: Callable[[], None] = lambda: None,
        on_progress: Callable[[], None] = lambda: None,
        on_anomaly: Callable[[str], object] = lambda what: None,
        on_fatal: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.failure: BaseException | None = None
        """Why the thread died."""
        self._core = core
        self._link = link
        self._publish = publish
        self._clock = clock
        self._max_inbox = max_inbox
        self._check_every_steps = check_every_steps
        self._num_unchecked_steps = 0
        self._accepts = accepts
        self._on_joined, self._on_broken, self._on_fatal = on_joined, on_broken, on_fatal
        self._on_explained, self._on_progress, self._on_anomaly = on_explained, on_progress, on_anomaly
        self._inbox: deque[Callable[[float], list[Event]]] = deque()
        self._refused: deque[Request] = deque()
        self._hello: Hello | None = None
        self._last_hello: Hello | None = None  # of the joined worker, or of the one before
        self._log_level: LogLevel | None = None  # that workers are to have; None: the one they start with
        self._is_level_told = True  # to the joined worker
        self._is_worker_stopping = False  # the joined worker was told to stop
        self._is_over = False  # nothing is read any more
        self._is_worker_released = False  # and has been sent Goodbye, because nothing is left to run
        self._monitor = WorkerMonitor(patience or WorkerTimeouts(), self._predicted_seconds)  # over the joined worker
        self._incarnation = 0
        self._step_times: deque[StepTime] = deque(maxlen=MAX_STEP_TIMES)
        self._counters = EngineCounters()
        self._next_wakeup = math.inf  # when wait() was to return at the latest
        self._snapshot = EngineSnapshot(core.snapshot())
        self._snapshot_at = -math.inf
        self._iteration_began: float | None = None  # None while waiting
        self._stopped = False
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- from any thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which owns core and link from here on."""
        self._thread.start()

    def stop(self, timeout_seconds: float = _STOP_SECONDS) -> None:
        """End the thread. Live requests hear nothing more; the link is the caller's again.

        Raises EngineStuck where the thread does not end in time. It may still use the link then.
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

    def submit(self, request: Request) -> None:
        """Queue a request. Its first event is Admitted, or Failed with the reason.

        `request_id` must not be in use: the Failed of a duplicate could not be told from one of the original.
        """
        if len(self._inbox) < self._max_inbox:
            self._inbox.append(partial(self._submit, request))
        else:
            self._refused.append(request)
        self._link.wake()

    def cancel(self, request_id: str, error: LineclearError | None = None) -> None:
        """End a request with Failed(error or Cancelled), if it lives."""
        self._enqueue(partial(self._core.cancel, request_id, error))

    def finish(self, request_id: str, num_tokens: int) -> None:
        """Complete a request after `num_tokens` output tokens, if it lives: the text has a stop string there."""
        self._enqueue(partial(self._core.finish, request_id, num_tokens))

    def drain(self) -> None:
        """Refuse new requests from now on; those that live go on."""
        self._enqueue(self._drain)

    def release_worker(self) -> None:
        """Let a worker that is told to stop end at once: nothing that it would compute is read any more."""
        self._enqueue(self._set_over)

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        self._enqueue(lambda now: self._core.clear_prefix_cache())

    def set_log_level(self, level: str) -> None:
        """Have the worker log from `level` upwards, and every one that joins later."""
        self._enqueue(partial(self._set_log_level, LogLevel[level.upper()]))

    def worker_exited(self, pid: int, exit_code: int | None = None) -> None:
        """The process `pid` is dead. If it is the joined worker, its requests run again on the next one.

        `exit_code` is negative for a signal, None if nobody knows.
        """
        self._enqueue(partial(self._worker_exited, pid, exit_code))

    def call_on_engine_thread(self, look: Callable[[], object]) -> None:
        """Have `look()` called on the engine's thread, when the core stands still. It must not raise, nor wait."""

        def command(now: float) -> None:
            look()

        self._enqueue(command)

    def snapshot(self) -> EngineSnapshot:
        """Counters and gauges of a moment ago. Never waits for the engine."""
        return self._snapshot

    def busy_seconds(self) -> float:
        """How long the turn at work has taken; 0 while the engine waits for something to do. Any thread."""
        began = self._iteration_began
        return 0.0 if began is None else self._clock() - began

    @property
    def is_worker_hung(self) -> bool:
        """Whether a worker that has to be killed still lives. Where nobody supervises it, somebody else must."""
        return self._monitor.hung_epoch is not None

    @property
    def is_worker_stopping(self) -> bool:
        """Whether the joined worker was told to stop, and runs on until no request is left or its drain is over."""
        return self._is_worker_stopping

    @property
    def worker(self) -> Hello | None:
        """The Hello of the joined worker."""
        return self._hello

    def _enqueue(self, command: Callable[[float], list[Event] | None]) -> None:
        # Not bounded by max_inbox: there are only so many of these for each request that was let in.
        self._inbox.append(lambda now: command(now) or [])
        self._link.wake()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._run_once()
        except BaseException as error:
            self.failure = error
            self._on_fatal(error)  # first: nothing may come between a death and its news
            self._on_anomaly(f"the engine died: {type(error).__name__}")
            log.error("engine_died", error=type(error).__name__, places=exception_location(error))

    def _run_once(self) -> None:
        now = self._iteration_began = self._clock()
        self._counters.iterations += 1
        if now > self._next_wakeup + _STANDSTILL_SECONDS:
            self._extend_deadlines(now)
        self._next_wakeup = math.inf
        events = self._run_commands(now)
        for arrival in self._link.receive():
            self._on_message(arrival, events, now)
        self._check_worker(events, now)
        events += self._core.expire(now)
        self._send_log_level()
        self._send_plans(events, now)
        self._release_worker()
        if events:
            begin = time.perf_counter()
            self._publish(events)
            self._counters.publish_seconds += time.perf_counter() - begin
        self._check_invariants()
        if now - self._snapshot_at >= _SNAPSHOT_SECONDS or self._monitor.is_idle:
            self._take_snapshot(now)
        if not self._inbox and not self._stopped:
            self._next_wakeup = min(
                self._monitor.next_check(self._link.last_heard, now), _or_infinity(self._core.next_deadline())
            )
            self._iteration_began = None
            self._link.wait(self._next_wakeup)

    def _run_commands(self, now: float) -> list[Event]:
        events: list[Event] = []
        for _ in range(min(len(self._inbox), _MAX_COMMANDS_PER_TURN)):
            events += self._inbox.popleft()(now)
        while self._refused:
            message = f"{self._max_inbox} orders are unread, which is the limit that follows from --max-queue-size"
            error = QueueFull(message, retry_after_seconds=1.0)
            events.append(_refusal(self._refused.popleft(), error, now))
        return events

    def _submit(self, request: Request, now: float) -> list[Event]:
        try:
            return self._core.submit(request, now)
        except LineclearError as error:
            return [_refusal(request, error, now)]

    def _drain(self, now: float) -> None:
        self._leaving = True
        self._core.drain(now)

    def _set_over(self, now: float) -> None:
        self._is_over = True

    def _set_log_level(self, level: LogLevel, now: float) -> None:
        self._log_level, self._is_level_told = level, False

    def _worker_exited(self, pid: int, exit_code: int | None, now: float) -> list[Event]:
        events: list[Event] = []
        if self._last_hello is not None and self._last_hello.pid == pid:
            self._link.block_process(self._last_hello)
        if self._hello is not None and self._hello.pid == pid:
            self._on_worker_lost("its process ended", events, now, loss_by_exit(exit_code))
        return events

    # --- plans and results ------------------------------------------------------------------------------------------

    def _send_plans(self, events: list[Event], now: float) -> None:
        begin = time.perf_counter()
        encode_before = self._link.counters.encode_seconds
        while not self._monitor.is_closed and (plan := self._core.plan(now)) is not None:
            try:
                self._link.send(plan)
            except WorkerGone:
                self._monitor.connection_closed(now)
                break
            self._monitor.plan_sent(plan, now)
        events += self._core.drain_events()
        encode_seconds = self._link.counters.encode_seconds - encode_before
        self._counters.plan_seconds += time.perf_counter() - begin - encode_seconds

    def _on_message(self, arrival: Arrival, events: list[Event], now: float) -> None:
        if isinstance(arrival, StepResult):
            self._apply(arrival, events, now)
        elif isinstance(arrival, Hello):
            self._join(arrival, events, now)
        elif isinstance(arrival, StepError):
            log.error("step_failed", step=arrival.step, kind=arrival.kind.name.lower(), summary=arrival.summary)
            events += self._core.on_step_error(arrival, now)
            memory = arrival.kind is StepErrorKind.OUT_OF_MEMORY
            # What went wrong on the way is nobody's fault who was running.
            astray = arrival.kind is StepErrorKind.PROTOCOL
            loss = WorkerLoss.CLEAN if memory or astray else WorkerLoss.CRASHED
            self._on_worker_lost(f"a step failed: {arrival.kind.name.lower()}", events, now, loss, kill=not memory)
        elif isinstance(arrival, Stopping):
            self._is_worker_stopping = True
            log.info("worker_stopping", epoch=arrival.epoch, num_live=self._core.num_live)
        elif arrival.reason == CLOSED and self._hello is not None:
            self._monitor.connection_closed(now)
        else:
            self._on_worker_lost(f"it left: {arrival.reason}", events, now, WorkerLoss.CLEAN)

    def _apply(self, result: StepResult, events: list[Event], now: float) -> None:
        if self._hello is None or result.epoch != self._hello.epoch:
            return  # it came in one batch with the message that ended its epoch
        begin = time.perf_counter()
        try:
            events += self._core.apply(result, now)
        except BadResult as error:
            self._on_worker_lost(f"it sent a result that cannot be: {error}", events, now, WorkerLoss.CLEAN, kill=True)
            return
        self._counters.apply_seconds += time.perf_counter() - begin
        self._num_unchecked_steps += 1
        step_time, is_slow = self._monitor.result_received(result, now)
        if self._monitor.take_progress(now):
            self._on_progress()
        if is_slow:
            self._on_anomaly(f"step {result.step} was slow")
        self._step_times.append(step_time)

    def _check_invariants(self) -> None:
        """Check the core now and then. Plans and events of this turn are on their way already."""
        unchecked, every = self._num_unchecked_steps, self._check_every_steps
        if every and unchecked and (unchecked >= every or self._monitor.is_idle):
            begin = time.perf_counter()
            invariants.check(self._core, with_waiting_prompts=False)
            self._num_unchecked_steps = 0
            self._counters.checks += 1
            self._counters.check_seconds += time.perf_counter() - begin

    # --- the worker -------------------------------------------------------------------------------------------------

    def _join(self, hello: Hello, events: list[Event], now: float) -> None:
        if self._monitor.is_closed:
            self._on_worker_lost(CLOSED, events, now, WorkerLoss.KILLED)
        assert self._hello is None, "the link joins one worker at a time"
        if hello.epoch != self._link.epoch:
            return  # it came in one batch with the message that condemned its process
        if not self._accepts(hello):
            self._link.block_process(hello)
            return
        self._hello = self._last_hello = hello
        self._monitor.begin(now)
        self._is_level_told = self._log_level is None
        self._incarnation += 1
        events += self._core.on_worker_change(hello, now)
        log.info(
            "worker_joined",
            epoch=hello.epoch,
            pid=hello.pid,
            model_id=hello.model_id,
            device=hello.device,
            num_blocks=hello.num_blocks,
            block_size=hello.block_size,
            num_slots=hello.num_slots,
        )
        self._warn_about_caps(hello)
        self._on_joined(hello)

    def _warn_about_caps(self, hello: Hello) -> None:
        """Log every limit of ours that the worker's own is below: a step is held to the smaller one."""
        limits = self._core.limits
        caps = (
            ("--max-batch-size", limits.max_batch_size, hello.num_slots),
            ("--target-batch-tokens", limits.target_batch_tokens, hello.max_step_tokens),
        )
        for flag, asked, has in caps:
            if asked > has:
                hint = f"start the worker with {flag} {asked}, or lower the scheduler's"
                log.warning("worker_caps_batches", flag=flag, value=asked, worker_value=has, hint=hint)

    def _send_log_level(self) -> None:
        if not self._is_level_told and self._hello is not None and self._log_level is not None:
            self._is_level_told = self._link.send_control(SetLogLevel(self._hello.epoch, self._log_level))

    def _release_worker(self) -> None:
        """Send Goodbye to a worker that was told to stop once no request is left that it could run."""
        if self._hello is None or not self._is_worker_stopping or self._is_worker_released:
            return
        if self._core.num_live and not self._is_over:
            return
        self._is_worker_released = self._link.send_control(Goodbye(self._hello.epoch, "no request is left to run"))

    def _on_worker_lost(
        self, reason: str, events: list[Event], now: float, loss: WorkerLoss, *, kill: bool = False
    ) -> None:
        """The joined worker is gone, or as good as. Requests wait for the next one."""
        hello = self._hello
        if hello is None:
            return
        self._hello = None
        self._monitor.end(hung=hello.epoch if kill else None)
        events += self._core.drain_events()
        # What stops a process may kill it when it takes too long. No request is a suspect for that.
        is_expected = self._leaving or (self._is_worker_stopping and loss is WorkerLoss.KILLED)
        ended = self._core.on_worker_change(None, now, WorkerLoss.CLEAN if is_expected else loss)
        events += ended
        if any(isinstance(event, Failed) and isinstance(event.error, PoisonRequest) for event in ended):
            log.error("request_kills_workers", epoch=hello.epoch)
            self._on_explained()
        self._is_worker_stopping = self._is_worker_released = False
        # A server that is leaving tells its worker to leave too.
        say = log.info if self._leaving else log.warning
        if loss is not WorkerLoss.CLEAN and not is_expected:
            self._on_anomaly(reason)
        say("worker_lost", epoch=hello.epoch, pid=hello.pid, reason=reason, num_live=self._core.num_live)
        if kill and self._on_broken(hello, reason):
            self._link.block_process(hello)
        else:
            self._link.end_epoch(hello.epoch)

    def _check_worker(self, events: list[Event], now: float) -> None:
        if self._hello is None:
            self._monitor.check_hung(self._link.is_reachable)
        elif (overdue := self._monitor.check_timeouts(self._link.last_heard, now)) is not None:
            self._on_worker_lost(overdue.reason, events, now, overdue.loss, kill=overdue.kill)
        elif self._monitor.take_progress(now):
            self._on_progress()

    def _predicted_seconds(self, num_tokens: int) -> float:
        base, per_token, _ = self._snapshot.core.step_time
        return base + per_token * num_tokens

    def _extend_deadlines(self, now: float) -> None:
        """This process itself stood still (suspended, starved): what the worker said meanwhile is still under way."""
        log.warning("engine_stood_still", seconds=round(now - self._next_wakeup, 3))
        self._link.last_heard = now
        self._monitor.extend_deadlines(now)

    def _take_snapshot(self, now: float) -> None:
        self._snapshot_at = now
        self._snapshot = EngineSnapshot(
            core=self._core.snapshot(),
            hello=self._hello,
            incarnation=self._incarnation,
            step_times=tuple(self._step_times),
            counters=copy(self._counters),
            link=copy(self._link.counters),
        )


def _refusal(request: Request, error: LineclearError, now: float) -> Failed:
    return Failed(request.request_id, error, RequestStats(now, len(request.prompt), ended_at=now))


def _or_infinity(moment: float | None) -> float:
    return math.inf if moment is None else moment
