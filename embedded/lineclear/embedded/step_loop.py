"""Runs the core and a step function: a thread plans a step, computes it and applies its result.

One lock guards the core, so `submit` and `cancel` act at once, also while a step runs. The step function runs without
the lock. A second thread ends requests whose deadline passes during a step. Both threads sleep on conditions: a batcher
without work uses no CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from lineclear.embedded.answers import EmbeddedFuture, queue_seconds
from lineclear.embedded.options import MAX_TOKEN, Options
from lineclear.errors import DeviceOutOfMemory, NonFiniteLogits, PoisonRequest, ServerDraining, ShutdownInterrupted
from lineclear.scheduler.core.events import Event, Failed, Finished, Started, StepTokens
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Hello, StepError, StepErrorKind, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Figures of one executed step."""

    step: int
    """Number of the step, from 1 at the start and after each failed step."""
    num_rows: int
    """Slots with a row in the step."""
    num_tokens: int
    """Positions computed; of an ItemBatcher: the cost of the items."""
    total_tokens: int
    """Positions held: prompt and output of all slots of the step."""
    seconds: float
    """Time in the step function."""


@dataclass(frozen=True, slots=True)
class BatcherStats:
    """Totals since the batcher was made, and gauges of this moment."""

    requests_submitted: int
    requests_finished: int
    requests_failed: int
    """Failed, expired and cancelled ones."""
    requests_rejected: int
    """QueueFull, a request that can never fit, or a stopped batcher."""
    requests_waiting: int
    requests_running: int
    steps: int
    rows: int
    """Rows of all steps: `rows / steps` is the mean batch size."""
    failed_steps: int
    """Steps whose step function raised an exception."""
    step_seconds: float
    """Time in the step function."""
    queue_seconds: float
    """Sum of the times between arrival and first step, of requests that ended."""
    preemptions: int
    blocks_used: int
    num_blocks: int
    last_step: StepTotals | None

    @property
    def mean_batch_size(self) -> float:
        """Return the mean number of rows of a step."""
        return self.rows / self.steps if self.steps else 0.0


_F = TypeVar("_F", bound=EmbeddedFuture[Any])

_MIN_TIMER_SECONDS = 0.001


