"""The state of the core that all workers share: the queues, their order, the suspects and the counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from lineclear.scheduler.core.adapter_table import AdapterTable
from lineclear.scheduler.core.events import Preempted
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.poison_detector import PoisonDetector
from lineclear.scheduler.core.policies import QUEUE_ORDERS, BatchingState, QueueOrder
from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.sequence import Sequence, State
from lineclear.scheduler.core.slot_pace import SlotPace
from lineclear.scheduler.core.stats import Counters
from lineclear.scheduler.core.worker_state import WorkerState


@dataclass(slots=True)
class SharedState:
    """The state that planning and results read and write, beside that of a worker."""

    limits: CoreLimits
    queue_order: QueueOrder
    poison: PoisonDetector
    adapters: AdapterTable
    fresh: RequestQueue = field(default_factory=RequestQueue)
    """Requests that have not started."""
    resuming: RequestQueue = field(default_factory=RequestQueue)
    """Requests that have started and wait again, after a preemption or a worker loss."""
    workers: dict[int, WorkerState] = field(default_factory=dict)
    """The joined workers by epoch, oldest first."""
    counters: Counters = field(default_factory=Counters)
    pace: SlotPace = field(default_factory=SlotPace)
    draining: bool = False
    refusing: bool = False
    """A request was rejected because the queue is full, and no request has started since."""
    model_fingerprint: str = ""
    """Of the joined workers, or of the last one."""
    isolation_epoch: int | None = None
    """The worker that is reserved for suspects."""
    is_isolating: bool = False
    """Whether it runs them; else it runs its own requests to their end first."""

    @classmethod
    def of(cls, limits: CoreLimits) -> SharedState:
        """Return the state of a new core."""
        return cls(
            limits=limits,
            queue_order=QUEUE_ORDERS[limits.scheduling_policy](limits.policy),
            poison=PoisonDetector(limits.max_isolated_crashes, limits.max_isolated_kills),
            adapters=AdapterTable(limits.max_loras),
        )

    def is_leaving(self, worker: WorkerState) -> bool:
        """Return whether a stopping worker leaves waiting requests to others. The last ones run all that is left."""
        return worker.is_stopping and not all(other.is_stopping for other in self.workers.values())

    def takes_requests(self, worker: WorkerState) -> bool:
        """Return whether a worker admits waiting requests."""
        return worker.epoch != self.isolation_epoch and not self.is_leaving(worker)

    def may_take(self, worker: WorkerState, sequence: Sequence) -> bool:
        """Return whether a worker may run a waiting sequence in its batch, now or after other requests."""
        if sequence.max_len > worker.max_len or self.poison.must_isolate(sequence):
            return False
        # Samples in flight elsewhere may take long. Only the worker that has them waits for their values.
        return sequence.in_flight == 0 or sequence.epoch == worker.epoch

    def batching_state(self, worker: WorkerState, now: float) -> BatchingState:
        """Return the input of the batching strategy of `worker`."""
        batch = worker.batch
        num_waiting, oldest_arrival = self._num_waiting(worker)
        num_resuming = sum(self.may_take(worker, sequence) for sequence in self.resuming) if self.resuming else 0
        return BatchingState(
            now=now,
            num_waiting=num_waiting,
            num_active=batch.num_running + num_resuming,
            num_finishing=len(batch.finishing),
            num_slots=max(1, batch.num_slots),
            oldest_arrival=oldest_arrival,
            draining=self.draining,
            refusing=self.refusing,
            kv_tokens=batch.num_positions if worker.strategy.reads_kv_tokens else 0,
            model=worker.step_time,
        )

    def _num_waiting(self, worker: WorkerState) -> tuple[int, float | None]:
        """Return how many requests that have not started fit into `worker`, and the arrival of the oldest of them."""
        oldest = self.fresh.oldest()
        if oldest is None:
            return 0, None
        if self.fresh.longest <= worker.max_len:  # so it is, unless workers differ
            return len(self.fresh), oldest.arrival
        arrivals = [sequence.arrival for sequence in self.fresh.sequences() if sequence.max_len <= worker.max_len]
        return len(arrivals), arrivals[0] if arrivals else None

    def preempt(self, worker: WorkerState, victim: Sequence) -> Preempted:
        """RUNNING -> WAITING: `victim` loses its blocks and is computed again."""
        worker.batch.free(victim, State.WAITING)
        victim.preemptions += 1
        victim.protected = victim.preemptions >= self.limits.max_preemptions
        self.resuming.push(victim)
        self.counters.preemptions += 1
        return Preempted(victim.request.request_id)
