"""One deterministic simulation of the core with failing toy workers and a virtual clock.

In the manner of FoundationDB's simulation and TigerBeetle's VOPR: a seed determines every fault, delay and request, and
an oracle checks every call. The run plays the engine: after each action it expires requests and pulls plans.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from simulation.checked_scheduler import CheckedScheduler
from simulation.invariant_error import require
from simulation.malformed_results import malformed
from simulation.model_worker import Worker
from simulation.scenario import MODELS, Capacity, Scenario, draw_capacity, draw_request, draw_switch, poison
from simulation.scenario_draw import draw
from simulation.simulated_callers import Callers

from lineclear.errors import ShutdownInterrupted
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import LoadAdapter, RowOutput, StepError, StepErrorKind, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class RunReport:
    """The outcome of a run: all calls and events in order, and how often each kind occurred."""

    transcript: list[tuple[Any, ...]]
    counts: Counter[str]


class SimulatedRun:
    """Runs one scenario; with `checked`, the oracle checks every call."""

    def __init__(self, scenario: Scenario, *, checked: bool) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed ^ 0x5EED)
        self.scheduler = CheckedScheduler(scenario, checked=checked)
        self.now = self.rng.choice((0.0, 1.0, 123456.789))
        self.workers: dict[int, Worker] = {}
        self.epochs = 0
        self.model = MODELS[0]
        self.num_requests = 0
        self.unsent = scenario.unsent  # share of plans; 0 after the last fault
        self.callers = Callers(scenario, self.scheduler, self.workers)

    def _poison_in(self, plan: StepPlan) -> str:
        """Return the effect of a poison request in `plan` on the worker, or an empty string."""
        slots = self.workers[plan.epoch].runner.slots
        seeds = {slot: (state.sampling.seed, state.prompt_len) for slot, state in slots.items()}
        seeds |= {init.slot: (init.sampling.seed, init.prompt_len) for init in plan.inits}
        for row in plan.rows:
            seed, prompt_len = seeds[row.slot]
            effect = poison(seed, self.scenario.poison_per_mille)
            if effect and row.start + row.num_tokens + row.num_drafts >= prompt_len + seed % 4:
                return effect
        return ""

    def run(self) -> RunReport:
        """Run from the first worker to the end of the last request."""
        names = list(self.scenario.weights)
        weights = list(self.scenario.weights.values())
        if self.rng.random() < 0.8:
            self._join(self.scenario.capacity)
        for _ in range(self.scenario.num_workers - 1):
            self._join(self._next_capacity())
        for name in self.rng.choices(names, weights, k=self.scenario.ticks):
            self._advance_clock()
            getattr(self, f"_do_{name}")()
            self._run_engine(late=self.rng.random() < self.scenario.late)
            for _ in range(self.scenario.pace):
                self._do_launch()
                self._do_deliver()
                self._run_engine(late=self.rng.random() < self.scenario.late)
            self._lose_cut_off(0.3)
            if not self.workers and self.rng.random() < 0.3:
                self._join(self._next_capacity())
                self._run_engine()
        if self.scenario.liveness:
            self._run_to_end()
        else:
            self._cancel_all()
        self._check_idle()
        return RunReport(self.scheduler.transcript, self.scheduler.counts)

    # --- the engine -------------------------------------------------------------------------------------------------

    def _run_engine(self, late: bool = False) -> None:
        self.callers.run(self.now)
        self._expire()
        max_plans = self.rng.randrange(2) if late else 99
        before = None
        while max_plans != before:  # a plan of one worker may let another one run more
            before = max_plans
            for epoch in self._reachable():
                max_plans = self._plan(epoch, max_plans)
        if self.scheduler.oracle:
            deadline = self._next_deadline()
            self.scheduler.oracle.check_next_deadline(deadline, self.now, planned_all=max_plans > 0)

    def _reachable(self) -> list[int]:
        return [epoch for epoch in self.scheduler.core.workers if not self.workers[epoch].is_cut_off]

    def _next_deadline(self) -> float | None:
        return self.scheduler.core.next_deadline(self._reachable())

    def _plan(self, epoch: int, max_plans: int) -> int:
        """Plan steps of a worker. Returns how many of `max_plans` are left."""
        counts = self.scheduler.counts
        preempted = counts["Preempted"]
        while max_plans and (plan := self.scheduler.plan(epoch, self.now)) is not None:
            max_plans -= 1
            if self.unsent and self.rng.random() < self.unsent:
                self.workers[epoch].is_cut_off = True
                counts["unsent"] += 1
                break  # the other workers still get plans
            self.workers[epoch].plans.append(plan)
            if counts["Preempted"] > preempted and self.rng.random() < self.scenario.cancel_after_preemption:
                started = [i for i in self.scheduler.live if i in self.scheduler.started]
                self.scheduler.cancel(self.rng.choice(started or ["unknown"]), None, self.now)
        return max_plans

    def _lose_cut_off(self, share: float = 1.0) -> None:
        for worker in [worker for worker in self.workers.values() if worker.is_cut_off]:
            if self.rng.random() < share:
                self._lose(worker, self.rng.choice(tuple(WorkerLoss)))

    def _expire(self) -> None:
        self.scheduler.expire(self.now)

    def _advance_clock(self) -> None:
        kind = self.rng.random()
        if kind < 0.4:
            self.now += self.rng.random() * 0.02
        elif kind < 0.6:
            self.now += self.rng.random() * 0.3
        elif kind < 0.7 and (deadline := self._next_deadline()) is not None:
            self.now = max(self.now, deadline)

    # --- actions ----------------------------------------------------------------------------------------------------

    def _do_idle(self) -> None:
        pass

    def _do_submit(self) -> None:
        self._submit()

    def _do_burst(self) -> None:
        for _ in range(self.rng.randint(2, 12)):
            self._submit()

    def _submit(self) -> None:
        self.callers.submit(self._draw_request(), self.now)

    def _draw_request(self) -> Request:
        request = draw_request(self.rng, self.scenario, self.num_requests, self.now, self.scheduler.recent)
        self.num_requests += 1
        return request

    def _do_branch(self) -> None:
        """Submit a request with several outputs, or a beam search."""
        request, num_outputs = self._draw_request(), self.callers.draw_outputs()
        numbers = range(self.num_requests, self.num_requests + num_outputs)
        self.num_requests += num_outputs
        self.callers.branch(request, numbers, self.model, self.now)

    def _do_disconnect(self) -> None:
        self.callers.disconnect(self.now)

    def _do_compile(self) -> None:
        self.callers.compile()

    def _random_request_id(self) -> str:
        ids = list(self.scheduler.live)
        return self.rng.choice(ids) if ids and self.rng.random() < 0.9 else "unknown"

    def _do_cancel(self) -> None:
        request_id = self._random_request_id()
        error = self.rng.choice((None, ShutdownInterrupted("the server shut down")))
        self.scheduler.cancel(request_id, error, self.now)

    def _do_finish(self) -> None:
        """Finish a request as for a stop string."""
        self.scheduler.finish(self._random_request_id(), self.rng.randrange(4), self.now)

    def _some_worker(self) -> Worker | None:
        """Return a joined worker, seldom a slow one."""
        if len(self.workers) < 2:
            return next(iter(self.workers.values()), None)
        return self.rng.choice([w for w in self.workers.values() for _ in range(1 if w.is_slow else 8)])

    def _do_launch(self) -> None:
        worker = self._some_worker()
        if worker is not None and worker.plans:
            self._launch(worker)

    def _launch(self, worker: Worker) -> None:
        plan = worker.next_plan()
        if worker.broken or plan is None:
            return
        self.callers.check_grammars(worker, plan)
        if effect := self._poison_in(plan):
            worker.broken = True
            memory = StepError(plan.epoch, plan.step, StepErrorKind.OUT_OF_MEMORY, "toy")
            worker.results.append(memory if effect == "memory" else None)
            return
        base, per_token, per_kv = self.scenario.step_seconds
        tokens, kv_tokens = plan.num_tokens, sum(sum(range(row.start, row.start + row.num_tokens)) for row in plan.rows)
        scored = sum(row.num_tokens for row in plan.rows if row.output is RowOutput.SCORE)
        seconds = base + per_token * (tokens + 2 * scored) + per_kv * kv_tokens
        result = worker.runner.launch(plan).result()
        result = replace(result, step_seconds=seconds * self.rng.uniform(1.0, 1.2))
        worker.results.append(self.scheduler.transfer(result))

    def _do_deliver(self) -> None:
        worker = self._some_worker()
        if worker is not None and worker.results:
            self._deliver(worker)

    def _deliver(self, worker: Worker) -> None:
        result = worker.results.popleft()
        if result is None:
            self.scheduler.counts["poison_losses"] += 1
            self._lose(worker, WorkerLoss.CRASHED)
        elif isinstance(result, StepError):
            self.scheduler.counts["poison_losses"] += 1
            self.scheduler.on_step_error(result, self.now)
            self._lose(worker, WorkerLoss.CLEAN if result.kind is StepErrorKind.OUT_OF_MEMORY else WorkerLoss.CRASHED)
        else:
            self.scheduler.apply(result, self.now)

    def _do_step_error(self) -> None:
        """Fail a step, mostly by lack of memory; the worker has to join again."""
        worker = self._some_worker()
        if worker is not None and worker.plans and not worker.broken:
            plan = worker.next_plan()
            if plan is None:
                return
            worker.broken = True
            kind = self.rng.choice((StepErrorKind.OUT_OF_MEMORY, StepErrorKind.OUT_OF_MEMORY, StepErrorKind.EXCEPTION))
            worker.results.append(StepError(plan.epoch, plan.step, kind, "toy"))
            self.scheduler.counts["step_error"] += 1

    def _do_bad_token(self) -> None:
        """Change a token of a result in flight to one outside the vocabulary."""
        worker = self._some_worker()
        if worker is not None and worker.results:
            result = worker.results[-1]
            if isinstance(result, StepResult) and result.tokens:
                tokens = list(result.tokens)
                tokens[self.rng.randrange(len(tokens))] = self.rng.choice((-1, self.scenario.vocab_size, 2**31 - 1))
                worker.results[-1] = replace(result, tokens=tuple(tokens))
                self.scheduler.counts["bad_token"] += 1

    def _do_malformed(self) -> None:
        """Deliver an invalid result before the right one."""
        worker = self._some_worker()
        if worker is not None and worker.results and isinstance(worker.results[0], StepResult):
            good = worker.results[0]
            bad = malformed(self.rng, good, self._other_epoch(good))
            self.scheduler.apply_invalid(self.callers.spoil(good) or bad, self.now)

    def _other_epoch(self, result: StepResult) -> int:
        """Return the next epoch whose worker, if it is joined, does not wait for the step of `result`."""
        workers = self.scheduler.core.snapshot().workers
        oldest = {worker.epoch: worker.steps - worker.steps_in_flight + 1 for worker in workers}
        return next(epoch for epoch in count(result.epoch + 1) if oldest.get(epoch) != result.step)

    def _do_stale(self) -> None:
        """Deliver a result twice, or after its worker was lost."""
        if self.scheduler.last_result is not None:
            self.scheduler.apply_invalid(self.scheduler.last_result, self.now)

    def _do_crash(self) -> None:
        worker = self._some_worker()
        if worker is not None:
            self.scheduler.counts["crash"] += 1
            self._lose(worker, self.rng.choice(tuple(WorkerLoss)))

    def _do_replace(self) -> None:
        worker = self._some_worker()
        if worker is not None:
            self.scheduler.counts["replace"] += 1
            self._lose(worker, WorkerLoss.CLEAN)
            self._join(self._next_capacity())

    def _do_switch(self) -> None:
        limits = draw_switch(self.rng, self.scheduler.core.limits, self.scenario.switched)
        self.scheduler.switch(limits, self.now)

    def _do_join(self) -> None:
        if len(self.workers) < self.scenario.num_workers:
            self._join(self._next_capacity())

    def _do_stop(self) -> None:
        """Stop a worker: its requests continue on others."""
        worker = self._some_worker()
        if worker is not None:
            self.scheduler.counts["stop"] += 1
            self._lose(worker, WorkerLoss.CLEAN)

    def _do_clear_cache(self) -> None:
        self.scheduler.clear_prefix_cache(self.now)

    def _do_drain(self) -> None:
        if self.rng.random() < 0.1:
            self.scheduler.drain(self.now)

    def _do_load_adapter(self) -> None:
        """Load an adapter, seldom one that is loaded; the workers get it before the next plan."""
        key = self.rng.choice(self.scenario.adapters)
        index = self.scheduler.load_adapter(key, self.now)
        if index is not None:
            for worker in self.workers.values():
                worker.plans.append(LoadAdapter(worker.hello.epoch, index, key, ""))

    def _do_unload_adapter(self) -> None:
        self.scheduler.unload_adapter(self.rng.choice(self.scenario.adapters), self.now)

    def _next_capacity(self) -> Capacity:
        return draw_capacity(self.rng) if self.rng.random() < self.scenario.change else self.scenario.capacity

    def _join(self, capacity: Capacity) -> None:
        self.epochs += 1
        scenario = self.scenario
        if scenario.updates and not self.workers and self.rng.random() < scenario.updates:
            self.model = self.rng.choice(MODELS)
        num_swap_blocks = scenario.swap_blocks if self.epochs % 4 else 0
        worker = Worker(1000 + self.epochs, capacity, scenario, self.model, num_swap_blocks)
        worker.is_slow = scenario.slow > 0 and self.rng.random() < scenario.slow
        self.workers[worker.hello.epoch] = worker
        self.scheduler.join(worker.hello, self.now)
        self.callers.on_join(worker)
        for key, index in self.scheduler.core.adapters.items():
            worker.plans.append(LoadAdapter(worker.hello.epoch, index, key, ""))

    def _lose(self, worker: Worker, loss: WorkerLoss) -> None:
        del self.workers[worker.hello.epoch]
        self.scheduler.lose(worker.hello.epoch, loss, self.now)
        self.callers.on_loss(worker)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _run_to_end(self) -> None:
        """Stop the faults: every request ends in a bounded number of steps without further calls."""
        self.unsent = 0.0
        self._lose_cut_off()
        for worker in [worker for worker in self.workers.values() if worker.broken]:
            self._lose(worker, WorkerLoss.CLEAN)
        # Requests that only a lost worker could run fail when the next one joins.
        self._join(self._next_capacity())
        if self.scheduler.core.limits.batching_strategy == "fixed_size" or self.rng.random() < 0.3:
            self.scheduler.drain(self.now)
        steps = self.callers.max_steps()
        self.callers.is_prompt = True
        self._run_engine()
        while self.scheduler.core.num_live or self.callers.is_busy:
            launches = [worker for worker in self.workers.values() if worker.plans]
            deliveries = [worker for worker in self.workers.values() if worker.results]
            if launches and (not deliveries or self.rng.random() < 0.5):
                self._launch(self._one_of(launches))
                continue
            if deliveries:
                self.now += self.rng.random() * 0.02
                num_workers = len(self.workers)
                self._deliver(self._one_of(deliveries))
                steps -= 1
                require(steps > 0, "I13", "all requests end within the bound of steps")
                if len(self.workers) < num_workers:
                    self._join(self.scenario.capacity)
            else:
                deadline = self._next_deadline()
                is_woken = deadline is not None or self.callers.has_calls
                require(is_woken, "I13", "waiting requests have a wakeup")
                self.now = self.now if deadline is None else deadline
            self._run_engine()

    def _one_of(self, workers: list[Worker]) -> Worker:
        return workers[0] if len(workers) == 1 else self.rng.choice(workers)

    def _cancel_all(self) -> None:
        """Cancel all requests one by one while the worker continues."""
        self.unsent = 0.0
        self._lose_cut_off()
        self.callers.stop(self.now)
        for request_id in list(self.scheduler.live):
            self.scheduler.cancel(request_id, None, self.now)
            self._run_engine()

    def _check_idle(self) -> None:
        while busy := [worker for worker in self.workers.values() if worker.plans or worker.results]:
            if busy[0].plans:
                self._launch(busy[0])
            if busy[0].results:
                self._deliver(busy[0])
        self._run_engine()
        if self.scheduler.only_poison:
            max_losses = (2 + self.scenario.limits.max_isolated_crashes) * self.scheduler.counts["poison"]
            require(
                self.scheduler.counts["poison_losses"] <= max_losses,
                "isolation",
                "a poison request costs three workers",
            )
        snapshot = self.scheduler.core.snapshot()
        self.scheduler.counts["swapped_in_tokens"] += snapshot.counters.swapped_in_tokens
        require(not self.scheduler.live and self.scheduler.core.num_live == 0, "I22", "all requests have ended")
        idle = (0, 0, 0, 0, 0)
        gauges = (
            snapshot.num_requests_waiting,
            snapshot.num_tokens_waiting,
            snapshot.num_requests_running,
            snapshot.steps_in_flight,
            snapshot.blocks_used,
        )
        require(gauges == idle, "I22", "an idle core holds no slots and blocks")
        require(self.scheduler.core.next_deadline() is None, "I22", "no wakeup is left")
        self.scheduler.check()
        for epoch in self.workers:
            require(self.scheduler.plan(epoch, self.now) is None, "I22", "nothing is planned without requests")


def run_seed(seed: int, *, twice: bool = True) -> RunReport:
    """Run a seed checked and once more unchecked; both must agree. Raises AssertionError if an invariant breaks."""
    scenario = draw(seed)
    report = SimulatedRun(scenario, checked=True).run()
    if twice:
        again = SimulatedRun(scenario, checked=False).run()
        require(report.transcript == again.transcript, "I19", "the same calls give the same plans and events")
    return report
