"""The state of a core: what belongs to one worker, what all workers share, and the requests that have not ended."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from lineclear.errors import LineclearError
from lineclear.scheduler.core.adapter_table import AdapterTable
from lineclear.scheduler.core.drafts import DraftCosts
from lineclear.scheduler.core.events import Failed, Finished, FinishReason, Preempted
from lineclear.scheduler.core.inflight_step import InflightStep
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.poison_detector import PoisonDetector
from lineclear.scheduler.core.policies import QUEUE_ORDERS, STRATEGIES, BatchingState, QueueOrder
from lineclear.scheduler.core.prefix_keys import BlockHash
from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.running_batch import ChooseDonor, RunningBatch
from lineclear.scheduler.core.sequence import Request, Sequence, State
from lineclear.scheduler.core.state_pool import StatePool
from lineclear.scheduler.core.stats import Counters, WorkerSnapshot
from lineclear.scheduler.core.step_time_model import StepTimeModel
from lineclear.scheduler.core.swap_space import SwapSpace
from lineclear.wire.messages import Hello

_RECOVERY_STEPS = 200
_DECAY = 0.95  # weight of a request, against the next one that ends


class TokenBudget:
    """The tokens of a step: halved by an out-of-memory step, doubled again after 200 steps without one."""

    def __init__(self) -> None:
        self._halvings = 0
        self._steps_to_doubling = 0  # while it is halved

    def tokens(self, max_tokens: int) -> int:
        """Return how many of `max_tokens` tokens the next step may compute."""
        return max(1, max_tokens >> self._halvings)

    def halve(self) -> None:
        """Halve the budget, after an out-of-memory step of several requests."""
        self._halvings += 1
        self._steps_to_doubling = _RECOVERY_STEPS

    def restore(self) -> None:
        """Restore the whole budget: the size of the batch was not the cause."""
        self._halvings = 0

    def count_step(self) -> None:
        if self._halvings:
            self._steps_to_doubling -= 1
            if self._steps_to_doubling == 0:
                self._halvings -= 1
                self._steps_to_doubling = _RECOVERY_STEPS


class WorkerState:
    """A joined worker, or the place of one that was lost.

    The next worker that joins takes the place with its token budget and batching strategy: after an out-of-memory step
    a worker joins again with the same memory.
    """

    hello: Hello
    """Of the joined worker, or of the last one."""
    epoch: int

    def __init__(self, limits: CoreLimits, block_hash: BlockHash, choose_donor: ChooseDonor | None = None) -> None:
        self._limits = limits
        self.batch = RunningBatch(block_hash, limits.prefix_cache, choose_donor)
        self.strategy = STRATEGIES[limits.batching_strategy](limits.policy)
        self.budget = TokenBudget()
        self.planned_at = float("-inf")
        """Time of the last call of `plan`."""
        self._clear()

    def _clear(self) -> None:
        self.step_time = StepTimeModel()
        self.inflight: deque[InflightStep] = deque()
        self.draft_costs = DraftCosts()
        self.last_result_at = 0.0
        self.step = 0
        """The last step planned in this epoch."""
        self.last_step_tokens = self.last_step_positions = 0
        """Positions computed by the last planned step, and held after it."""
        self.max_len = 0
        """The most tokens that a request may have here."""
        self.left: list[Sequence] = []
        """Waiting requests that the last plan left to other workers."""

    def join(self, hello: Hello) -> None:
        """Start empty, with the capacity of a worker."""
        self.hello, self.epoch = hello, hello.epoch
        self._max_step_tokens = hello.step_tokens(self._limits.target_batch_tokens)
        self.max_len = min(hello.max_model_len, hello.num_blocks * hello.block_size + 1)  # the last is never computed
        num_slots = min(self._limits.max_batch_size, hello.num_slots)
        states = None
        if hello.has_recurrent_state:
            states = StatePool(hello.num_slots, hello.num_state_snapshots if self._limits.prefix_cache else 0)
        self.batch.reset(num_slots, hello.num_slots, hello.num_blocks, hello.block_size, states)
        if hello.num_swap_blocks and states is None:
            self.batch.swap = SwapSpace(hello)

    def follow(self, limits: CoreLimits) -> None:
        """Follow other limits from the next plan on. Running sequences beyond a smaller number of slots continue."""
        if (limits.batching_strategy, limits.policy) != (self._limits.batching_strategy, self._limits.policy):
            self.strategy = STRATEGIES[limits.batching_strategy](limits.policy)
        self._limits = limits
        self.planned_at = float("-inf")  # a time before now may have an effect again
        self._max_step_tokens = self.hello.step_tokens(limits.target_batch_tokens)
        self.batch.num_slots = min(limits.max_batch_size, self.batch.max_slots)

    def leave(self) -> list[Sequence]:
        """Drop blocks and plans of a lost worker. Returns the sequences that ran on it, oldest first: they wait now.

        Dissolve the decode batch first, so that the sequences' fields are up to date.
        """
        removed = self.batch.remove_all()
        for sequence in dict.fromkeys([*removed, *(s for inflight in self.inflight for s in inflight.sampled())]):
            sequence.num_known = len(sequence.tokens)  # samples in flight are void, and were never computed
            sequence.num_void = 0
            sequence.max_computed_before = min(sequence.max_computed_before, sequence.num_known)
        self._clear()
        return removed

    @property
    def is_full(self) -> bool:
        """Whether as many plans are in flight as the limits allow."""
        return len(self.inflight) >= self._limits.pipeline_depth

    @property
    def step_tokens(self) -> int:
        """The most tokens that the next step may compute."""
        return self.budget.tokens(self._max_step_tokens)

    def queued_tokens(self) -> int:
        """Return the tokens that are in flight or still to be computed of its running requests' known tokens."""
        prompts = sum(s.num_unplanned for s in self.batch.not_decoding)
        return sum(step.num_tokens for step in self.inflight) + prompts + len(self.batch.decode_batch)

    def next_turn(self) -> float | None:
        """Return when the first request that was left to another worker is left no longer."""
        times = [s.wait_until for s in self.left if s.state is State.WAITING and s.wait_until is not None]
        return min(times, default=None)

    def add_step(self, inflight: InflightStep) -> None:
        """Put a planned step in flight."""
        self.step = inflight.step
        self.last_step_tokens, self.last_step_positions = inflight.num_tokens, self.batch.num_held_positions
        self.inflight.append(inflight)
        self.budget.count_step()

    def snapshot(self) -> WorkerSnapshot:
        """Return a copy of the gauges."""
        pool = self.batch.pool
        return WorkerSnapshot(
            epoch=self.epoch,
            num_slots=self.batch.num_slots,
            num_requests_running=self.batch.num_running,
            steps=self.step,
            steps_in_flight=len(self.inflight),
            num_blocks=pool.num_blocks,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            step_time=self.step_time.coefficients,
            last_step_tokens=self.last_step_tokens,
            last_step_positions=self.last_step_positions,
            is_fitted=self.step_time.is_fitted,
            state_snapshots_used=0 if pool.states is None else pool.states.num_used,
            state_snapshot_hits=0 if pool.states is None else pool.states.num_hits,
        )


