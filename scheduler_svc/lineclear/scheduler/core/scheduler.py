"""The scheduler's core: requests in; plans, results and events out. Pure, like etcd's raft and h11.

The core has no clock (`now` is an argument), no randomness, no logging and no I/O, so the same calls give the same
plans. Only the engine thread calls it. Calls return what happened as events; `plan` leaves its events for
`drain_events`.

Plans of a worker run strictly in order, and its results return in that order. So a planned position counts as computed
for every later plan, and a freed block may be handed out at once: a late write always precedes the new owner's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lineclear.errors import (
    Cancelled,
    DeadlineExceeded,
    DeviceOutOfMemory,
    DuplicateRequest,
    LineclearError,
    PoisonRequest,
    QueueFull,
    ServerDraining,
)
from lineclear.scheduler.core import limits
from lineclear.scheduler.core.core_state import LiveRequests, SharedState, WorkerState
from lineclear.scheduler.core.events import Admitted, Event, FinishReason, QueuePosition, WorkerJoined, WorkerLost
from lineclear.scheduler.core.inflight_step import ChunkRow
from lineclear.scheduler.core.limits import SWITCHABLE, CoreLimits
from lineclear.scheduler.core.placement import Isolation
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.policies import QUEUE_ORDERS
from lineclear.scheduler.core.prefix_keys import BlockHash, BlockHasher, Prefix
from lineclear.scheduler.core.result_applier import ResultApplier
from lineclear.scheduler.core.running_batch import ChooseDonor
from lineclear.scheduler.core.sequence import Request, Sequence, State
from lineclear.scheduler.core.stats import CoreSnapshot
from lineclear.scheduler.core.wait_prediction import LAST, must_wait, queue_position
from lineclear.wire.messages import Hello, RowOutput, StepError, StepErrorKind, StepPlan, StepResult


class Scheduler:
    """Takes requests, makes plans, applies results.

    A worker is named by its epoch. `block_hash` replaces the function that makes prefix-cache keys; `choose_donor` may
    replace the blocks that requests copy positions from.
    """

    def __init__(
        self, limits: CoreLimits, block_hash: BlockHash | None = None, choose_donor: ChooseDonor | None = None
    ) -> None:
        self.limits = limits
        self._choose_donor = choose_donor
        self._block_hash = block_hash or BlockHasher(limits.cache_secret)
        self._state = SharedState.of(limits)
        self._live = LiveRequests(self._state)
        self._isolation = Isolation(self._state)
        self._results = ResultApplier(self._state, self._live)
        self._vacant: list[WorkerState] = []  # places of lost workers, the longest vacant first
        self._events: list[Event] = []
        self._num_arrivals = 0

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended."""
        return len(self._live.by_id)

    def submit(self, request: Request, now: float) -> list[Event]:
        """Queue a request.

        Raises QueueFull, PromptTooLong, KvCapacityExceeded, ModelChanged, ModelReplaced, AdapterNotFound,
        DuplicateRequest or ServerDraining, and then changes nothing.
        """
        state = self._state
        try:
            has_output = request.scoring is not None or request.pooling is not None
            assert len(request.output) < request.max_tokens + has_output, "the request is complete already"
            if state.draining and not request.is_sibling:
                raise ServerDraining("the server is shutting down", retry_after_seconds=1.0)
            if request.request_id in self._live.by_id:
                raise DuplicateRequest("a request with this request_id is in progress")
            if request.adapter:
                state.adapters.check(request.adapter)
            limits.check_queue(request, state.fresh, self.limits, lambda: queue_position(state, LAST, now).seconds)
            if state.workers:
                largest = self._largest_worker()
                limits.check_model(request, largest)
                limits.check_capacity(request, largest)
            if self.limits.reject_unmeetable_deadlines and request.deadline is not None and not request.is_sibling:
                num_slots = sum(worker.batch.num_slots for worker in state.workers.values())
                limits.check_deadline(request, self._preview(request, now), num_slots, now)
        except LineclearError as error:
            state.counters.requests_rejected += 1
            state.refusing = state.refusing or isinstance(error, QueueFull)
            raise
        self._num_arrivals += 1
        sequence = Sequence(request, (self._key(request, now), self._num_arrivals), now)
        sequence.protected = self.limits.max_preemptions == 0
        self._live.add(sequence)
        state.fresh.push(sequence)
        state.counters.requests_admitted += 1
        if not request.wants_position:
            return [Admitted(request.request_id)]
        place = queue_position(state, sequence.queue_key, now)
        return [Admitted(request.request_id, place if must_wait(state, place) else None)]

    def _key(self, request: Request, arrival: float) -> float:
        since = arrival if request.queued_since is None else request.queued_since
        return self._state.queue_order.key(request, since, self._state.pace.run_seconds(request) or 0.0)

    def _preview(self, request: Request, now: float) -> QueuePosition:
        state = self._state
        key = state.queue_order.preview(request, now, state.pace.run_seconds(request) or 0.0)
        return queue_position(state, (key, self._num_arrivals + 1), now, arriving=1)

    def cancel(self, request_id: str, error: LineclearError | None, now: float) -> list[Event]:
        """Fail a request with `error` or Cancelled. An unknown id does nothing."""
        sequence = self._live.by_id.get(request_id)
        if sequence is None:
            return []
        self._state.counters.requests_cancelled += 1
        return [self._live.fail(sequence, error or Cancelled("the caller cancelled the request"), now)]

    def finish_at_stop_string(self, request_id: str, num_tokens: int, now: float) -> list[Event]:
        """Complete a request after its first `num_tokens` output tokens, in whose text a stop string appeared."""
        sequence = self._live.by_id.get(request_id)
        if sequence is None:
            return []
        return [self._live.complete(sequence, FinishReason.STOP_STRING, None, now, num_tokens)]

    def expire(self, now: float) -> list[Event]:
        """Fail every request whose deadline has passed."""
        deadlines = self._live.deadlines
        return self._expire(now) if deadlines and deadlines[0][0] <= now else []

    def _expire(self, now: float) -> list[Event]:
        events: list[Event] = []
        for sequence in self._live.pop_expired(now):
            self._state.counters.requests_expired += 1
            where = "while running" if sequence.state is State.RUNNING else "in the queue"
            events.append(self._live.fail(sequence, DeadlineExceeded(f"the deadline passed {where}"), now))
        return events

    def next_deadline(self, epochs: Collection[int] | None = None) -> float | None:
        """Return the next time at which `expire` or `plan` may act without any other call before; None: never.

        `epochs` are the workers that plans can be sent to, where not all joined workers are.
        """
        deadline = self._live.next_deadline()
        times = [] if deadline is None else [deadline]
        for epoch, worker in self._state.workers.items():
            # With a full pipeline no request can join before the next result arrives.
            if worker.is_full or (epochs is not None and epoch not in epochs):
                continue
            wakeups = [worker.next_turn()]
            if (oldest := self._state.fresh.oldest()) is not None:
                # At its arrival the oldest has not waited yet, so the strategy returns the end of its wait.
                wakeups.append(worker.strategy.next_wakeup(self._state.batching_state(worker, oldest.arrival)))
            # A time at or before the last call of plan() has had its effect.
            times += [wakeup for wakeup in wakeups if wakeup is not None and wakeup > worker.planned_at]
        return min(times, default=None)

    def switch(self, limits: CoreLimits, now: float) -> None:
        """Follow other limits and policies from the next plan on. Every request is kept.

        Only the fields of SWITCHABLE may differ. With another order every live request gets the key that it would have
        if it had arrived under that order, so the bounds of the new order hold for it, and ages follow the new keys.
        """
        assert all(name in SWITCHABLE for name in limits.differences(self.limits)), "a limit is fixed while serving"
        state, before = self._state, self.limits
        self.limits = state.limits = limits
        for worker in (*state.workers.values(), *self._vacant):
            worker.follow(limits)
        if limits.order != before.order:
            state.queue_order = QUEUE_ORDERS[limits.scheduling_policy](limits.policy)
            self._assign_keys()

    def _assign_keys(self) -> None:
        """Give every live request a key of the queue order: first those that have started, then by arrival."""
        state = self._state
        for sequence in sorted(self._live.by_id.values(), key=lambda s: (s.started_at is None, s.number)):
            sequence.queue_key = (self._key(sequence.request, sequence.arrival), sequence.number)
            if sequence.started_at is not None:
                state.queue_order.on_start(sequence)
        state.fresh.sort()
        state.resuming.sort()

    def drain(self, now: float) -> None:
        """Reject new requests from now on, and run the others to their end in batches of any size."""
        self._state.draining = True

    def drain_events(self) -> list[Event]:
        """Return the events of `plan` since the last call."""
        events, self._events = self._events, []
        return events

    # --- adapters ---------------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> dict[bytes, int]:
        """Index of each adapter that the workers must hold, by key."""
        return self._state.adapters.indices

    def load_adapter(self, key: bytes, now: float) -> int:
        """Let requests use an adapter; return the index that its workers must know it by.

        The caller sends it to every worker before the next plan, and `adapters` to each that joins. Raises
        AdapterLimitReached.
        """
        return self._state.adapters.load(key)

    def unload_adapter(self, key: bytes, now: float) -> int:
        """Reject new requests for an adapter from now on; return how many use it. They run to their end."""
        return self._state.adapters.unload(key)

    def requests_with_adapter(self, key: bytes) -> list[str]:
        """Return the ids of the live requests that use an adapter."""
        return [s.request.request_id for s in self._live.by_id.values() if s.request.adapter == key]

    # --- workers ----------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> tuple[int, ...]:
        """Epochs of the joined workers, oldest first."""
        return tuple(self._state.workers)

    def worker_joined(self, hello: Hello, now: float) -> list[Event]:
        """Handle a worker that joined. All joined workers must run the same model.

        A request fails if no joined worker can ever run it: another model never continues an answer.
        """
        state = self._state
        assert hello.epoch not in state.workers, "this epoch is joined already"
        models = {worker.hello.model_fingerprint for worker in state.workers.values()}
        assert not models - {hello.model_fingerprint}, "joined workers run different models"
        worker = self._vacant.pop(0) if self._vacant else None
        worker = worker or WorkerState(self.limits, self._block_hash, self._choose_donor)
        worker.join(hello)
        state.workers[hello.epoch] = worker
        events: list[Event] = [WorkerJoined(hello.epoch)]
        started_on, state.model_fingerprint = state.model_fingerprint, hello.model_fingerprint
        largest = self._largest_worker()
        for sequence in tuple(self._live.by_id.values()):
            try:
                limits.check_model(sequence.request, hello, started_on if sequence.started_at is not None else "")
                limits.check_capacity(sequence.request, largest)
            except LineclearError as error:
                state.counters.requests_failed += 1
                events.append(self._live.fail(sequence, error, now))
        return events

    def _largest_worker(self) -> Hello:
        """Return the Hello of the joined worker that can run the longest requests."""
        return max(self._state.workers.values(), key=lambda worker: worker.max_len).hello

    def worker_lost(self, epoch: int, now: float, loss: WorkerLoss = WorkerLoss.CLEAN) -> list[Event]:
        """Handle a worker that was lost as `loss` says. Every request is kept, except the poison of this loss.

        Requests that ran on it wait again, in their old order, and its plans in flight get no result. An unknown epoch
        does nothing.
        """
        state = self._state
        worker = state.workers.get(epoch)
        if worker is None:
            return []
        events: list[Event] = [WorkerLost(epoch)]
        worker.batch.dissolve_decode()
        isolated = state.poison.record_crash(worker.inflight) if loss is not WorkerLoss.CLEAN else None
        if isolated is not None and state.poison.is_poison(isolated, loss):
            error = PoisonRequest("workers ended whenever they computed this request, at last while they ran it alone")
            state.counters.requests_failed += 1
            events.append(self._live.fail(isolated, error, now))
        for sequence in worker.leave():
            self._resume_later(sequence)
        del state.workers[epoch]
        self._vacant.append(worker)
        # A suspect may run elsewhere already, if no sample of it was in flight here. It has to run alone now.
        for sequence in state.poison.isolated_by_age():
            is_alone = state.is_isolating and sequence.epoch == state.isolation_epoch
            if sequence.state is State.RUNNING and not is_alone:
                state.workers[sequence.epoch].batch.free(sequence, State.WAITING)
                self._resume_later(sequence)
        return events

    def _resume_later(self, sequence: Sequence) -> None:
        sequence.recoveries += 1
        self._state.resuming.push(sequence)

    def on_step_error(self, error: StepError, now: float) -> list[Event]:
        """Handle an out-of-memory error of a worker's oldest step in flight; other errors do nothing.

        A step of one request fails the request. A larger step halves the worker's token budget; 200 steps without such
        an error double it again. If halving does not help, requests run one at a time, as after a crash. Steps in
        flight are void: the caller has the worker join again, and the requests run again.
        """
        worker = self._state.workers.get(error.epoch)
        inflight = worker.inflight[0] if worker is not None and worker.inflight else None
        if worker is None or inflight is None or error.step != inflight.step:
            return []
        if error.kind is not StepErrorKind.OUT_OF_MEMORY:
            return []
        if inflight.num_rows > 1:
            worker.budget.halve()
            worker.batch.dissolve_decode()
            self._state.poison.record_crash([inflight])
            return []
        sequence = next(inflight.sequences())
        if sequence.state is State.FINISHED:
            return []
        worker.budget.restore()  # the size of the batch was not the cause
        self._state.counters.requests_failed += 1
        failure = DeviceOutOfMemory("the device has too little memory for this request alone")
        return [self._live.fail(sequence, failure, now)]

    # --- plans and results ------------------------------------------------------------------------------------------

    def plan(self, epoch: int, now: float) -> StepPlan | None:
        """Return the next step of a worker; None while its pipeline is full or nothing can run. Call it until None."""
        worker = self._state.workers.get(epoch) if self._live.by_id else None
        return None if worker is None or worker.is_full else self._make_plan(worker, now)

    def _make_plan(self, worker: WorkerState, now: float) -> StepPlan | None:
        state, epoch = self._state, worker.epoch
        worker.planned_at = now
        suspect = None
        if state.poison.suspects or state.isolation_epoch is not None:
            suspect = self._isolation.choose()
        planner = StepPlanner(state, worker, now)
        if suspect is None or epoch != state.isolation_epoch or not self._isolation.is_due(worker):
            planner.run()
        elif any(s is not suspect for step in worker.inflight for s in step.sequences()):
            return None  # a loss now would prove nothing about it
        else:
            planner.run_isolated(suspect)
        self._events.extend(planner.events)
        if not (planner.decodes.slots or planner.chunks):
            assert not [*planner.copies, *planner.state_copies], "blocks or states are copied for no row"
            return None
        inflight = planner.step
        worker.add_step(inflight)
        state.counters.steps += 1
        state.counters.rows += inflight.num_rows
        state.counters.step_tokens += inflight.num_tokens
        state.counters.step_positions += worker.last_step_positions
        chunks, inits, copies = tuple(planner.chunks), tuple(planner.inits), tuple(planner.copies)
        zero_blocks = worker.batch.pool.drain_to_zero()
        if copies and zero_blocks:
            targets = {copy.target for copy in copies}  # a copy replaces all cells of its target
            zero_blocks = tuple(block for block in zero_blocks if block not in targets)
        states = tuple(planner.state_copies)
        return StepPlan(epoch, worker.step, chunks, inits, zero_blocks, planner.decodes, copies, states)

    def apply(self, result: StepResult, now: float) -> list[Event]:
        """Apply the result of a worker's oldest step in flight. Raises BadResult, and then nothing was applied."""
        return self._results.apply(result, now)

    def expected_samples(self, epoch: int) -> list[str]:
        """Return the request ids of a worker's oldest step in flight, in the order of its result's tokens."""
        worker = self._state.workers.get(epoch)
        return [s.request.request_id for s in worker.inflight[0].sampled()] if worker and worker.inflight else []

    def expected_outputs(self, epoch: int) -> list[ChunkRow]:
        """Return the chunks of a worker's oldest step in flight that have scores or a vector, in the result's order."""
        worker = self._state.workers.get(epoch)
        rows = worker.inflight[0].outputs() if worker and worker.inflight else []
        return [row for row in rows if row.output is not RowOutput.SAMPLE]

    def snapshot(self, now: float | None = None) -> CoreSnapshot:
        """Return a copy of counters and gauges. Without `now`, no wait is predicted."""
        state, steps = self._state, self._live.search_steps()
        num_running = sum(s.state is State.RUNNING for s in steps)
        num_begun = sum(s.request.is_sibling or s.started_at is not None for s in steps)
        return CoreSnapshot(
            counters=replace(state.counters),
            num_requests_waiting=len(state.fresh) + len(state.resuming),
            num_tokens_waiting=state.fresh.num_tokens + state.resuming.num_tokens,
            draining=state.draining,
            workers=tuple(worker.snapshot() for worker in state.workers.values()),
            num_search_steps_waiting=num_begun - num_running,
            num_search_steps_running=num_running,
            predicted_wait_seconds=None if now is None else queue_position(state, LAST, now).seconds,
        )

    @property
    def state(self) -> SharedState:
        """Queues, workers and counters, for observers on the caller's thread. They change nothing."""
        return self._state

    def prefixes(self, cache_salt: bytes) -> tuple[bytes, list[Prefix]]:
        """Return the start of a salt's chains, and the cached blocks of prompts of all workers and salts."""
        pools = (worker.batch.pool for worker in self._state.workers.values())
        return self._block_hash(cache_salt, None, b""), [prefix for pool in pools for prefix in pool.prefixes()]

    def clear_prefix_cache(self, now: float) -> None:
        """Empty the prefix cache of every worker."""
        for worker in self._state.workers.values():
            worker.batch.pool.clear_cache()
