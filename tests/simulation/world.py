"""One run: a scheduler, toy workers that fail, a clock that jumps, and an oracle that watches every call.

The world plays the engine: after each thing that happens it lets deadlines pass and pulls plans, sometimes late. The
same seed gives the same run, bit for bit.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import Any

from simulation.breach import Breach, hold
from simulation.oracle import Oracle, is_bad
from simulation.scenario import Capacity, Scenario, draw, draw_capacity, draw_request, poison
from support.events import flat
from support.toy import ToyFlight, ToyRunner

from lineclear.errors import Cancelled, DeviceOutOfMemory, Drained, LineclearError, PoisonRequest
from lineclear.scheduler.scheduling.core import BadResult, Scheduler
from lineclear.scheduler.scheduling.events import Admitted, Event, Failed, Finished, Started, TokensReady
from lineclear.scheduler.scheduling.suspects import Loss
from lineclear.wire.codec import decode, encode
from lineclear.wire.types import StepError, StepErrorKind, StepPlan, StepResult

POISON = -2
"""What cells of a sequence hold whose logits were not finite. Reading one changes the answer of whoever reads it."""


class SoiledRunner(ToyRunner):
    """Leaves poison where a sequence whose logits were not finite wrote, and behind, as a device leaves NaN."""

    def launch(self, plan: StepPlan) -> ToyFlight:
        """Run the plan; then soil."""
        flight = super().launch(plan)
        sampling = [row for row in plan.rows if row.sample]
        for index in flight.result().bad_rows:
            row, size = sampling[index], self.block_size
            blocks = self.slots[row.slot].blocks
            for position in range(row.start, len(blocks) * size):
                self.cells[blocks[position // size]][position % size] = POISON
        return flight


class Worker:
    """A toy worker behind two pipes: plans sent to it, results on their way back."""

    def __init__(self, epoch: int, capacity: Capacity, vocab_size: int, bad_per_mille: int) -> None:
        self.runner = SoiledRunner(
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            num_slots=capacity.num_slots,
            max_model_len=capacity.max_model_len,
            vocab_size=vocab_size,
            max_step_tokens=capacity.max_step_tokens,
            is_bad=lambda context: is_bad(context, bad_per_mille),
        )
        self.hello = self.runner.hello(epoch)
        self.plans: deque[StepPlan] = deque()
        self.results: deque[StepResult | StepError | None] = deque()  # None: its death
        self.broken = False  # a step failed: it computes nothing more


@dataclass(frozen=True, slots=True)
class Report:
    """What a run came to. `transcript` is all that went in and out, in order."""

    transcript: list[tuple[Any, ...]]
    happened: Counter[str]


class World:
    """Runs one scenario. With `watch`, everything is checked after every call; without, it only happens."""

    def __init__(self, scenario: Scenario, *, watch: bool) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed ^ 0x5EED)
        self.core = Scheduler(scenario.limits)
        self.oracle = Oracle(scenario) if watch else None
        self.codec = scenario.codec and not watch
        self.now = self.rng.choice((0.0, 1.0, 123456.789))
        self.worker: Worker | None = None
        self.epochs = 0
        self.numbers = 0
        self.live: dict[str, tuple[int, ...]] = {}  # prompt and answer so far
        self.poisonous: dict[str, str] = {}  # what live requests do to their worker
        self.peaceful = not {"crash", "replace", "oom"} & scenario.weights.keys()  # but for poison
        self.started: set[str] = set()
        self.ended: deque[tuple[int, ...]] = deque(maxlen=4)
        self.last_result: StepResult | None = None
        self.transcript: list[tuple[Any, ...]] = []
        self.happened: Counter[str] = Counter()

    def _poison_in(self, plan: StepPlan) -> str:
        """What a request in `plan` does to the worker."""
        assert self.worker is not None
        slots = self.worker.runner.slots
        known = {slot: (state.sampling.seed, state.prompt_len) for slot, state in slots.items()}
        known |= {init.slot: (init.sampling.seed, init.prompt_len) for init in plan.inits}
        for row in plan.rows:
            number, prompt_len = known[row.slot]
            effect = poison(number, self.scenario.poison_per_mille)
            if effect and row.start + row.num_tokens >= prompt_len + number % 4:
                return effect
        return ""

    def run(self) -> Report:
        """From the first worker to the last request's end."""
        names = list(self.scenario.weights)
        weights = list(self.scenario.weights.values())
        if self.rng.random() < 0.8:
            self._join(self.scenario.capacity)
        for name in self.rng.choices(names, weights, k=self.scenario.ticks):
            self._let_time_pass()
            getattr(self, f"_do_{name}")()
            self._turn(late=self.rng.random() < self.scenario.late)
            for _ in range(self.scenario.pace):
                self._do_launch()
                self._do_deliver()
                self._turn(late=self.rng.random() < self.scenario.late)
            if self.worker is None and self.rng.random() < 0.3:
                self._join(self._next_capacity())
                self._turn()
        if self.scenario.liveness:
            self._quiet()
        else:
            self._abandon()
        self._all_is_quiet()
        return Report(self.transcript, self.happened)

    # --- the engine's part ------------------------------------------------------------------------------------------

    def _turn(self, late: bool = False) -> None:
        self._let_deadlines_pass()
        most = self.rng.randrange(2) if late else 99
        preempted = self.happened["Preempted"]
        while most and (plan := self._plan()) is not None:
            most -= 1
            assert self.worker is not None
            self.worker.plans.append(plan)
            if self.happened["Preempted"] > preempted and self.rng.random() < self.scenario.hang_up:
                self._cancel(self.rng.choice([i for i in self.live if i in self.started] or ["nobody"]), None)
        if self.oracle:
            self.oracle.next_moment(self.core.next_deadline(), self.now, planned_to_the_end=most > 0)

    def _let_deadlines_pass(self) -> None:
        events = self.core.expire(self.now)
        self._saw("expire", events)
        if self.oracle:
            self.oracle.expired(self.now, events)
            if events:
                self._settled()

    def _plan(self) -> StepPlan | None:
        plan = self.core.plan(self.now)
        events = self.core.take_events()
        if plan is not None:
            self.transcript.append((self.now, "plan", plan))
            if self.codec:
                plan = self._through_the_wire(plan)
        self._saw("plan", events)
        if self.oracle:
            self.oracle.planned(plan, self.now, events)
            self._settled()
        return plan

    def _saw(self, call: str, events: list[Event]) -> None:
        for event in flat(events):
            if isinstance(event, TokensReady):
                self.live[event.request_id] += event.tokens
            elif isinstance(event, (Finished, Failed)):
                self.ended.append(self.live.pop(event.request_id))
                self._judge(event, self.poisonous.pop(event.request_id))
                self.started.discard(event.request_id)
            elif isinstance(event, Started):
                self.started.add(event.request_id)
            shown: Any = event
            if isinstance(event, Failed):
                shown = (Failed, event.request_id, type(event.error), str(event.error), event.record)
            self.happened[type(event).__name__] += 1
            self.transcript.append((self.now, call, shown))

    def _judge(self, event: Finished | Failed, effect: str) -> None:
        """Poison fails, and nobody else is blamed for it."""
        accused = isinstance(event, Failed) and isinstance(event.error, PoisonRequest | DeviceOutOfMemory)
        if self.peaceful and accused:
            hold(effect != "", "isolation", "nobody pays for another's crash")
        if isinstance(event, Failed) and isinstance(event.error, PoisonRequest):
            self.happened["PoisonRequest"] += 1

    def _settled(self) -> None:
        assert self.oracle is not None
        self.core.check()
        self.oracle.settled(self.core.snapshot())

    def _through_the_wire(self, message: Any) -> Any:
        return decode(encode(message))

    def _let_time_pass(self) -> None:
        kind = self.rng.random()
        if kind < 0.4:
            self.now += self.rng.random() * 0.02
        elif kind < 0.6:
            self.now += self.rng.random() * 0.3
        elif kind < 0.7 and (moment := self.core.next_deadline()) is not None:
            self.now = max(self.now, moment)

    # --- what can happen --------------------------------------------------------------------------------------------

    def _do_idle(self) -> None:
        pass

    def _do_submit(self) -> None:
        self._submit()

    def _do_burst(self) -> None:
        for _ in range(self.rng.randint(2, 12)):
            self._submit()

    def _submit(self) -> None:
        request = draw_request(self.rng, self.scenario, self.numbers, self.now, self.ended)
        self.numbers += 1
        self.transcript.append(
            (self.now, "submit", request.request_id, request.prompt, request.max_tokens, request.output)
        )
        outcome: list[Event] | LineclearError
        try:
            outcome = self.core.submit(request, self.now)
            assert outcome == [Admitted(request.request_id)]
            self.live[request.request_id] = request.prompt + request.output
            effect = poison(request.sampling.seed, self.scenario.poison_per_mille)
            self.poisonous[request.request_id] = effect
            self.happened["poison"] += effect != ""
        except LineclearError as error:
            outcome = error
            self.happened[type(error).__name__] += 1
            self.transcript.append((self.now, "refused", type(error)))
        if self.oracle:
            self.oracle.submitted(request, self.now, outcome)
            self._settled()

    def _someone(self) -> str:
        ids = list(self.live)
        return self.rng.choice(ids) if ids and self.rng.random() < 0.9 else "nobody"

    def _do_cancel(self) -> None:
        self._cancel(self._someone(), self.rng.choice((None, Drained("the server left"))))

    def _cancel(self, request_id: str, error: LineclearError | None) -> None:
        events = self.core.cancel(request_id, error, self.now)
        self._saw("cancel", events)
        if self.oracle:
            self.oracle.cancelled(request_id, Cancelled if error is None else type(error), self.now, events)
            self._settled()

    def _do_stop(self) -> None:
        """The shell found a stop string."""
        request_id, num_tokens = self._someone(), self.rng.randrange(4)
        events = self.core.finish(request_id, num_tokens, self.now)
        self._saw("finish", events)
        if self.oracle:
            self.oracle.stopped(request_id, num_tokens, self.now, events)
            self._settled()

    def _do_launch(self) -> None:
        """The worker takes a plan up and computes it."""
        worker = self.worker
        if worker is None or not worker.plans:
            return
        plan = worker.plans.popleft()
        if worker.broken:
            return
        if effect := self._poison_in(plan):
            worker.broken = True
            memory = StepError(plan.epoch, plan.step, StepErrorKind.OUT_OF_MEMORY, "toy")
            worker.results.append(memory if effect == "memory" else None)
            return
        base, per_token, per_kv = self.scenario.step_seconds
        tokens, kv_tokens = plan.num_tokens, sum(sum(range(row.start, row.start + row.num_tokens)) for row in plan.rows)
        seconds = base + per_token * tokens + per_kv * kv_tokens
        result = worker.runner.launch(plan).result()
        result = replace(result, step_seconds=seconds * self.rng.uniform(1.0, 1.2))
        worker.results.append(self._through_the_wire(result) if self.codec else result)

    def _do_deliver(self) -> None:
        """What comes next from the worker reaches the core."""
        worker = self.worker
        if worker is None or not worker.results:
            return
        result = worker.results.popleft()
        # Counted when the core hears of it; what a worker meant to say before it was replaced costs nobody anything.
        if result is None:
            self.happened["fallen"] += 1
            self._lose(Loss.BROKE)
        elif isinstance(result, StepError):
            self.happened["fallen"] += 1
            self._fail_step(result)
        else:
            self._apply(result)

    def _apply(self, result: StepResult) -> None:
        self.transcript.append((self.now, "result", result))
        events = self.core.apply(result, self.now)
        self.last_result = result
        self._saw("apply", events)
        if self.oracle:
            self.oracle.applied(result, self.now, events)
            self._settled()

    def _fail_step(self, error: StepError) -> None:
        events = self.core.fail_step(error, self.now)
        self._saw("fail_step", events)
        if self.oracle:
            self.oracle.failed_step(error, self.now, events)
            self._settled()
        self._lose(Loss.LEFT if error.kind is StepErrorKind.OUT_OF_MEMORY else Loss.BROKE)

    def _do_oom(self) -> None:
        """A step fails instead of running; the worker has to join again."""
        worker = self.worker
        if worker is not None and worker.plans and not worker.broken:
            plan = worker.plans.popleft()
            worker.broken = True
            kind = self.rng.choice((StepErrorKind.OUT_OF_MEMORY, StepErrorKind.OUT_OF_MEMORY, StepErrorKind.EXCEPTION))
            worker.results.append(StepError(plan.epoch, plan.step, kind, "toy"))
            self.happened["oom"] += 1

    def _do_oov(self) -> None:
        """A result on its way back names a token that does not exist."""
        worker = self.worker
        if worker is not None and worker.results:
            result = worker.results[-1]
            if isinstance(result, StepResult) and result.tokens:
                tokens = list(result.tokens)
                tokens[self.rng.randrange(len(tokens))] = self.rng.choice((-1, self.scenario.vocab_size, 2**31 - 1))
                worker.results[-1] = replace(result, tokens=tuple(tokens))
                self.happened["oov"] += 1

    def _do_malformed(self) -> None:
        """A result that cannot be comes before the right one."""
        worker = self.worker
        if worker is not None and worker.results and isinstance(worker.results[0], StepResult):
            good = worker.results[0]
            n = len(good.tokens)
            bad = self.rng.choice(
                (
                    replace(good, step=good.step + 1),
                    replace(good, step=good.step - 1),
                    replace(good, epoch=good.epoch + 1),
                    replace(good, tokens=(*good.tokens, 1)),
                    replace(good, tokens=good.tokens[:-1], step=good.step if n else good.step + 1),
                    replace(good, logprobs=(None,) * (n + 1)),
                    replace(good, bad_rows=frozenset({n})),
                    replace(good, bad_rows=frozenset({-1})),
                    replace(good, step_seconds=float("nan")),
                    replace(good, step_seconds=float("inf")),
                    replace(good, step_seconds=-1.0),
                )
            )
            self._must_refuse(bad)

    def _do_stale(self) -> None:
        """A result comes twice, or after its worker was lost."""
        if self.last_result is not None:
            self._must_refuse(self.last_result)

    def _must_refuse(self, result: StepResult) -> None:
        before = self.core.snapshot()
        try:
            self.core.apply(result, self.now)
        except BadResult:
            self.happened["BadResult"] += 1
        else:
            raise Breach("I9", "a result that cannot be is refused")
        hold(self.core.snapshot() == before, "I9", "nothing of a refused result is applied")
        if self.oracle:
            self._settled()

    def _do_crash(self) -> None:
        if self.worker is not None:
            self.happened["crash"] += 1
            self._lose(self.rng.choice(tuple(Loss)))

    def _do_replace(self) -> None:
        """Another worker joins and nobody told that the old one went."""
        if self.worker is not None:
            self.happened["replace"] += 1
            self._join(self._next_capacity())

    def _do_forget(self) -> None:
        self.core.forget_prefixes()
        if self.oracle:
            self.oracle.forgot()
            self._settled()

    def _do_drain(self) -> None:
        if self.rng.random() < 0.1:
            self._drain()

    def _drain(self) -> None:
        self.core.drain(self.now)
        self.transcript.append((self.now, "drain"))
        if self.oracle:
            self.oracle.draining = True
            self._settled()

    def _next_capacity(self) -> Capacity:
        return draw_capacity(self.rng) if self.rng.random() < self.scenario.change else self.scenario.capacity

    def _join(self, capacity: Capacity) -> None:
        self.epochs += 1
        scenario = self.scenario
        self.worker = Worker(1000 + self.epochs, capacity, scenario.vocab_size, scenario.bad_per_mille)
        events = self.core.reset(self.worker.hello, self.now)
        self._saw("reset", events)
        if self.oracle:
            self.oracle.reset(self.worker.hello, self.now, events)
            self._settled()

    def _lose(self, loss: Loss) -> None:
        self.worker = None
        events = self.core.reset(None, self.now, loss)
        self._saw("reset", events)
        if self.oracle:
            self.oracle.reset(None, self.now, events, loss)
            self._settled()

    # --- the end ----------------------------------------------------------------------------------------------------

    def _quiet(self) -> None:
        """No more faults: everything ends, in a bounded number of steps, and without anybody calling."""
        if self.worker is None or self.worker.broken:
            self._join(self._next_capacity())
        if self.scenario.limits.strategy == "fixed_size" or self.rng.random() < 0.3:
            self._drain()
        worker = self.worker
        assert worker is not None
        steps = self.oracle.most_steps() if self.oracle else 10**9
        self._turn()
        while self.core.num_live:
            if self.worker is None:
                self._join(self.scenario.capacity)
                self._turn()
                continue
            worker = self.worker
            if worker.plans and (not worker.results or self.rng.random() < 0.5):
                self._do_launch()
                continue
            if worker.results:
                self.now += self.rng.random() * 0.02
                self._do_deliver()
                steps -= 1
                hold(steps > 0, "I13", "all ends within the bound of steps")
                if self.worker is None:
                    continue
            else:
                moment = self.core.next_deadline()
                hold(moment is not None, "I13", "somebody waits and nothing will ever happen")
                assert moment is not None
                self.now = moment
            self._turn()

    def _abandon(self) -> None:
        """The callers hang up, one after the other, while the worker goes on."""
        for request_id in list(self.live):
            self._cancel(request_id, None)
            self._turn()

    def _all_is_quiet(self) -> None:
        while self.worker is not None and (self.worker.plans or self.worker.results):
            self._do_launch()
            self._do_deliver()
        self._turn()
        if self.peaceful:
            worst = (2 + self.scenario.limits.max_lone_crashes) * self.happened["poison"]
            hold(self.happened["fallen"] <= worst, "isolation", "a poisonous request costs three workers")
        snapshot = self.core.snapshot()
        hold(not self.live and self.core.num_live == 0, "I22", "all have ended")
        idle = (0, 0, 0, 0, 0)
        gauges = (
            snapshot.requests_waiting,
            snapshot.tokens_waiting,
            snapshot.requests_running,
            snapshot.steps_in_flight,
            snapshot.blocks_used,
        )
        hold(gauges == idle, "I22", "nothing is held when nobody lives")
        hold(self.core.next_deadline() is None, "I22", "no timer is left")
        hold(self.core.plan(self.now) is None, "I22", "nothing is planned for nobody")
        # Containers nothing outside shows: bounded by who lives, whatever there was.
        hold(len(self.core._deadlines) == 0, "I23", "the heap of deadlines is empty")
        for queue in (self.core._fresh, self.core._resuming):
            hold(len(queue._heap) <= 65, "I23", "the heap of a queue keeps few entries of the dead")


def run_seed(seed: int, *, twice: bool = True) -> Report:
    """Run a seed watched, and once more unwatched: both must say the same. Raises AssertionError on any breach."""
    scenario = draw(seed)
    report = World(scenario, watch=True).run()
    if twice:
        again = World(scenario, watch=False).run()
        hold(report.transcript == again.transcript, "I19", "the same calls give the same plans and events")
    return report
