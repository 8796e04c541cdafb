"""One run: a scheduler, toy workers that fail, a clock that jumps, and an oracle that watches every call.

The world plays the engine: after each thing that happens it lets deadlines pass and pulls plans, sometimes late. The
same seed gives the same run, bit for bit. What each call must answer, `oracle` says.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from simulation.checked_scheduler import Watched
from simulation.invariant_error import hold
from simulation.model_worker import Worker
from simulation.scenario import MODELS, Capacity, Scenario, draw, draw_capacity, draw_request, poison

from lineclear.errors import ShutdownInterrupted
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.wire.messages import StepError, StepErrorKind, StepPlan, StepResult


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
        self.scheduler = Watched(scenario, watch=watch)
        self.now = self.rng.choice((0.0, 1.0, 123456.789))
        self.worker: Worker | None = None
        self.epochs = 0
        self.model = MODELS[0]
        self.numbers = 0

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
        return Report(self.scheduler.transcript, self.scheduler.happened)

    # --- the engine's part ------------------------------------------------------------------------------------------

    def _turn(self, late: bool = False) -> None:
        self._let_deadlines_pass()
        most = self.rng.randrange(2) if late else 99
        happened = self.scheduler.happened
        preempted = happened["Preempted"]
        while most and (plan := self.scheduler.plan(self.now)) is not None:
            most -= 1
            assert self.worker is not None
            self.worker.plans.append(plan)
            if happened["Preempted"] > preempted and self.rng.random() < self.scenario.hang_up:
                began = [i for i in self.scheduler.live if i in self.scheduler.started]
                self.scheduler.cancel(self.rng.choice(began or ["nobody"]), None, self.now)
        if self.scheduler.oracle:
            moment = self.scheduler.core.next_deadline()
            self.scheduler.oracle.next_moment(moment, self.now, planned_to_the_end=most > 0)

    def _let_deadlines_pass(self) -> None:
        self.scheduler.expire(self.now)

    def _let_time_pass(self) -> None:
        kind = self.rng.random()
        if kind < 0.4:
            self.now += self.rng.random() * 0.02
        elif kind < 0.6:
            self.now += self.rng.random() * 0.3
        elif kind < 0.7 and (moment := self.scheduler.core.next_deadline()) is not None:
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
        request = draw_request(self.rng, self.scenario, self.numbers, self.now, self.scheduler.told)
        self.numbers += 1
        self.scheduler.submit(request, self.now)

    def _someone(self) -> str:
        ids = list(self.scheduler.live)
        return self.rng.choice(ids) if ids and self.rng.random() < 0.9 else "nobody"

    def _do_cancel(self) -> None:
        who, error = self._someone(), self.rng.choice((None, ShutdownInterrupted("the server left")))
        self.scheduler.cancel(who, error, self.now)

    def _do_stop(self) -> None:
        """The shell found a stop string."""
        self.scheduler.finish(self._someone(), self.rng.randrange(4), self.now)

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
        worker.results.append(self.scheduler.sent(result))

    def _do_deliver(self) -> None:
        """What comes next from the worker reaches the core."""
        worker = self.worker
        if worker is None or not worker.results:
            return
        result = worker.results.popleft()
        # Counted when the core hears of it; what a worker meant to say before it was replaced costs nobody anything.
        if result is None:
            self.scheduler.happened["fallen"] += 1
            self._lose(WorkerLoss.CRASHED)
        elif isinstance(result, StepError):
            self.scheduler.happened["fallen"] += 1
            self.scheduler.fail_step(result, self.now)
            self._lose(WorkerLoss.CLEAN if result.kind is StepErrorKind.OUT_OF_MEMORY else WorkerLoss.CRASHED)
        else:
            self.scheduler.apply(result, self.now)

    def _do_oom(self) -> None:
        """A step fails instead of running; the worker has to join again."""
        worker = self.worker
        if worker is not None and worker.plans and not worker.broken:
            plan = worker.plans.popleft()
            worker.broken = True
            kind = self.rng.choice((StepErrorKind.OUT_OF_MEMORY, StepErrorKind.OUT_OF_MEMORY, StepErrorKind.EXCEPTION))
            worker.results.append(StepError(plan.epoch, plan.step, kind, "toy"))
            self.scheduler.happened["oom"] += 1

    def _do_oov(self) -> None:
        """A result on its way back names a token that does not exist."""
        worker = self.worker
        if worker is not None and worker.results:
            result = worker.results[-1]
            if isinstance(result, StepResult) and result.tokens:
                tokens = list(result.tokens)
                tokens[self.rng.randrange(len(tokens))] = self.rng.choice((-1, self.scenario.vocab_size, 2**31 - 1))
                worker.results[-1] = replace(result, tokens=tuple(tokens))
                self.scheduler.happened["oov"] += 1

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
            self.scheduler.refuse(bad, self.now)

    def _do_stale(self) -> None:
        """A result comes twice, or after its worker was lost."""
        if self.scheduler.last_result is not None:
            self.scheduler.refuse(self.scheduler.last_result, self.now)

    def _do_crash(self) -> None:
        if self.worker is not None:
            self.scheduler.happened["crash"] += 1
            self._lose(self.rng.choice(tuple(WorkerLoss)))

    def _do_replace(self) -> None:
        """Another worker joins and nobody told that the old one went."""
        if self.worker is not None:
            self.scheduler.happened["replace"] += 1
            self._join(self._next_capacity())

    def _do_forget(self) -> None:
        self.scheduler.forget()

    def _do_drain(self) -> None:
        if self.rng.random() < 0.1:
            self.scheduler.drain(self.now)

    def _next_capacity(self) -> Capacity:
        return draw_capacity(self.rng) if self.rng.random() < self.scenario.change else self.scenario.capacity

    def _join(self, capacity: Capacity) -> None:
        self.epochs += 1
        scenario = self.scenario
        if scenario.updates and self.rng.random() < scenario.updates:
            self.model = self.rng.choice(MODELS)
        self.worker = Worker(1000 + self.epochs, capacity, scenario.vocab_size, scenario.bad_per_mille, self.model)
        self.scheduler.join(self.worker.hello, self.now)

    def _lose(self, loss: WorkerLoss) -> None:
        self.worker = None
        self.scheduler.lose(loss, self.now)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _quiet(self) -> None:
        """No more faults: everything ends, in a bounded number of steps, and without anybody calling."""
        if self.worker is None or self.worker.broken:
            self._join(self._next_capacity())
        if self.scenario.limits.batching_strategy == "fixed_size" or self.rng.random() < 0.3:
            self.scheduler.drain(self.now)
        worker = self.worker
        assert worker is not None
        steps = self.scheduler.oracle.most_steps() if self.scheduler.oracle else 10**9
        self._turn()
        while self.scheduler.core.num_live:
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
                moment = self.scheduler.core.next_deadline()
                hold(moment is not None, "I13", "somebody waits and nothing will ever happen")
                assert moment is not None
                self.now = moment
            self._turn()

    def _abandon(self) -> None:
        """The callers hang up, one after the other, while the worker goes on."""
        for request_id in list(self.scheduler.live):
            self.scheduler.cancel(request_id, None, self.now)
            self._turn()

    def _all_is_quiet(self) -> None:
        while self.worker is not None and (self.worker.plans or self.worker.results):
            self._do_launch()
            self._do_deliver()
        self._turn()
        if self.scheduler.is_peaceful:
            worst = (2 + self.scenario.limits.max_isolated_crashes) * self.scheduler.happened["poison"]
            hold(self.scheduler.happened["fallen"] <= worst, "isolation", "a poisonous request costs three workers")
        snapshot = self.scheduler.core.snapshot()
        hold(not self.scheduler.live and self.scheduler.core.num_live == 0, "I22", "all have ended")
        idle = (0, 0, 0, 0, 0)
        gauges = (
            snapshot.requests_waiting,
            snapshot.tokens_waiting,
            snapshot.requests_running,
            snapshot.steps_in_flight,
            snapshot.blocks_used,
        )
        hold(gauges == idle, "I22", "nothing is held when nobody lives")
        hold(self.scheduler.core.next_deadline() is None, "I22", "no timer is left")
        hold(self.scheduler.core.plan(self.now) is None, "I22", "nothing is planned for nobody")
        # Containers nothing outside shows: bounded by who lives, whatever there was.
        hold(len(self.scheduler.core._deadlines) == 0, "I23", "the heap of deadlines is empty")
        for queue in (self.scheduler.core._fresh, self.scheduler.core._resuming):
            hold(len(queue._heap) <= 65, "I23", "the heap of a queue keeps few entries of the dead")


def run_seed(seed: int, *, twice: bool = True) -> Report:
    """Run a seed watched, and once more unwatched: both must say the same. Raises AssertionError on any breach."""
    scenario = draw(seed)
    report = World(scenario, watch=True).run()
    if twice:
        again = World(scenario, watch=False).run()
        hold(report.transcript == again.transcript, "I19", "the same calls give the same plans and events")
    return report
