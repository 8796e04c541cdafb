"""A scheduler core with several toy workers, for tests that step them by hand."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from core.harness import VOCABULARY, Recorded
from support.toy_runner import ToyRunner

from lineclear.scheduler.core.events import Event, Started
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.policies import PolicySettings
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.wire.messages import StepPlan


class WorkersHarness(Recorded):
    """A core and its joined workers, by epoch. Keywords are fields of CoreLimits."""

    def __init__(self, num_workers: int = 2, **limits: Any) -> None:
        policy = PolicySettings(target_inter_token_latency_seconds=0.0)
        self.core = Scheduler(CoreLimits(**{"pipeline_depth": 1, "policy": policy} | limits))
        super().__init__()
        self.last_epoch = 0
        self.seconds_per_token = 0.01
        self.runners: dict[int, ToyRunner] = {}
        self.flights: dict[int, deque[StepPlan]] = {}
        for _ in range(num_workers):
            self.join()

    def join(self, **sizes: Any) -> int:
        """Join a worker and return its epoch."""
        self.last_epoch += 1
        sizes = {"num_blocks": 64, "block_size": 4, "num_slots": 8, "vocab_size": VOCABULARY} | sizes
        runner = self.runners[self.last_epoch] = ToyRunner(**sizes)
        self.flights[self.last_epoch] = deque()
        self.record(self.core.worker_joined(runner.hello(self.last_epoch), self.now))
        return self.last_epoch

    def lose(self, epoch: int, loss: WorkerLoss = WorkerLoss.CRASHED) -> list[Event]:
        del self.runners[epoch], self.flights[epoch]
        return self.record(self.core.worker_lost(epoch, self.now, loss))

    def plan(self, epoch: int) -> StepPlan | None:
        """Plan a step of a worker and put it in flight."""
        plan = self.core.plan(epoch, self.now)
        self.record(self.core.drain_events())
        if plan is not None:
            self.flights[epoch].append(plan)
        return plan

    def apply(self, epoch: int) -> list[Event]:
        """Compute the oldest plan in flight of a worker and apply its result."""
        plan = self.flights[epoch].popleft()
        result = self.runners[epoch].launch(plan).result()
        seconds = 0.001 + self.seconds_per_token * plan.num_tokens
        return self.record(self.core.apply(replace(result, step_seconds=seconds), self.now))

    def step(self, epoch: int) -> StepPlan | None:
        """Plan once on a worker, compute and apply."""
        plan = self.plan(epoch)
        if self.flights[epoch]:
            self.apply(epoch)
        return plan

    def round(self) -> None:
        """Step every worker once, oldest first, and let time pass."""
        for epoch in self.core.workers:
            self.plan(epoch)
        for epoch in self.core.workers:
            if self.flights[epoch]:
                self.apply(epoch)
        self.now += 0.01

    def run(self, max_rounds: int = 500) -> None:
        """Run until every request has ended."""
        while self.core.num_live:
            max_rounds -= 1
            assert max_rounds > 0, "requests do not end"
            self.round()

    def started_on(self) -> dict[str, int]:
        """Return the epoch of the worker on which each request started."""
        return {event.request_id: event.epoch for event in self.events if isinstance(event, Started)}

    def running(self) -> list[int]:
        """Return the number of requests that run on each worker, oldest first."""
        return [worker.num_requests_running for worker in self.core.snapshot().workers]
