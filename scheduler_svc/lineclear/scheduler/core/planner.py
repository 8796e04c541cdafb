"""One step's plan: which positions of which sequences. Decodes, prompts and admissions compete for tokens and blocks.

Running sequences come first, oldest first, so that nobody who has begun is starved by who has not.
"""

from __future__ import annotations

from dataclasses import dataclass

from lineclear.scheduler.core.decode_batch import DecodeRows
from lineclear.scheduler.core.events import Event, Preempted, Started
from lineclear.scheduler.core.poison_detector import PoisonDetector
from lineclear.scheduler.core.policies import BatchingState, BatchingStrategy, PreemptionPolicy, QueueOrder
from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.sequence import Sequence, State
from lineclear.scheduler.core.stats import CoreLimits, Counters
from lineclear.scheduler.core.step_time_model import StepTimeModel
from lineclear.wire.messages import Decodes, Row, SlotInit

_LOOKAHEAD = 8  # how many that do not fit are passed over in a step before admission gives up
_SMALLEST_CHUNK, _ENOUGH = 8, 16  # a step may take as many prompt tokens as decodes, within these, whatever it costs


@dataclass(slots=True)
class PlannerState:
    """What planning reads and moves; the core's own state, under names."""

    limits: CoreLimits
    strategy: BatchingStrategy
    queue_order: QueueOrder
    preemption_policy: PreemptionPolicy
    fresh: RequestQueue
    """Never ran."""
    resuming: RequestQueue
    """Ran, and will run again."""
    batch: RunningBatch
    poison: PoisonDetector
    step_time: StepTimeModel
    counters: Counters
    draining: bool = False
    refusing: bool = False
    """The queue was full for a request, and nobody has left it for a slot since."""
    model_fingerprint: str = ""
    """Of the joined worker, or of the last one."""

    def batching_state(self, now: float) -> BatchingState:
        """What the strategy sees."""
        oldest = self.fresh.oldest()
        return BatchingState(
            now=now,
            num_waiting=len(self.fresh),
            num_active=len(self.batch.running) + len(self.resuming),
            num_slots=max(1, self.batch.num_slots),
            oldest_arrival=None if oldest is None else oldest.arrival,
            draining=self.draining,
            refusing=self.refusing,
            kv_tokens=self.batch.positions if self.strategy.reads_kv_tokens else 0,
            model=self.step_time,
        )