class SlotPace:
    """How long requests hold their slot: seconds per prompt token and per output token, of those that ended last.

    Decayed totals. Preempted and recovered requests do not count: they waited in between.
    """

    def __init__(self) -> None:
        self._prefill_seconds = self._prefill_tokens = 0.0
        self._decode_seconds = self._decode_tokens = 0.0

    def observe(self, sequence: Sequence) -> None:
        """Count a request that has ended."""
        start, first, last = sequence.started_at, sequence.first_token_at, sequence.last_token_at
        if start is None or first is None or last is None or sequence.preemptions or sequence.recoveries:
            return
        received = len(sequence.request.output)
        self._prefill_seconds = self._prefill_seconds * _DECAY + first - start
        self._prefill_tokens = self._prefill_tokens * _DECAY + sequence.prompt_len + received - sequence.cached_tokens
        self._decode_seconds = self._decode_seconds * _DECAY + last - first
        self._decode_tokens = self._decode_tokens * _DECAY + sequence.num_outputs - received - 1

    def seconds(self, prompt_tokens: float, output_tokens: float) -> float | None:
        """Return how long a request of this size holds a slot; None before a request has ended."""
        if not self._prefill_tokens:
            return None
        per_prompt_token = self._prefill_seconds / self._prefill_tokens
        # Before an answer of two tokens has ended, an output token counts as a prompt token.
        per_output_token = self._decode_seconds / self._decode_tokens if self._decode_tokens else per_prompt_token
        return per_prompt_token * prompt_tokens + per_output_token * output_tokens

    def run_seconds(self, request: Request) -> float | None:
        """Return how long a request is expected to hold a slot; None before a request has ended."""
        known = len(request.prompt) + len(request.output)
        return self.seconds(known, max(0, request.expected_len - known))


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
        return cls(
            limits=limits,
            queue_order=QUEUE_ORDERS[limits.scheduling_policy](limits.policy),
            poison=PoisonDetector(limits.max_isolated_crashes, limits.max_isolated_kills),
            adapters=AdapterTable(limits.max_loras),
        )

    def takes_requests(self, worker: WorkerState) -> bool:
        return worker.epoch != self.isolation_epoch

    def may_take(self, worker: WorkerState, sequence: Sequence) -> bool:
        """Return whether a worker may run a waiting sequence in its batch, now or after other requests."""
        if sequence.max_len > worker.max_len or sequence.must_isolate:
            return False
        # Samples in flight elsewhere may take long. Only the worker that has them waits for their values.
        return sequence.in_flight == 0 or sequence.epoch == worker.epoch

    def batching_state(self, worker: WorkerState, now: float) -> BatchingState:
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

    def drop_swapped(self, sequence: Sequence) -> None:
        """Free the host blocks that a preempted sequence has on the worker that it ran on last."""
        worker = self.workers.get(sequence.epoch)
        if worker is not None and worker.batch.swap is not None:
            worker.batch.swap.drop(sequence)

    def preempt(self, worker: WorkerState, victim: Sequence) -> Preempted:
        """RUNNING -> WAITING: `victim` loses its blocks and is computed again."""
        worker.batch.free(victim, State.WAITING)
        victim.preemptions += 1
        victim.protected = victim.preemptions >= self.limits.max_preemptions
        self.resuming.push(victim)
        self.counters.preemptions += 1
        return Preempted(victim.request.request_id)


