"""A scheduler core and a toy worker in one object, for tests that step them by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from support.events import TokensReady, flat
from support.toy import expected
from support.toy_runner import ToyRunner

from lineclear.errors import LineclearError
from lineclear.scheduler.core import invariants
from lineclear.scheduler.core.events import Event, Failed, Finished, Started
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.policies import PolicySettings
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling, StepPlan, StepResult

VOCABULARY = 97
_POLICY = tuple(field.name for field in fields(PolicySettings))


def make_request(
    request_id: str, prompt: int | Sequence[int], max_tokens: int = 4, *, eos: int | None = None, **more: Any
) -> Request:
    """Return a request. An integer prompt is a length, filled with tokens that depend on `request_id`."""
    if isinstance(prompt, int):
        start = sum(request_id.encode())
        prompt = [(start + 7 * i) % VOCABULARY for i in range(prompt)]
    stops = () if eos is None else (eos,)
    sampling = Sampling(stop_ids=stops, min_tokens=more.pop("min_tokens", 0), seed=more.pop("seed", 0))
    return Request(request_id, tuple(prompt), sampling, max_tokens, frozenset(stops), **more)


def answer(request: Request) -> list[int]:
    """Return the output of the request when it runs alone."""
    return expected(request.prompt, request.sampling, request.max_tokens, VOCABULARY)


class CoreHarness:
    """A core, which is checked after each call, and a joined worker. Keywords are fields of CoreLimits and
    PolicySettings, and sizes of the worker after `worker_`.
    """

    def __init__(self, *, is_bad: Callable[[Sequence[int]], bool] = lambda context: False, **sizes: Any) -> None:
        worker = {k.removeprefix("worker_"): sizes.pop(k) for k in list(sizes) if k.startswith("worker_")}
        worker = {"num_blocks": 64, "block_size": 4, "num_slots": 8, "vocab_size": VOCABULARY} | worker
        policy = PolicySettings(**{k: sizes.pop(k) for k in _POLICY if k in sizes})
        self.core = Scheduler(CoreLimits(policy=policy, **{"pipeline_depth": 1} | sizes))
        self.worker, self.is_bad = worker, is_bad
        self.now, self.epoch = 0.0, 0
        self.events: list[Event] = []
        self.seconds_per_step, self.seconds_per_token = 0.0, 0.0
        self.plans: list[StepPlan] = []
        self.flights: deque[StepPlan] = deque()
        self.join()

    def submit(self, request_id: str, prompt: int | Sequence[int], max_tokens: int = 4, **more: Any) -> Request:
        """Submit `make_request(...)` and return it."""
        request = make_request(request_id, prompt, max_tokens, **more)
        self.record(self.core.submit(request, self.now))
        return request

    def outputs(self, request_id: str) -> list[int]:
        """Return the request's tokens so far."""
        return [t for e in self.events if isinstance(e, TokensReady) and e.request_id == request_id for t in e.tokens]

    def end(self, request_id: str) -> Finished | Failed:
        """Return the last event of the request."""
        (end,) = [e for e in self.events if isinstance(e, (Finished, Failed)) and e.request_id == request_id]
        return end

    def finished(self, request_id: str) -> Finished:
        """Return the end of a request that must have finished."""
        end = self.end(request_id)
        assert isinstance(end, Finished), end
        return end

    def error(self, request_id: str) -> LineclearError:
        """Return the error of a request that must have failed."""
        end = self.end(request_id)
        assert isinstance(end, Failed), end
        return end.error

    def started(self) -> list[str]:
        """Return request ids in the order of their first start."""
        return [e.request_id for e in self.events if isinstance(e, Started)]

    def record(self, events: list[Event]) -> list[Event]:
        """Check the core and store the events of a call, one per request."""
        invariants.check(self.core)
        flattened = list(flat(events))
        self.events += flattened
        return flattened

    def join(self, **worker: Any) -> None:
        """Join a new worker in place of the last one."""
        self.record(self.core.worker_lost(self.epoch, self.now))
        self.epoch += 1
        self.runner = ToyRunner(**self.worker | worker, is_bad=self.is_bad)
        self.flights.clear()
        self.record(self.core.worker_joined(self.runner.hello(self.epoch), self.now))

    def lose(self, loss: WorkerLoss = WorkerLoss.CLEAN) -> None:
        self.flights.clear()
        self.record(self.core.worker_lost(self.epoch, self.now, loss))

    def cancel(self, request_id: str) -> None:
        self.record(self.core.cancel(request_id, None, self.now))

    def plan(self) -> StepPlan | None:
        """Plan a step and put it in flight."""
        plan = self.core.plan(self.epoch, self.now)
        self.record(self.core.drain_events())
        if plan is not None:
            self.plans.append(plan)
            self.flights.append(plan)
        return plan

    def compute(self) -> StepResult:
        """Compute the oldest plan in flight on the worker."""
        plan = self.flights.popleft()
        seconds = self.seconds_per_step + self.seconds_per_token * sum(row.num_tokens for row in plan.rows)
        return replace(self.runner.launch(plan).result(), step_seconds=seconds)

    def apply(self, **changes: Any) -> list[Event]:
        """Compute the oldest plan in flight and apply its result with `changes`."""
        return self.record(self.core.apply(replace(self.compute(), **changes), self.now))

    def step(self) -> StepPlan | None:
        """Plan once, compute and apply."""
        plan = self.plan()
        if self.flights:
            self.apply()
        return plan

    def run(self, max_steps: int = 1000) -> None:
        """Run until every request has ended."""
        while self.core.num_live:
            max_steps -= 1
            assert max_steps > 0, "requests do not end"
            if self.plan() is None and not self.flights:
                moment = self.core.next_deadline()
                assert moment is not None, "requests wait and no deadline is set"
                self.now = moment
                self.record(self.core.expire(self.now))
            elif self.flights:
                self.apply()
        while self.flights:
            self.apply()

    def rows(self, plan: StepPlan | None) -> list[tuple[int, int, int]]:
        """Return (slot, start, end) of each row."""
        return [] if plan is None else [(r.slot, r.start, r.start + r.num_tokens) for r in plan.rows]

    @property
    def counters(self) -> Any:
        return self.core.snapshot().counters
