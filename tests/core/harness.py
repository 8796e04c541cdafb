"""A scheduler and a toy worker side by side, for examples: `step()` plans once, computes it and takes in the result."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from support.events import flat
from support.toy import ToyRunner, expected

from lineclear.scheduler.core import invariants
from lineclear.scheduler.core.events import Event, Failed, Finished, TokensReady
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
    """A request. A prompt given as a length is filled with tokens of its own; there are no stop tokens unless `eos`."""
    if isinstance(prompt, int):
        start = sum(request_id.encode())
        prompt = [(start + 7 * i) % VOCABULARY for i in range(prompt)]
    stops = () if eos is None else (eos,)
    sampling = Sampling(stop_ids=stops, min_tokens=more.pop("min_tokens", 0), seed=more.pop("seed", 0))
    return Request(request_id, tuple(prompt), sampling, max_tokens, frozenset(stops), **more)


def answer(request: Request) -> list[int]:
    """What the request gets when it runs alone."""
    return expected(request.prompt, request.sampling, request.max_tokens, VOCABULARY)


class Rig:
    """Limits by name, policies' numbers among them; the worker's sizes with `worker_` before them."""

    def __init__(self, *, is_bad: Callable[[Sequence[int]], bool] = lambda context: False, **sizes: Any) -> None:
        worker = {k.removeprefix("worker_"): sizes.pop(k) for k in list(sizes) if k.startswith("worker_")}
        worker = {"num_blocks": 64, "block_size": 4, "num_slots": 8, "vocab_size": VOCABULARY} | worker
        policy = PolicySettings(**{k: sizes.pop(k) for k in _POLICY if k in sizes})
        self.core = Scheduler(CoreLimits(policy=policy, **{"pipeline_depth": 1} | sizes))
        self.worker, self.is_bad = worker, is_bad
        self.now, self.epoch = 0.0, 0
        self.seconds_per_step, self.seconds_per_token = 0.0, 0.0
        self.events: list[Event] = []
        self.plans: list[StepPlan] = []
        self.flights: deque[StepPlan] = deque()
        self.join()

    def join(self, **worker: Any) -> None:
        """A (new) worker joins."""
        self.epoch += 1
        self.runner = ToyRunner(**self.worker | worker, is_bad=self.is_bad)
        self.flights.clear()
        self.saw(self.core.on_worker_change(self.runner.hello(self.epoch), self.now))

    def lose(self, loss: WorkerLoss = WorkerLoss.CLEAN) -> None:
        """The worker is lost."""
        self.flights.clear()
        self.saw(self.core.on_worker_change(None, self.now, loss))

    def submit(self, request_id: str, prompt: int | Sequence[int], max_tokens: int = 4, **more: Any) -> Request:
        """Submit `make_request(...)` and return it."""
        request = make_request(request_id, prompt, max_tokens, **more)
        self.saw(self.core.submit(request, self.now))
        return request

    def cancel(self, request_id: str) -> None:
        """The caller hangs up."""
        self.saw(self.core.cancel(request_id, None, self.now))

    def plan(self) -> StepPlan | None:
        """One plan, on its way to the worker."""
        plan = self.core.plan(self.now)
        self.saw(self.core.drain_events())
        if plan is not None:
            self.plans.append(plan)
            self.flights.append(plan)
        return plan

    def compute(self) -> StepResult:
        """The worker computes the oldest plan in flight."""
        plan = self.flights.popleft()
        seconds = self.seconds_per_step + self.seconds_per_token * sum(row.num_tokens for row in plan.rows)
        return replace(self.runner.launch(plan).result(), step_seconds=seconds)

    def apply(self, **changes: Any) -> list[Event]:
        """Compute the oldest plan in flight and take in its result."""
        return self.saw(self.core.apply(replace(self.compute(), **changes), self.now))

    def step(self) -> StepPlan | None:
        """Plan and compute once."""
        plan = self.plan()
        if self.flights:
            self.apply()
        return plan

    def run(self, most: int = 1000) -> None:
        """Until nobody lives."""
        while self.core.num_live:
            most -= 1
            assert most > 0, "it does not end"
            if self.plan() is None and not self.flights:
                moment = self.core.next_deadline()
                assert moment is not None, "somebody waits and nothing will happen"
                self.now = moment
                self.saw(self.core.expire(self.now))
            elif self.flights:
                self.apply()
        while self.flights:
            self.apply()

    def outputs(self, request_id: str) -> list[int]:
        """All tokens told so far."""
        return [t for e in self.events if isinstance(e, TokensReady) and e.request_id == request_id for t in e.tokens]

    def end(self, request_id: str) -> Finished | Failed:
        """How the request ended."""
        (end,) = [e for e in self.events if isinstance(e, (Finished, Failed)) and e.request_id == request_id]
        return end

    def rows(self, plan: StepPlan | None) -> list[tuple[int, int, int]]:
        """(slot, start, end) of each row."""
        return [] if plan is None else [(r.slot, r.start, r.start + r.num_tokens) for r in plan.rows]

    def started(self) -> list[str]:
        """Ids in the order of their first start."""
        return [e.request_id for e in self.events if type(e).__name__ == "Started"]

    @property
    def counters(self) -> Any:
        """The core's counters of now."""
        return self.core.snapshot().counters

    def saw(self, events: list[Event]) -> list[Event]:
        """Note what a call of the core gave, and look into the core."""
        invariants.check(self.core)
        told = list(flat(events))
        self.events += told
        return told
