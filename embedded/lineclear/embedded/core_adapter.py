"""The core with one worker that always exists: what the batchers use of it."""

from __future__ import annotations

from lineclear.errors import LineclearError
from lineclear.scheduler.core.events import Event
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.core.stats import CoreSnapshot
from lineclear.wire.messages import Hello, StepError, StepErrorKind, StepPlan, StepResult


class SingleWorkerCore:
    """A Scheduler whose worker joins when it is made and joins again after each failed step.

    `capacity` is the worker's Hello. Calls are those of the core; the caller serialises them.
    """

    def __init__(self, limits: CoreLimits, capacity: Hello, now: float) -> None:
        self._core = Scheduler(limits)
        self._capacity = capacity
        self._core.worker_joined(capacity, now)

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended."""
        return self._core.num_live

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. Raises QueueFull, PromptTooLong, KvCapacityExceeded, DuplicateRequest or ServerDraining."""
        self._core.submit(request, now)

    def cancel(self, request_id: str, error: LineclearError | None, now: float) -> list[Event]:
        """Fail a request with `error` or Cancelled."""
        return self._core.cancel(request_id, error, now)

    def expire(self, now: float) -> list[Event]:
        """Fail the requests whose deadline has passed."""
        return self._core.expire(now)

    def next_deadline(self) -> float | None:
        """Return when `expire` or `plan` may act next without another call; None: never."""
        return self._core.next_deadline()

    def drain(self, now: float) -> None:
        """Reject new requests and run the others without waiting for full batches."""
        self._core.drain(now)

    def plan(self, now: float) -> tuple[StepPlan | None, list[str], list[Event]]:
        """Return the next step or None, the request of each of its samples, and the events of planning."""
        epoch = self._capacity.epoch
        plan = self._core.plan(epoch, now)
        return plan, self._core.expected_samples(epoch) if plan is not None else [], self._core.drain_events()

    def apply(self, result: StepResult, now: float) -> list[Event]:
        """Apply the result of the step in flight."""
        return self._core.apply(result, now)

    def step_failed(self, plan: StepPlan, now: float, *, out_of_memory: bool, is_request_fault: bool) -> list[Event]:
        """Void the step in flight: its requests run again, computed from their first position.

        With `is_request_fault` the failure counts as a crash against each request of the step.
        """
        events: list[Event] = []
        if out_of_memory:
            events += self._core.on_step_error(StepError(plan.epoch, plan.step, StepErrorKind.OUT_OF_MEMORY), now)
        loss = WorkerLoss.CRASHED if is_request_fault and not out_of_memory else WorkerLoss.CLEAN
        events += self._core.worker_lost(plan.epoch, now, loss)
        return events + self._core.worker_joined(self._capacity, now)

    def snapshot(self) -> CoreSnapshot:
        """Return counters and gauges."""
        return self._core.snapshot()
