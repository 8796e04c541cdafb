"""A scheduler and whoever watches it: every call goes to the core, then to the oracle, and into the transcript.

Decides nothing of what happens; that is `world`'s.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from simulation.invariant_error import Breach, hold
from simulation.oracle import Oracle
from simulation.scenario import Scenario, poison
from support.events import flat

from lineclear.errors import Cancelled, DeviceOutOfMemory, LineclearError, PoisonRequest
from lineclear.scheduler.core import invariants
from lineclear.scheduler.core.events import Admitted, Event, Failed, Finished, Started, TokensReady
from lineclear.scheduler.core.inflight_step import BadResult
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.codec import decode, encode
from lineclear.wire.messages import Hello, StepError, StepPlan, StepResult


class Watched:
    """With `watch`, everything is checked after every call; without, messages may go through the codec instead.

    `live` has the prompt and the answer so far of all who live, `told` those of some who have ended.
    """

    def __init__(self, scenario: Scenario, *, watch: bool) -> None:
        self.scenario = scenario
        self.core = Scheduler(scenario.limits)
        self.oracle = Oracle(scenario) if watch else None
        self.transcript: list[tuple[Any, ...]] = []
        self.happened: Counter[str] = Counter()
        self.live: dict[str, tuple[int, ...]] = {}
        self.started: set[str] = set()
        self.told: deque[tuple[int, ...]] = deque(maxlen=4)
        self.last_result: StepResult | None = None
        self.is_peaceful = not {"crash", "replace", "oom"} & scenario.weights.keys()  # but for poison
        self._codec = scenario.codec and not watch
        self._poisonous: dict[str, str] = {}  # what live requests do to their worker

    # --- what goes in -----------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Queue it, or be refused."""
        self.transcript.append((now, "submit", request.request_id, request.prompt, request.max_tokens, request.output))
        outcome: list[Event] | LineclearError
        try:
            outcome = self.core.submit(request, now)
            assert outcome == [Admitted(request.request_id)]
            self.live[request.request_id] = request.prompt + request.output
            effect = poison(request.sampling.seed, self.scenario.poison_per_mille)
            self._poisonous[request.request_id] = effect
            self.happened["poison"] += effect != ""
        except LineclearError as error:
            outcome = error
            self.happened[type(error).__name__] += 1
            self.transcript.append((now, "refused", type(error)))
        if self.oracle:
            self.oracle.submitted(request, now, outcome)
            self._settled()

    def cancel(self, request_id: str, error: LineclearError | None, now: float) -> None:
        """End it without an answer."""
        events = self.core.cancel(request_id, error, now)
        self._saw("cancel", events, now)
        if self.oracle:
            self.oracle.cancelled(request_id, Cancelled if error is None else type(error), now, events)
            self._settled()

    def finish(self, request_id: str, num_tokens: int, now: float) -> None:
        """End it with so much of its answer."""
        events = self.core.finish(request_id, num_tokens, now)
        self._saw("finish", events, now)
        if self.oracle:
            self.oracle.stopped(request_id, num_tokens, now, events)
            self._settled()

    def expire(self, now: float) -> None:
        """Let deadlines pass."""
        events = self.core.expire(now)
        self._saw("expire", events, now)
        if self.oracle:
            self.oracle.expired(now, events)
            if events:
                self._settled()

    def plan(self, now: float) -> StepPlan | None:
        """The next step, if there is one."""
        plan = self.core.plan(now)
        events = self.core.drain_events()
        if plan is not None:
            self.transcript.append((now, "plan", plan))
            plan = self.sent(plan)
        self._saw("plan", events, now)
        if self.oracle:
            self.oracle.planned(plan, now, events)
            self._settled()
        return plan

    def apply(self, result: StepResult, now: float) -> None:
        """Take in what a step gave."""
        self.transcript.append((now, "result", result))
        events = self.core.apply(result, now)
        self.last_result = result
        self._saw("apply", events, now)
        if self.oracle:
            self.oracle.applied(result, now, events)
            self._settled()

    def refuse(self, result: StepResult, now: float) -> None:
        """Take in a result that cannot be, which must change nothing."""
        before = self.core.snapshot()
        try:
            self.core.apply(result, now)
        except BadResult:
            self.happened["BadResult"] += 1
        else:
            raise Breach("I9", "a result that cannot be is refused")
        hold(self.core.snapshot() == before, "I9", "nothing of a refused result is applied")
        if self.oracle:
            self._settled()

    def fail_step(self, error: StepError, now: float) -> None:
        """A step failed."""
        events = self.core.on_step_error(error, now)
        self._saw("fail_step", events, now)
        if self.oracle:
            self.oracle.failed_step(error, now, events)
            self._settled()

    def join(self, hello: Hello, now: float) -> None:
        """A worker is there, and another one is not any more."""
        self._reset(hello, now, WorkerLoss.CLEAN)

    def lose(self, loss: WorkerLoss, now: float) -> None:
        """The worker is gone."""
        self._reset(None, now, loss)

    def _reset(self, hello: Hello | None, now: float, loss: WorkerLoss) -> None:
        events = self.core.on_worker_change(hello, now, loss)
        self._saw("reset", events, now)
        if self.oracle:
            self.oracle.reset(hello, now, events, loss)
            self._settled()

    def forget(self) -> None:
        """Empty the prefix cache."""
        self.core.clear_prefix_cache()
        if self.oracle:
            self.oracle.forgot()
            self._settled()

    def drain(self, now: float) -> None:
        """Let nobody in any more."""
        self.core.drain(now)
        self.transcript.append((now, "drain"))
        if self.oracle:
            self.oracle.drained()
            self._settled()

    def sent(self, message: Any) -> Any:
        """What arrives of it at the other process."""
        return decode(encode(message)) if self._codec else message

    # --- what comes out ---------------------------------------------------------------------------------------------

    def _saw(self, call: str, events: list[Event], now: float) -> None:
        for event in flat(events):
            if isinstance(event, TokensReady):
                self.live[event.request_id] += event.tokens
            elif isinstance(event, (Finished, Failed)):
                self.told.append(self.live.pop(event.request_id))
                self._judge(event, self._poisonous.pop(event.request_id))
                self.started.discard(event.request_id)
            elif isinstance(event, Started):
                self.started.add(event.request_id)
            shown: Any = event
            if isinstance(event, Failed):
                shown = (Failed, event.request_id, type(event.error), str(event.error), event.record)
            self.happened[type(event).__name__] += 1
            self.transcript.append((now, call, shown))

    def _judge(self, event: Finished | Failed, effect: str) -> None:
        """Poison fails, and nobody else is blamed for it."""
        accused = isinstance(event, Failed) and isinstance(event.error, PoisonRequest | DeviceOutOfMemory)
        if self.is_peaceful and accused:
            hold(effect != "", "isolation", "nobody pays for another's crash")
        if isinstance(event, Failed) and isinstance(event.error, PoisonRequest):
            self.happened["PoisonRequest"] += 1

    def _settled(self) -> None:
        assert self.oracle is not None
        invariants.check(self.core)
        self.oracle.settled(self.core.snapshot())