class StepLoop(ABC, Generic[_F]):
    """The threads and futures of a batcher. A subclass turns plans into calls of the step function.

    The core has one worker, whose Hello has `capacity`. It joins again after each failed step. The threads start with
    the first request, or with `start`. Use a batcher as a context manager, or call `stop`.
    """

    def __init__(self, function: Callable[[Any], Any], options: Options, limits: CoreLimits, **capacity: Any) -> None:
        self._function = function
        self._isolates = options.get("on_error") != "fail"
        self._capacity = Hello(
            epoch=1, num_slots=limits.max_batch_size, vocab_size=MAX_TOKEN, eos_token_ids=(), **capacity
        )
        self._core = Scheduler(limits)
        self._core.worker_joined(self._capacity, time.monotonic())
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # a request, a stop
        self._timer = threading.Condition(self._lock)  # an earlier deadline, a stop
        self._idle = threading.Condition(self._lock)  # no request is live
        self._futures: dict[str, _F] = {}
        self._by_number: dict[int, _F] = {}
        self._slots: dict[int, int] = {}  # slot -> number of its last request
        self._waiting_cost = 0
        self._numbers = itertools.count(1)
        self._timer_at: float | None = None
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # that was running at the start
        self._own_loop: asyncio.AbstractEventLoop | None = None  # of the step thread, for coroutines without it
        self._is_draining = self._is_stopped = False
        self._failed_steps = self._num_failed = 0
        self._step_seconds = self._queue_seconds = 0.0
        self._last_step: StepTotals | None = None
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Start the threads. What an `async def` returns is awaited on the event loop that runs now, if one does."""
        with self._lock:
            if self._threads or self._is_draining:
                return
            with contextlib.suppress(RuntimeError):
                self._loop = asyncio.get_running_loop()
            self._threads = [
                threading.Thread(target=self._run, name="lineclear-step", daemon=True),
                threading.Thread(target=self._run_timer, name="lineclear-deadlines", daemon=True),
            ]
            for thread in self._threads:
                thread.start()

    def stop(self, *, drain: bool = True, timeout_seconds: float | None = None) -> bool:
        """Refuse new requests, finish the others and stop the threads. Returns whether all requests finished.

        Without `drain`, or after `timeout_seconds`, the remaining requests fail with ShutdownInterrupted. A step in
        progress is not interrupted. In an asyncio program call `aclose`, because this call blocks.
        """
        if threading.current_thread() in self._threads:
            raise RuntimeError("stop was called from the step function or from a callback, which would wait for itself")
        with self._lock:
            if not self._is_draining:
                self._is_draining = True
                self._core.drain(time.monotonic())
                self._work.notify_all()
            if drain and self._threads:
                self._idle.wait_for(lambda: not self._futures or self._is_stopped, timeout_seconds)
            left = list(self._futures.values())
            self._is_stopped = True
            self._work.notify_all()
            self._timer.notify_all()
        for future in left:
            self._end(future, ShutdownInterrupted("the batcher stopped before the answer was complete"))
        for thread in self._threads:
            thread.join(timeout_seconds)
        return not left

    async def aclose(self, *, drain: bool = True, timeout_seconds: float | None = None) -> bool:
        """Stop as `stop` does, without blocking the event loop."""
        return await asyncio.to_thread(self.stop, drain=drain, timeout_seconds=timeout_seconds)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(drain=kind is None)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.aclose(drain=kind is None)

    def stats(self) -> BatcherStats:
        """Return totals and gauges."""
        with self._lock:
            core = self._core.snapshot()
            counters = core.counters
            return BatcherStats(
                requests_submitted=counters.requests_admitted,
                requests_finished=counters.requests_finished,
                requests_failed=self._num_failed,
                requests_rejected=counters.requests_rejected,
                requests_waiting=core.num_requests_waiting,
                requests_running=core.num_requests_running,
                steps=counters.steps,
                rows=counters.rows,
                failed_steps=self._failed_steps,
                step_seconds=self._step_seconds,
                queue_seconds=self._queue_seconds,
                preemptions=counters.preemptions,
                blocks_used=core.blocks_used,
                num_blocks=core.num_blocks,
                last_step=self._last_step,
            )

    def cancel(self, request_id: str) -> bool:
        """Cancel a request by id. Returns False for an id that no live request has."""
        future = self._futures.get(request_id)
        return future is not None and future.cancel()

    def _submit(self, request: Request, future: _F) -> _F:
        """Queue a request whose sampling seed is the future's number."""
        now = time.monotonic()
        with self._lock:
            if self._failure is not None:
                raise RuntimeError("the batcher ended with an exception") from self._failure
            if self._is_draining:
                raise ServerDraining("the batcher is stopped; make another one")
            self._core.submit(request, now)
            self._futures[request.request_id] = self._by_number[future.number] = future
            self._waiting_cost += future.cost
            self.start()
            self._work.notify()
            deadline = request.deadline
            if deadline is not None and (self._timer_at is None or deadline < self._timer_at):
                self._timer.notify()
        return future

    def _cancel_request(self, request_id: str) -> None:
        with self._lock:
            events = self._core.cancel(request_id, None, time.monotonic())
        self._deliver(events)

    def _end(self, future: _F, error: BaseException) -> None:
        """Fail the future and remove its request."""
        future.fail(error)
        self._cancel_request(future.request_id)

    def _run(self) -> None:
        try:
            while (planned := self._next_plan()) is not None:
                self._run_step(*planned)
        except BaseException as error:  # as SystemExit; the next submit raises it too
            self._fail_all(error)
        finally:
            if self._own_loop is not None:
                self._own_loop.close()

    def _next_plan(self) -> tuple[StepPlan, list[str]] | None:
        """Wait until a step can be planned. Return it and the request ids of its samples; None after a stop."""
        epoch = self._capacity.epoch
        while True:
            with self._lock:
                if self._is_stopped:
                    return None
                now = time.monotonic()
                events = self._core.expire(now)
                plan = self._core.plan(epoch, now)
                samples = self._core.expected_samples(epoch) if plan is not None else []
                events += self._core.drain_events()
                if not events and plan is None:
                    deadline = self._core.next_deadline()
                    self._work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            self._deliver(events)
            if plan is not None:
                self._slots.update((init.slot, init.sampling.seed) for init in plan.inits)
                return plan, samples

    def _run_step(self, plan: StepPlan, samples: list[str]) -> None:
        futures = [self._futures.get(request_id) for request_id in samples]
        begin = time.perf_counter()
        try:
            found = self._compute(plan, futures)
        except Exception as error:
            self._on_failed_step(plan, error)
            return
        seconds = time.perf_counter() - begin
        bad = [index for index, entry in enumerate(found) if isinstance(entry, Exception)]
        for index in bad:
            if (future := futures[index]) is not None:
                future.failure = found[index]
            found[index] = 0
        result = StepResult(plan.epoch, plan.step, tuple(found), (), frozenset(bad), seconds)
        with self._lock:
            self._step_seconds += seconds
            self._last_step = StepTotals(plan.step, plan.num_rows, *self._sizes(plan), seconds)
            events = self._core.apply(result, time.monotonic())
        self._deliver(events)

    def _call(self, argument: object, num_results: int) -> list[Any]:
        """Call the step function and wait for its results."""
        found = self._function(argument)
        if inspect.isawaitable(found):
            if self._loop is not None:
                found = asyncio.run_coroutine_threadsafe(_as_coroutine(found), self._loop).result()
            else:
                self._own_loop = self._own_loop or asyncio.new_event_loop()
                found = self._own_loop.run_until_complete(found)
        results = list(found)
        if len(results) != num_results:
            raise ValueError(f"the step function returned {len(results)} results for {num_results} requests")
        return results

    def _on_failed_step(self, plan: StepPlan, error: Exception) -> None:
        """Void the step: its requests run again, computed from their first position."""
        owners = [self._slots[row.slot] for row in plan.rows]
        in_step = [self._by_number[number] for number in owners if number in self._by_number]
        for future in in_step:
            future.failure = error
        with self._lock:
            self._failed_steps += 1
            now = time.monotonic()
            events: list[Event] = []
            loss = WorkerLoss.CRASHED if self._isolates else WorkerLoss.CLEAN
            if isinstance(error, MemoryError) and self._isolates:
                loss = WorkerLoss.CLEAN
                events += self._core.on_step_error(StepError(plan.epoch, plan.step, StepErrorKind.OUT_OF_MEMORY), now)
            events += self._core.worker_lost(plan.epoch, now, loss)
            events += self._core.worker_joined(self._capacity, now)
        self._deliver(events)
        if not self._isolates:
            for future in in_step:
                self._end(future, error)

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            self._failure = error
            self._is_stopped = self._is_draining = True
            left = list(self._futures.values())
            self._idle.notify_all()
            self._timer.notify_all()
        for future in left:
            future.fail(error)

    def _run_timer(self) -> None:
        while True:
            with self._lock:
                if self._is_stopped:
                    return
                now = time.monotonic()
                events = self._core.expire(now)
                if not events:
                    at = self._timer_at = self._core.next_deadline()
                    self._timer.wait(None if at is None else max(_MIN_TIMER_SECONDS, at - now))
            self._deliver(events)

    def _deliver(self, events: Sequence[Event]) -> None:
        """Pass events to their futures, without the lock."""
        for event in events:
            if isinstance(event, StepTokens):
                self._on_tokens(event)
            elif isinstance(event, Started):
                if (future := self._futures.get(event.request_id)) is not None:
                    self._stop_waiting(future)
            elif isinstance(event, Finished | Failed):
                self._deliver_end(event)
        if events and self._is_draining:
            with self._lock:
                self._idle.notify_all()

    def _deliver_end(self, event: Finished | Failed) -> None:
        with self._lock:
            future = self._futures.pop(event.request_id, None)
            self._queue_seconds += queue_seconds(event.stats)
            self._num_failed += isinstance(event, Failed)
            if future is None:
                return
            self._by_number.pop(future.number, None)
            self._stop_waiting(future)
        if isinstance(event, Finished):
            future.finish(event)
        elif future.failure is not None and isinstance(event.error, PoisonRequest | NonFiniteLogits):
            future.fail(future.failure)
        else:
            if isinstance(event.error, DeviceOutOfMemory):
                event.error.__cause__ = future.failure
            future.fail(event.error)

    def _stop_waiting(self, future: _F) -> None:
        with self._lock:
            self._waiting_cost -= future.cost if future.is_waiting else 0
            future.is_waiting = False

    @abstractmethod
    def _compute(self, plan: StepPlan, futures: list[_F | None]) -> list[Any]:
        """Return the token of each sample, or the exception that its request fails with.

        `futures` has the request of each sample; None if it has ended.
        """

    @abstractmethod
    def _sizes(self, plan: StepPlan) -> tuple[int, int]:
        """Return `num_tokens` and `total_tokens` of a computed step."""

    def _on_tokens(self, event: StepTokens) -> None:
        """Pass tokens on."""


async def _as_coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
