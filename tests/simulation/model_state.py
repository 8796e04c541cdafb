"""Model of the scheduler's state: the live requests, those that wait, and the joined workers.

It follows the calls and events of the core and never reads the core's state. `oracle` and `plan_checks` check it.
"""

from __future__ import annotations

from collections.abc import Iterable

from simulation.invariant_error import require
from simulation.model_adapters import ModelAdapters
from simulation.model_queue import ModelQueue
from simulation.model_sequence import ModelSequence
from simulation.model_wait import ModelWait
from simulation.model_workers import ModelStep, ModelWorker

from lineclear.errors import KvCapacityExceeded, LineclearError, ModelChanged, PromptTooLong
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.core.stats import Counters
from lineclear.wire.messages import Hello, SlotInit


class ModelState:
    """Live requests by state, and the workers that they run on."""

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self.live: dict[str, ModelSequence] = {}
        self._by_seed: dict[int, list[ModelSequence]] = {}  # several of a beam search have one seed
        self.fresh: dict[ModelSequence, None] = {}  # have not started
        self.resuming: dict[ModelSequence, None] = {}
        self.workers: dict[int, ModelWorker] = {}  # by epoch, oldest first
        self._vacant: list[ModelWorker] = []
        self.isolating: int | None = None  # epoch of the worker that runs suspects alone
        self.queue = ModelQueue(limits)
        self.wait = ModelWait(self)
        self.counters = Counters()
        self.adapters = ModelAdapters(limits.max_loras)
        self.draining = False
        self.refusing = False  # a request was rejected since the last one joined

    def add(self, sequence: ModelSequence) -> None:
        self.live[sequence.request.request_id] = sequence
        self._by_seed.setdefault(sequence.request.sampling.seed, []).append(sequence)
        self.fresh[sequence] = None
        self.queue.push(sequence)

    def remove(self, sequence: ModelSequence) -> None:
        require(sequence.is_live, "I10", "a request ends once")
        sequence.is_live = False
        del self.live[sequence.request.request_id]
        of_seed = self._by_seed[sequence.request.sampling.seed]
        of_seed.remove(sequence)
        if not of_seed:
            del self._by_seed[sequence.request.sampling.seed]
        if sequence.is_running:
            self.workers[sequence.epoch].stop_running(sequence, sequence.num_computed)
        self.drop_swapped(sequence)
        self.fresh.pop(sequence, None)
        self.resuming.pop(sequence, None)
        self.queue.on_finish(sequence, self.fresh, is_idle=not self.live)

    def owner(self, init: SlotInit) -> ModelSequence:
        """Return the live request that a plan initialises a slot for."""
        of_seed = self._by_seed.get(init.sampling.seed, [])
        require(bool(of_seed), "I16", "only live requests are admitted")
        return next((sequence for sequence in of_seed if sequence.tokens == init.tokens), of_seed[0])

    def drop_swapped(self, sequence: ModelSequence) -> None:
        """Free the host blocks of a sequence that waited, on the worker that it ran on last."""
        if sequence.epoch in self.workers:
            self.workers[sequence.epoch].swap.drop(sequence)

    def preempt(self, victim: ModelSequence) -> None:
        self.workers[victim.epoch].stop_running(victim, victim.num_planned)
        victim.preemptions += 1
        victim.protected = victim.preemptions >= self.limits.max_preemptions
        self.resuming[victim] = None
        self.counters.preemptions += 1

    def join(self, hello: Hello) -> None:
        """Join a worker; it takes over the place of the one that was lost first."""
        worker = self._vacant.pop(0) if self._vacant else ModelWorker(self)
        worker.join(hello)
        self.workers[hello.epoch] = worker

    def switch(self, before: CoreLimits, limits: CoreLimits) -> None:
        """Follow other limits. A new strategy, or one with other numbers, starts empty."""
        self.limits = limits
        for worker in (*self.workers.values(), *self._vacant):
            worker.limits = worker.budget.limits = limits
            if (before.batching_strategy, before.policy) != (limits.batching_strategy, limits.policy):
                worker.batching.joins_left, worker.batching.batch_started_at = 0, float("-inf")
        for worker in self.workers.values():
            worker.num_slots = min(worker.hello.num_slots, limits.max_batch_size)

    def lose(self, epoch: int) -> None:
        """Lose a worker: its requests wait again, and its steps in flight get no result."""
        worker = self.workers[epoch]
        for sequence in sorted((*worker.running.values(), *worker.finishing), key=lambda s: s.queue_key):
            self._interrupt(sequence, worker, sequence.num_computed)
            sequence.max_computed_before = min(sequence.max_computed_before, len(sequence.tokens))
        for sequence in (s for step in worker.inflight for s in step.samples):
            sequence.in_flight = sequence.num_void = 0
            sequence.max_computed_before = min(sequence.max_computed_before, len(sequence.tokens))
        del self.workers[epoch]
        self._vacant.append(worker)
        if self.isolating == epoch:
            self.isolating = None
        for sequence in self.live.values():
            if must_isolate(sequence) and sequence.is_running and sequence.epoch != self.isolating:
                self._interrupt(sequence, self.workers[sequence.epoch], sequence.num_planned)

    def _interrupt(self, sequence: ModelSequence, worker: ModelWorker, computed: int) -> None:
        sequence.recoveries += 1
        worker.stop_running(sequence, computed)
        self.resuming[sequence] = None

    def rejection(self, request: Request, started_on: str = "") -> type[LineclearError] | None:
        """Return the error if no joined worker can ever run `request`; `started_on` is its first model, if any."""
        if not self.workers:
            return None
        worker = max(self.workers.values(), key=lambda worker: worker.max_len)
        if (request.model_fingerprint or started_on) not in ("", worker.hello.model_fingerprint):
            return ModelChanged
        total = len(request.prompt) + (1 if request.pooling else request.max_tokens)
        if total > worker.hello.max_model_len:
            return PromptTooLong
        # The last token is sampled but never computed.
        return KvCapacityExceeded if total - 1 > worker.hello.num_blocks * worker.hello.block_size else None

    def is_possible(self, sequence: ModelSequence, worker: ModelWorker) -> bool:
        """Return whether `worker` may take a waiting sequence, perhaps after samples in flight there arrive."""
        if sequence.max_len > worker.max_len or must_isolate(sequence):
            return False
        return sequence.in_flight == 0 or sequence.epoch == worker.epoch

    def takes_requests(self, worker: ModelWorker) -> bool:
        """Return whether a worker takes waiting requests: it is not reserved for suspects."""
        reserved = self.next_isolated()
        return reserved is None or reserved[1] is not worker

    def record_crash(self, steps: Iterable[ModelStep]) -> ModelSequence | None:
        """Count a crash for every sequence with a row in `steps`; return the sequence if it ran alone."""
        sequences = list({sequence: None for step in steps for sequence, _, _ in step.rows})
        for s in sequences:
            if s.is_live:
                s.crash_count += 1
                reached = (s.num_planned or s.num_known - 1) + s.num_drafts
                s.clear_position = min(max(s.clear_position, reached + 2), s.max_len - 1)
        return sequences[0] if len(sequences) == 1 and sequences[0].is_live else None

    def next_isolated(self) -> tuple[ModelSequence, ModelWorker] | None:
        """Return the oldest suspect that some worker can run alone, and the worker that is reserved for it."""
        for suspect in sorted(filter(must_isolate, self.live.values()), key=lambda s: s.queue_key):
            if suspect.is_running:
                return suspect, self.workers[suspect.epoch]
            able = [w for w in self.workers.values() if suspect.max_len <= w.max_len]
            for worker in sorted(able, key=lambda w: (w.epoch != self.isolating, len(w.running))):
                return suspect, worker
        return None


def must_isolate(sequence: ModelSequence) -> bool:
    return sequence.crash_count >= 2