class LiveRequests:
    """The requests that have not ended: by id, by deadline, and the ways they end."""

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self.by_id: dict[str, Sequence] = {}
        self.deadlines: list[tuple[float, int, Sequence]] = []
        """A heap, with those of some requests that have ended."""
        self._num_search_steps = 0

    def search_steps(self) -> list[Sequence]:
        return [s for s in self.by_id.values() if s.request.is_search_step] if self._num_search_steps else []

    def add(self, sequence: Sequence) -> None:
        self.by_id[sequence.request.request_id] = sequence
        self._num_search_steps += sequence.request.is_search_step
        if sequence.request.adapter:
            self._state.adapters.acquire(sequence.request.adapter)
        if sequence.request.deadline is not None:
            heapq.heappush(self.deadlines, (sequence.request.deadline, sequence.number, sequence))

    def pop_expired(self, now: float) -> Iterator[Sequence]:
        """Yield the requests whose deadline has passed. The caller ends each."""
        while self.deadlines and self.deadlines[0][0] <= now:
            _, _, sequence = heapq.heappop(self.deadlines)
            if sequence.state is not State.FINISHED:
                yield sequence

    def next_deadline(self) -> float | None:
        while self.deadlines and self.deadlines[0][2].state is State.FINISHED:
            heapq.heappop(self.deadlines)
        return self.deadlines[0][0] if self.deadlines else None

    # --- the end of a request ---------------------------------------------------------------------------------------

    def complete(
        self, sequence: Sequence, reason: FinishReason, matched: int | None, now: float, num_tokens: int | None = None
    ) -> Finished:
        """End a request whose answer is complete."""
        self._free(sequence)
        self._state.pace.observe(sequence)
        self._state.counters.requests_finished += 1
        return Finished(sequence.request.request_id, reason, matched, sequence.stats(now, num_tokens))

    def fail(self, sequence: Sequence, error: LineclearError, now: float, *, tainted: bool = False) -> Failed:
        """End a request with an error. The caller counts it. `tainted` blocks are zeroed before reuse."""
        self._free(sequence, tainted=tainted)
        return Failed(sequence.request.request_id, error, sequence.stats(now))

    def _free(self, sequence: Sequence, *, tainted: bool = False) -> None:
        """Any state -> FINISHED."""
        state = self._state
        if state.poison.suspects:
            state.poison.remove(sequence)
        state.queue_order.on_finish(sequence)
        if sequence.state is State.RUNNING:
            state.workers[sequence.epoch].batch.free(sequence, State.FINISHED, tainted=tainted)
        else:
            assert sequence.state is State.WAITING
            (state.fresh if sequence in state.fresh else state.resuming).remove(sequence)
            sequence.state = State.FINISHED
            if sequence.preemptions:
                state.drop_swapped(sequence)
        del self.by_id[sequence.request.request_id]
        self._num_search_steps -= sequence.request.is_search_step
        if sequence.request.adapter:
            state.adapters.release(sequence.request.adapter)
        if len(self.deadlines) > 2 * len(self.by_id) + 64:
            self.deadlines = [entry for entry in self.deadlines if entry[2].state is not State.FINISHED]
            heapq.heapify(self.deadlines)
