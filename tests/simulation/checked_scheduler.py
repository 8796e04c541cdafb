"""A core with its oracle: each call goes to the core, then to the oracle, and into the transcript."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from simulation.invariant_error import InvariantViolated, require
from simulation.oracle import Oracle
from simulation.scenario import Scenario, poison
from support.events import TokensReady, flat

from lineclear import errors
from lineclear.scheduler.core import invariants
from lineclear.scheduler.core.events import Admitted, Event, Failed, Finished, Started
from lineclear.scheduler.core.inflight_step import BadResult
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.codec import decode, encode
from lineclear.wire.messages import Hello, StepError, StepPlan, StepResult


class CheckedScheduler:
    """With `checked`, the oracle and the invariants check every call. Without, messages may cross the wire codec.

    `live` has prompt and output so far of live requests, `recent` those of a few that ended.
    """

    def __init__(self, scenario: Scenario, *, checked: bool) -> None:
        self.scenario = scenario
        self.core = Scheduler(scenario.limits)
        self.oracle = Oracle(scenario) if checked else None
        self.transcript: list[tuple[Any, ...]] = []
        self.counts: Counter[str] = Counter()
        self.live: dict[str, tuple[int, ...]] = {}
        self.started: set[str] = set()
        self.recent: deque[tuple[int, ...]] = deque(maxlen=4)
        self.last_result: StepResult | None = None
        self.on_event: Callable[[Any], object] = lambda event: None  # called with each event of a request
        # Whether poison is the only cause of crashes.
        self.only_poison = not ({"crash", "replace", "step_error"} & scenario.weights.keys() or scenario.unsent)
        self._codec = scenario.codec and not checked
        self._poisonous: dict[str, str] = {}  # effect of live requests on their worker

    # --- calls ------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> errors.LineclearError | None:
        self.transcript.append((now, "submit", request.request_id, request.prompt, request.max_tokens, request.output))
        outcome: list[Event] | errors.LineclearError
        try:
            outcome = self.core.submit(request, now)
            (admitted,) = outcome
            assert isinstance(admitted, Admitted)
            assert admitted.request_id == request.request_id
            self.live[request.request_id] = request.prompt + request.output
            effect = poison(request.sampling.seed, self.scenario.poison_per_mille)
            self._poisonous[request.request_id] = effect
            self.counts["poison"] += effect != ""
        except errors.LineclearError as error:
            outcome = error
            self.counts[type(error).__name__] += 1
            self.transcript.append((now, "rejected", type(error)))
        self._follow(lambda oracle: oracle.on_submit(request, now, outcome))
        return outcome if isinstance(outcome, errors.LineclearError) else None

    def submit_together(self, requests: Sequence[Request], now: float) -> errors.LineclearError | None:
        """Submit a request and its siblings, all or none; return the error if the first is rejected."""
        for request in requests:
            error = self.submit(request, now)
            if error is not None:
                require(request is requests[0], "I28", "what the core accepts of a request, it accepts of its siblings")
                return error
        if self.oracle:
            self.oracle.on_siblings(request.request_id for request in requests)
        return None

    def cancel(self, request_id: str, error: errors.LineclearError | None, now: float) -> None:
        events = self.core.cancel(request_id, error, now)
        self._record("cancel", events, now)
        kind = errors.Cancelled if error is None else type(error)
        self._follow(lambda oracle: oracle.on_cancel(request_id, kind, now, events))

    def finish(self, request_id: str, num_tokens: int, now: float) -> None:
        events = self.core.finish_at_stop_string(request_id, num_tokens, now)
        self._record("finish", events, now)
        self._follow(lambda oracle: oracle.on_finish(request_id, num_tokens, now, events))

    def expire(self, now: float) -> None:
        events = self.core.expire(now)
        self._record("expire", events, now)
        if self.oracle:
            self.oracle.on_expire(now, events)
            if events:
                self.check()

    def plan(self, epoch: int, now: float) -> StepPlan | None:
        """Plan a step of a worker. The next call checks what an answer of None left behind."""
        plan = self.core.plan(epoch, now)
        events = self.core.drain_events()
        if plan is not None:
            self.transcript.append((now, "plan", plan))
            self.counts["copies"] += len(plan.copy_blocks)
            plan = self.transfer(plan)
        self._record("plan", events, now)
        if self.oracle:
            self.oracle.plan_checks.on_plan(epoch, plan, now, events)
            if plan is not None or events:
                self.check()
        return plan

    def apply(self, result: StepResult, now: float) -> None:
        self.transcript.append((now, "result", result))
        events = self.core.apply(result, now)
        self.counts["drafted"] += sum(result.num_drafted)
        self.counts["accepted"] += len(result.tokens) - len(result.counts) if result.counts else 0
        self.last_result = result
        self._record("apply", events, now)
        self._follow(lambda oracle: oracle.result_checks.on_apply(result, now, events))

    def apply_invalid(self, result: StepResult, now: float) -> None:
        """Apply an invalid result, which must change nothing."""
        before = self.core.snapshot()
        try:
            self.core.apply(result, now)
        except BadResult:
            self.counts["BadResult"] += 1
        else:
            raise InvariantViolated("I9", "an invalid result is refused")
        require(self.core.snapshot() == before, "I9", "a refused result changes nothing")
        self.check()

    def on_step_error(self, error: StepError, now: float) -> None:
        events = self.core.on_step_error(error, now)
        self._record("on_step_error", events, now)
        self._follow(lambda oracle: oracle.on_step_error(error, now, events))

    def join(self, hello: Hello, now: float) -> None:
        events = self.core.worker_joined(hello, now)
        self._record("worker_joined", events, now)
        self._follow(lambda oracle: oracle.on_worker_joined(hello, now, events))

    def lose(self, epoch: int, loss: WorkerLoss, now: float) -> None:
        events = self.core.worker_lost(epoch, now, loss)
        self._record("worker_lost", events, now)
        self._follow(lambda oracle: oracle.on_worker_lost(epoch, now, events, loss))

    def switch(self, limits: CoreLimits, now: float) -> None:
        self.transcript.append((now, "switch", limits))
        self.core.switch(limits, now)
        self.counts["switch"] += 1
        self._follow(lambda oracle: oracle.on_switch(limits))

    def load_adapter(self, key: bytes, now: float) -> int | None:
        """Load an adapter and return its index; None if there is none left."""
        index: int | None = None
        try:
            index = self.core.load_adapter(key, now)
        except errors.AdapterLimitReached:
            self.counts["AdapterLimitReached"] += 1
        self.transcript.append((now, "load_adapter", key, index))
        self._follow(lambda oracle: oracle.state.adapters.on_load(key, index, oracle.state.live.values()))
        return index

    def unload_adapter(self, key: bytes, now: float) -> None:
        num_uses = self.core.unload_adapter(key, now)
        self.counts["unloaded in use"] += num_uses > 0
        self.transcript.append((now, "unload_adapter", key, num_uses))
        self._follow(lambda oracle: oracle.state.adapters.on_unload(key, num_uses, oracle.state.live.values()))

    def clear_prefix_cache(self, now: float) -> None:
        self.core.clear_prefix_cache(now)
        self._follow(lambda oracle: oracle.on_clear_prefix_cache())

    def drain(self, now: float) -> None:
        self.core.drain(now)
        self.transcript.append((now, "drain"))
        self._follow(lambda oracle: oracle.on_drain())

    def transfer(self, message: Any) -> Any:
        """Return the message as the other process decodes it."""
        return decode(encode(message)) if self._codec else message

    def _follow(self, call: Callable[[Oracle], object]) -> None:
        """Have the oracle check a call, with `checked`."""
        if self.oracle:
            call(self.oracle)
            self.check()

    def check(self) -> None:
        """Check the invariants and the snapshot, with `checked`."""
        if self.oracle:
            invariants.check(self.core)
            self.oracle.check_snapshot(self.core.snapshot())

    # --- events -----------------------------------------------------------------------------------------------------

    def _record(self, call: str, events: list[Event], now: float) -> None:
        for event in flat(events):
            if isinstance(event, TokensReady):
                self.live[event.request_id] += event.tokens
            elif isinstance(event, (Finished, Failed)):
                self.recent.append(self.live.pop(event.request_id))
                self._check_blame(event, self._poisonous.pop(event.request_id))
                self.started.discard(event.request_id)
            elif isinstance(event, Started):
                self.started.add(event.request_id)
            entry: Any = event
            if isinstance(event, Failed):
                entry = (Failed, event.request_id, type(event.error), str(event.error), event.stats)
            self.counts[type(event).__name__] += 1
            self.transcript.append((now, call, entry))
            self.on_event(event)

    def _check_blame(self, event: Finished | Failed, effect: str) -> None:
        """Check that only poison requests fail for a crash."""
        error = event.error if isinstance(event, Failed) else None
        if self.only_poison and isinstance(error, errors.PoisonRequest | errors.DeviceOutOfMemory):
            require(effect != "", "isolation", "no request fails for the crash of another")
        if isinstance(error, errors.PoisonRequest | errors.NoTokenAllowed):
            self.counts[type(error).__name__] += 1