class StepPlanner:
    """The making of one plan. After `run`, `decodes`, `chunks` and the rest hold it; no rows: nothing can run now."""

    def __init__(self, world: PlannerState, step: int, budget: int, now: float) -> None:
        self._state = world
        self._batch = world.batch
        self._step = step
        self._budget = budget
        self._now = now
        self._short_of_blocks = False  # somebody running had to wait or to yield: nobody joins in this step
        self._prompt_tokens = 0
        self._prompt_kv_tokens = 0
        self.decodes = Decodes()
        self.decode_rows = DecodeRows()  # whose rows the decodes are
        self.completing_block: list[Sequence] = []  # those of them whose row fills a block
        self.chunks: list[Row] = []
        self.owners: list[tuple[Sequence, int, int]] = []  # of each chunk: sequence, its residence, end position
        self.samples: list[Sequence] = []  # of the chunks
        self.inits: list[SlotInit] = []
        self.events: list[Event] = []
        self.num_tokens = 0
        self.kv_tokens = 0

    def run(self) -> None:
        """Fill the step."""
        if self._state.queue_order.prefill_first:
            self._plan_prefills()
            self._admit()
            self._plan_decodes()
        else:
            self._plan_decodes()
            self._plan_prefills()
            self._admit()

    def run_isolated(self, sequence: Sequence) -> None:
        """Fill the step with what `sequence` can do, at the cost of anybody; nobody else has a row."""
        residents = self._batch
        residents.dissolve_decode()
        if sequence.state is State.WAITING:
            if sequence.in_flight == 0 and self._preempt_for_blocks(sequence):
                self._start(sequence, residents.cached_prefix(sequence))
        elif sequence.num_unplanned > 0:
            grown = sequence.num_planned == len(sequence.blocks) * residents.pool.block_size
            if grown:
                if not self._preempt_for_blocks(sequence):
                    return
                sequence.blocks += residents.pool.take(1)
            count = min(sequence.num_unplanned, self._prompt_tokens_left(sequence.num_planned))
            self._add(sequence, count, tuple(sequence.blocks[-1:]) if grown else ())

    def _preempt_for_blocks(self, sequence: Sequence) -> bool:
        """Preempt others, the youngest first, until a slot and blocks are free for what `sequence` does next."""
        residents = self._batch
        for other in (*reversed([s for s in residents.by_age() if s is not sequence]), None):
            if sequence.state is State.RUNNING:
                enough = residents.pool.num_free > 0
            else:
                shared = residents.cached_prefix(sequence)
                enough = bool(residents.free_slots) and self._fits(sequence, shared, headroom=0)
            if enough:
                return True
            if other is not None:
                self._preempt(other)
        return False

    def _plan_decodes(self) -> None:
        """Running sequences that lack one position: in one beat while tokens and blocks suffice for all of them."""
        residents, room = self._batch, self._budget - self.num_tokens
        ready = [s for s in residents.not_decoding_by_age() if s.num_unplanned == 1 and s.planned_step != self._step]
        if room <= 0 or not (ready or residents.decode_batch):
            return
        beginners = []  # first tokens, and positions computed again, are put to account as chunks
        for sequence in ready:
            first = sequence.first_token_at is None and not sequence.in_flight
            if first or sequence.num_planned < sequence.max_computed_before:
                beginners.append(sequence)
            else:
                residents.join_decode(sequence)
        growing = residents.decode_batch.needing_block()
        if len(residents.decode_batch) + len(beginners) > room or len(growing) > residents.pool.num_free:
            self._plan_decodes_one_by_one()
            return
        if residents.decode_batch:
            self._plan_decode_batch(growing)
        for sequence in beginners:
            self._add(sequence, 1, ())

    def _plan_decode_batch(self, growing: list[Sequence]) -> None:
        """A row for everybody who takes part; a further block for those who need one."""
        residents, decoding = self._batch, self._batch.decode_batch
        grown = []
        for sequence, block in zip(growing, residents.pool.take(len(growing)), strict=True):
            sequence.blocks.append(block)
            grown.append((sequence.slot, block))
        self.decode_rows = decode_rows = decoding.next_step(self._step)
        beat = decoding.beat
        self.decodes = Decodes(
            decode_rows.slots, tuple([origin + beat for origin in decode_rows.origins]), tuple(grown)
        )
        self.completing_block = decoding.completing_block()
        self.num_tokens += len(decode_rows.slots)
        self.kv_tokens += decoding.positions
        for sequence in decoding.finishing():
            residents.leave_decode(sequence)

    def _plan_decodes_one_by_one(self) -> None:
        """One by one, the oldest first: tokens or blocks do not suffice for all of them."""
        residents = self._batch
        residents.dissolve_decode()
        size = residents.pool.block_size
        for sequence in residents.by_age():
            if self.num_tokens >= self._budget:
                break
            # Preempted by an older one in this very pass, in this step already, or not one position short:
            if (
                sequence.state is not State.RUNNING
                or sequence.planned_step == self._step
                or sequence.num_unplanned != 1
            ):
                continue
            if sequence.num_planned < len(sequence.blocks) * size:
                self._add(sequence, 1, ())
            elif (block := self._take_block_or_preempt(sequence)) is not None:
                sequence.blocks.append(block)
                self._add(sequence, 1, (block,))

    def _take_block_or_preempt(self, sequence: Sequence) -> int | None:
        """A block, at the cost of a younger sequence if need be; None when nobody who could yield is left.

        Waiting then is safe: either somebody older progresses, or the younger ones are pinned, hold all they can ever
        need, and will end.
        """
        pool = self._batch.pool
        while pool.num_free == 0:
            self._short_of_blocks = True
            younger = [
                other
                for other in self._batch.running
                if other.queue_key > sequence.queue_key and not other.pinned and other.planned_step != self._step
            ]
            if not younger:
                return None
            self._preempt(self._state.preemption_policy(younger))
        return pool.take(1)[0]

    def _preempt(self, victim: Sequence) -> None:
        self._batch.remove(victim, State.WAITING)
        victim.preemptions += 1
        victim.pinned = victim.preemptions >= self._state.limits.max_preemptions
        self._state.resuming.push(victim)
        self._state.counters.preemptions += 1
        self.events.append(Preempted(victim.request.request_id))

    def _plan_prefills(self) -> None:
        """Prompts begun in earlier steps. Their blocks are theirs since admission."""
        for sequence in self._batch.not_decoding_by_age():
            if sequence.num_unplanned > 1 and sequence.planned_step != self._step:
                count = min(sequence.num_unplanned, self._prompt_tokens_left(sequence.num_planned))
                if count <= 0:
                    break
                self._add_prompt(sequence, count, ())

    def _prompt_tokens_left(self, position: int) -> int:
        """Tokens of a prompt, from `position` on, that this step can still take without keeping its decodes."""
        room = self._budget - self.num_tokens
        decodes = self.num_tokens - self._prompt_tokens
        if decodes and self._state.limits.policy.inter_token_target_seconds > 0:
            seconds = self._max_step_seconds(decodes)
            fitting = self._state.step_time.more_within(seconds, self.num_tokens, self.kv_tokens, position)
            if fitting is not None:
                least = min(max(_SMALLEST_CHUNK, decodes), _ENOUGH)
                room = min(room, max(least - self._prompt_tokens, int(fitting)))
        return room

    def _max_step_seconds(self, decodes: int) -> float:
        """Seconds this step may take: so much more than its decodes alone for each request that waits for its first
        token, and never more than the target.
        """
        world, policy = self._state, self._state.limits.policy
        expecting = len(world.fresh) + len(world.resuming) + len(self._batch.running) - decodes
        stretch = 1 + (policy.decode_stretch - 1) * expecting
        alone = world.step_time.predict(decodes, self.kv_tokens - self._prompt_kv_tokens)
        return min(policy.inter_token_target_seconds, stretch * alone)

    def _admit(self) -> None:
        """Who waits joins, by rank. One that does not fit is passed over a bounded number of times, then waited for."""
        world, residents = self._state, self._batch
        if self._short_of_blocks or not (world.fresh or world.resuming):
            return
        room = world.strategy.max_joins(world.batching_state(self._now)) if world.fresh and residents.free_slots else 0
        passed_over: list[Sequence] = []
        while residents.free_slots and self._prompt_tokens_left(0) > 0 and len(passed_over) < _LOOKAHEAD:
            sequence = self._next(room > 0, passed_over)
            # Samples in flight when it was preempted: their values are not known here yet, and its turn is now.
            if sequence is None or sequence.in_flight > 0:
                return
            shared = residents.cached_prefix(sequence)
            # Those who run each need a block every `block_size` steps.
            if not self._fits(sequence, shared, headroom=-(-len(residents.running) // 4)):
                passed_over.append(sequence)
                continue
            # A token deep in a context may cost more than this step has time for: then its prompt begins the next one.
            if self._prompt_tokens_left(len(shared) * residents.pool.block_size) <= 0:
                return
            if any(other.overtaken_count >= world.limits.max_bypasses for other in passed_over):
                return
            for other in passed_over:
                other.overtaken_count += 1
            if sequence in world.fresh:
                room -= 1
                world.strategy.on_join()
                world.refusing = False
            self._start(sequence, shared)

    def _next(self, with_fresh: bool, passed_over: list[Sequence]) -> Sequence | None:
        queues = (self._state.resuming, self._state.fresh) if with_fresh else (self._state.resuming,)
        heads = [s for queue in queues for s in queue.first(len(passed_over) + 1) if s not in passed_over]
        return min(heads, key=lambda s: s.queue_key, default=None)

    def _fits(self, sequence: Sequence, shared: list[int], headroom: int) -> bool:
        """Whether there are blocks for all that is known of it and one position more (for all it can ever need, if it
        is pinned) beside the `shared` ones of its cached prefix, and `headroom` are left."""
        pool = self._batch.pool
        positions = sequence.max_len - 1 if sequence.pinned else min(sequence.num_known + 1, sequence.max_len - 1)
        needed = -(-max(positions, 1) // pool.block_size)
        available = pool.num_free - headroom
        return available >= needed or available - sum(map(pool.is_free, shared)) >= needed - len(shared)

    def _start(self, sequence: Sequence, shared: list[int]) -> None:
        world = self._state
        (world.fresh if sequence in world.fresh else world.resuming).remove(sequence)
        positions = sequence.max_len - 1 if sequence.pinned else sequence.num_known
        taken = self._batch.admit(sequence, shared, positions)
        start = sequence.num_planned
        world.counters.looked_up_tokens += len(sequence.tokens)
        world.counters.cached_tokens += start
        if sequence.started_at is None:
            world.queue_order.on_start(sequence)
            sequence.started_at = self._now
            sequence.cached_tokens = start
            world.counters.prompt_tokens += sequence.prompt_len
            request_id = sequence.request.request_id
            self.events.append(Started(request_id, sequence.slot, self._step, start, world.model_fingerprint))
        request = sequence.request
        self.inits.append(
            SlotInit(sequence.slot, tuple(sequence.tokens), sequence.prompt_len, tuple(shared), request.sampling)
        )
        count = min(sequence.num_unplanned, self._prompt_tokens_left(sequence.num_planned))
        self._add_prompt(sequence, count, tuple(taken))

    def _add_prompt(self, sequence: Sequence, count: int, new_blocks: tuple[int, ...]) -> None:
        before = self.kv_tokens
        self._add(sequence, count, new_blocks)
        self._prompt_tokens += count
        self._prompt_kv_tokens += self.kv_tokens - before

    def _add(self, sequence: Sequence, count: int, new_blocks: tuple[int, ...]) -> None:
        assert count > 0, "a row without a position"
        start = sequence.num_planned
        end = start + count
        sample = end == sequence.num_known
        self.chunks.append(Row(sequence.slot, start, count, sample, new_blocks))
        self.owners.append((sequence, sequence.admission_count, end))
        if start < sequence.max_computed_before:
            again = min(end, sequence.max_computed_before) - start
            sequence.recomputed_tokens += again
            self._state.counters.recomputed_tokens += again
        sequence.num_planned = end
        sequence.planned_step = self._step
        if sample:
            self.samples.append(sequence)
            sequence.num_known += 1
        self.num_tokens += count
        self.kv_tokens += count * (start + end + 1) // 2
