"""Bugs to plant in the core, each one operator on one function. See `mutations` for operators and patterns."""

from __future__ import annotations

from simulation.mutations import Bug, always, boundary, drop, never, off_by_one, replace, swap, twice, without
from simulation.planted_worker_bugs import WORKER_BUGS

from lineclear.scheduler.core import limits, policies, result_applier, running_batch, wait_prediction
from lineclear.scheduler.core.block_pool import BlockHasher, BlockPool
from lineclear.scheduler.core.decode_batch import DecodeBatch
from lineclear.scheduler.core.fair_share import FairShare
from lineclear.scheduler.core.inflight_step import InflightStep, ResultTokens
from lineclear.scheduler.core.isolation import Isolation
from lineclear.scheduler.core.live_requests import LiveRequests
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.poison_detector import PoisonDetector
from lineclear.scheduler.core.policies import (
    Adaptive,
    BatchingState,
    Continuous,
    DynamicTimeout,
    FixedSize,
    Priority,
    Shortest,
)
from lineclear.scheduler.core.queue_walk import QueueWalk
from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.result_applier import ResultApplier
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Sequence
from lineclear.scheduler.core.shared_state import SharedState
from lineclear.scheduler.core.sorted_keys import SortedKeys
from lineclear.scheduler.core.worker_state import WorkerState

_BLOCKS = (
    Bug("blocks are not released", RunningBatch.free, drop("self.pool.release(sequence.blocks)")),
    Bug("blocks are released twice", RunningBatch.free, twice("self.pool.release(sequence.blocks)")),
    Bug("a shared block is not counted", BlockPool.share, drop("self._references[block] += 1")),
    Bug("a shared block stays evictable", BlockPool.share, drop("self._cached.pop(block, None)")),
    Bug("an evicted block stays published", BlockPool.take, drop("self._unpublish(block)")),
    Bug(
        "the newest cached block is evicted",
        BlockPool.take,
        replace("self._cached.popitem(last=False)", "self._cached.popitem()"),
    ),
    Bug(
        "cached blocks go before empty ones",
        BlockPool.take,
        replace("self._empty", "self._empty and not self._cached", role="test"),
    ),
    Bug("the head of a prefix is evicted first", BlockPool.release, replace("reversed(blocks)", "blocks")),
    Bug(
        "a slot is not released",
        RunningBatch._remove_from_slot,
        drop("heapq.heappush(self.unused_slots, sequence.slot)"),
    ),
    Bug(
        "a single decode takes its block one position late",
        StepPlanner._plan_decodes_one_by_one,
        boundary("sequence.num_planned < len(sequence.blocks) * size"),
    ),
    Bug(
        "a single decode takes its block one position early",
        StepPlanner._plan_decodes_one_by_one,
        off_by_one("sequence.num_planned"),
    ),
    Bug(
        "the decode batch gets no further block",
        DecodeBatch.needing_block,
        never("s.decode_offset + _ == len(s.blocks) * size"),
    ),
    Bug(
        "the decode batch gets a block that is there already",
        DecodeBatch.needing_block,
        always("s.decode_offset + _ == len(s.blocks) * size"),
    ),
    Bug(
        "the decode batch takes blocks that are not free",
        StepPlanner._plan_decodes,
        without("len(growing) > batch.pool.num_free"),
    ),
)

_SLOTS = (
    Bug("slots are handed on with the result", StepPlanner._release_slots, drop("self._batch.release_slot(sequence)")),
    Bug("a decode keeps its slot", StepPlanner._plan_decode_batch, drop("self._finishing += decode_batch.finishing()")),
    Bug(
        "a chunk keeps its slot",
        StepPlanner._add,
        never("sequence.num_known == sequence.max_len"),
    ),
    Bug(
        "a slot is handed on one row early",
        StepPlanner._add,
        replace("sequence.num_known == sequence.max_len", "sequence.num_known >= sequence.max_len - 1"),
    ),
    Bug(
        "the blocks of a last row are freed with the slot",
        RunningBatch.release_slot,
        replace(
            "self.finishing[sequence] = None",
            "self.pool.release(sequence.blocks) or self.finishing.__setitem__(sequence, None)",
        ),
    ),
    Bug(
        "a lost worker takes the sequences with their last row in flight",
        RunningBatch.remove_all,
        replace("(*self.running, *self.finishing)", "self.running"),
    ),
    Bug(
        "a slot is handed on twice",
        RunningBatch._remove_from_slot,
        twice("heapq.heappush(self.unused_slots, sequence.slot)"),
    ),
    Bug(
        "an ended request stays among the last rows",
        RunningBatch.free,
        drop("del self.finishing[sequence]"),
    ),
)

_PREFIX_CACHE = (
    Bug(
        "the last prompt token is a hit",
        RunningBatch.cached_prefix,
        replace("len(sequence.tokens) - 1", "len(sequence.tokens)"),
    ),
    Bug("a block key leaves out the salt", BlockHasher.__call__, replace("cache_salt", 'b""')),
    Bug("a block key leaves out the block before", BlockHasher.__call__, without("parent")),
    Bug(
        "a block that is not full is published",
        RunningBatch.publish,
        replace("range(_1, _2)", "range(_1, -(-sequence.num_computed // size))"),
    ),
    Bug(
        "blocks are published when planned",
        RunningBatch.publish,
        replace("sequence.num_computed", "min(sequence.num_planned, len(sequence.tokens))"),
        times=3,
    ),
    Bug("full blocks of a decode step are not published", DecodeBatch.completing_block, replace("list(_)", "[]")),
    Bug("the prefix cache never hits", RunningBatch.cached_prefix, never("self._prefix_cache")),
    Bug(
        "block keys outlive the block size",
        RunningBatch._block_content,
        replace("sequence.block_keys.setdefault(size, [])", "sequence.block_keys.setdefault(0, [])"),
    ),
)

_SHARED_WHEN_PLANNED = (
    Bug(
        "prompt blocks are published with the result",
        StepPlanner._add,
        drop("self._batch.publish_planned(sequence, self._step)"),
    ),
    Bug(
        "blocks are published before they are planned",
        RunningBatch.publish_planned,
        replace("min(sequence.num_planned, len(sequence.tokens))", "len(sequence.tokens)"),
    ),
    Bug(
        "a block whose last token is in flight is published",
        RunningBatch.publish_planned,
        replace("min(sequence.num_planned, len(sequence.tokens))", "sequence.num_planned"),
    ),
    Bug(
        "sequences that share a block of a bad row go on",
        ResultApplier._restart_readers,
        replace("worker.batch.add_readers(bad)", "()"),
    ),
    Bug(
        "sharing a block that is not confirmed is not noted",
        RunningBatch.admit,
        drop("writes.readers[sequence] = sequence.admission_count"),
    ),
    Bug(
        "blocks of sequences that are computed again are not tainted",
        RunningBatch.add_readers,
        drop("bad |= found"),
    ),
    Bug("void samples are delivered", ResultApplier._restart_readers, drop("sequence.num_void = sequence.in_flight")),
    Bug("a void sample stays known", ResultApplier._append_tokens, drop("sequence.num_known -= 1")),
    Bug(
        "a released block stays in the prefix cache with its row in flight",
        BlockPool.release,
        never("block in self._unconfirmed"),
    ),
    Bug("a block is never confirmed", BlockPool.resolve_pending, drop("del self._unconfirmed[block]")),
    Bug(
        "a shared block is free when its writer is removed",
        BlockPool.release_pending,
        replace("self._references[block] -= 1", "self._references[block] = 0"),
    ),
)

_NON_FINITE_VALUES = (
    Bug(
        "a bad row is delivered",
        result_applier._bad_samples,
        replace("result.bad_rows", "frozenset()"),
        times=2,
    ),
    Bug("a tainted block is not zeroed", BlockPool._taint, drop("self._tainted.add(block)")),
    Bug("a tainted block stays in the prefix cache", BlockPool._taint, drop("self._unpublish(block)")),
    Bug(
        "a token out of the vocabulary is delivered",
        result_applier._bad_samples,
        always("0 <= min(tokens) <= max(tokens) < vocab_size"),
    ),
    Bug(
        "a negative token is delivered",
        result_applier._bad_samples,
        replace("not 0 <= token < vocab_size", "token >= vocab_size"),
    ),
    Bug(
        "blocks with rows in flight are not pending",
        RunningBatch.free,
        never("sequence.num_planned > sequence.num_computed"),
    ),
    Bug("pending writes that were non-finite are forgotten", BlockPool.resolve_pending, never("tainted", role="test")),
    Bug("pending writes are never resolved", RunningBatch.resolve_pending, never("_.last_step <= step", role="test")),
)

_RESULTS = (
    Bug(
        "the epoch of a result is not compared",
        ResultApplier.apply,
        replace("self._state.workers.get(result.epoch)", "next(iter(self._state.workers.values()), None)"),
    ),
    Bug(
        "the step of a result is not compared",
        ResultApplier.apply,
        without("result.step != inflight.step"),
    ),
    Bug(
        "a step in flight is removed before its result is checked",
        ResultApplier.apply,
        replace("worker.inflight[0]", "worker.inflight.popleft()"),
    ),
    Bug(
        "a step of NaN seconds is accepted",
        InflightStep.check,
        replace('not 0.0 <= result.step_seconds < float("inf")', "result.step_seconds < 0.0"),
    ),
    Bug(
        "steps of a lost worker stay in flight",
        WorkerState._clear,
        replace("deque()", "getattr(self, 'inflight', deque())"),
    ),
    Bug(
        "a lost sample counts as known",
        WorkerState.leave,
        drop("sequence.num_known = len(sequence.tokens)"),
    ),
    Bug(
        "a recovered request keeps its planned positions",
        running_batch._reset_sequence,
        replace("sequence.num_planned = _1 = _2 = 0", "_1 = _2 = 0"),
    ),
    Bug(
        "rows of an earlier admission count for this one",
        ResultApplier.apply,
        without("sequence.admission_count == admission"),
    ),
    Bug(
        "a wasted sample is not counted",
        ResultApplier._append_tokens,
        drop("counters.wasted_samples += 1"),
        times=2,
    ),
)

_ENDS = (
    Bug("one position too many is planned", Sequence.num_unplanned, off_by_one("self.max_len - 1")),
    Bug("one decode step too many", DecodeBatch.finishing, replace("self._by_last_step.get(...)", "()")),
    Bug(
        "a sequence that left the decode batch counts as a member",
        DecodeBatch.leave,
        drop("sequence.in_decode_batch = False"),
    ),
    Bug("a sequence leaves the decode batch without sync", DecodeBatch.leave, drop("self.sync(sequence)")),
    Bug(
        "a sequence that rejoined counts as one that stayed",
        DecodeBatch.left_since,
        without("sequence.decode_joined_at > decode_step"),
    ),
    Bug("changed members are taken for the current rows", DecodeBatch.left_since, always("rows is self._cached_rows")),
    Bug(
        "a bad token is appended with the others",
        ResultApplier._append_tokens,
        drop("batch.leave_decode(rows[row])"),
    ),
    Bug("the cached rows outlive a member", DecodeBatch.leave, drop("self._cached_rows = None")),
    Bug("a joining sequence has no row", DecodeBatch._add, drop("self._cached_rows = None")),
    Bug("a stop token in a decode step is missed", ResultTokens.add_decode_rows, replace("map(...)", "()")),
    Bug(
        "the tokens of a decode step are one index late",
        DecodeBatch._add,
        off_by_one("offset + 1 - sequence.prompt_len"),
    ),
    Bug(
        "the keys and values of a decode step are not counted",
        DecodeBatch.num_positions,
        without("self._sum_of_offsets"),
    ),
    Bug("one token fewer than max_tokens", ResultApplier._finish_complete, off_by_one("sequence.max_len", -1)),
    Bug(
        "a stop token is missed at min_tokens + 1",
        ResultApplier._finish_complete,
        off_by_one("request.sampling.min_tokens"),
    ),
    Bug(
        "a stop token at max_tokens counts as length",
        ResultApplier._finish_complete,
        replace("token in sequence.stop_token_ids", "len(sequence.tokens) < sequence.max_len and _0"),
    ),
    Bug("the end is reported twice", Scheduler.cancel, replace("[self._live.fail(...)]", "2 * _0")),
    Bug(
        "the statistics leave out the cut of a stop string",
        Scheduler.finish_at_stop_string,
        replace("self._live.complete(_1, _2, _3, _4, num_tokens)", "self._live.complete(_1, _2, _3, _4)"),
    ),
    Bug("an expired request runs a step longer", LiveRequests.pop_expired, boundary("self._deadlines[0][0] <= now")),
)

_POISON = (
    Bug("no request is ever suspected", PoisonDetector.record_crash, drop("sequence.crash_count += 1")),
    Bug("suspects run together", Isolation.choose, replace("state.poison", "not state.poison", role="test")),
    Bug("a first crash is proof", PoisonDetector.is_poison, always("sequence.crash_count > 1")),
    Bug(
        "a crash beside others is proof",
        PoisonDetector.record_crash,
        replace("len(in_flight) != 1", "not in_flight"),
    ),
    Bug("an isolated crash proves nothing", PoisonDetector.is_poison, boundary("_ >= 1.0")),
    Bug("a kill counts as much as a crash", PoisonDetector.is_poison, always("loss is WorkerLoss.CRASHED")),
    Bug("suspicion never ends", PoisonDetector.clear_passed, never("s.num_computed >= s.clear_position")),
    Bug("suspicion ends with the first result", PoisonDetector.clear_passed, always("s.num_computed >= _")),
    Bug("a suspect runs beside the steps of another", Scheduler.plan, never("any(...)")),
    Bug(
        "a clean loss counts as a crash",
        Scheduler.worker_lost,
        replace("loss is not WorkerLoss.CLEAN", "worker.inflight"),
    ),
    Bug(
        "an out-of-memory step makes no suspects",
        Scheduler.on_step_error,
        drop("self._state.poison.record_crash([inflight])"),
    ),
    Bug("finished requests stay suspects", LiveRequests._free, drop("state.poison.remove(sequence)")),
)

_QUEUE = (
    Bug("the id of a live request is accepted again", Scheduler.submit, never("request.request_id in self._live")),
    Bug("one request too many waits", limits.check_queue, boundary("len(waiting) >= limits.max_queue_size")),
    Bug(
        "one token too many waits",
        limits.check_queue,
        replace("_1 > limits.max_queue_tokens", "_1 > limits.max_queue_tokens + 1"),
    ),
    Bug("a draining server admits", Scheduler.submit, never("state.draining")),
    Bug("the last output token needs a position", limits.check_capacity, off_by_one("total - 1")),
    Bug(
        "the first of the queue is passed over",
        RequestQueue.first,
        replace("self", "list(self)[1:]"),
    ),
    Bug("a token that arrives while waiting is not counted", RequestQueue.grow, drop("self.num_tokens += 1")),
    Bug(
        "a new key goes to the end",
        SortedKeys.add,
        always("key > keys[-1]"),
    ),
)

_ORDER = (
    Bug(
        "an older sequence is preempted",
        StepPlanner._take_block_or_preempt,
        replace("other.queue_key > sequence.queue_key", "other is not sequence"),
    ),
    Bug("a protected sequence is preempted", StepPlanner._take_block_or_preempt, without("not other.protected")),
    Bug("no sequence is ever protected", SharedState.preempt, drop("victim.protected = _")),
    Bug(
        "a protected sequence takes only the blocks it needs now",
        StepPlanner._start,
        replace("sequence.max_len - 1 if sequence.protected else sequence.num_known", "sequence.num_known"),
    ),
    Bug("newest preempts the oldest", policies.newest, swap("max", "min")),
    Bug("cheapest preempts the dearest", policies.cheapest, swap("min", "max")),
    Bug(
        "a sequence with a row in this step is preempted",
        StepPlanner._take_block_or_preempt,
        without("other.planned_step != self._step"),
    ),
    Bug("a sequence with samples in flight is admitted", StepPlanner._admit_from, never("sequence.in_flight > 0")),
    Bug("overtaking is not bounded", StepPlanner._admit_from, never("any(...)")),
    Bug("overtaking is not counted", StepPlanner._admit_from, drop("other.overtaken_count += 1")),
    Bug("running sequences are not sorted by age", RunningBatch.by_age, replace("sorted(...)", "list(self.running)")),
    Bug("prompts go before decodes", StepPlanner.run, always("self._state.queue_order.prefill_first")),
    Bug(
        "a decode beyond the budget",
        StepPlanner._plan_decodes_one_by_one,
        boundary("self.num_tokens >= self._budget"),
    ),
    Bug(
        "a decode step beyond the budget",
        StepPlanner._plan_decodes,
        without("len(batch.decode_batch) + len(singles) > tokens_left"),
    ),
    Bug(
        "an admission beyond the budget",
        StepPlanner._start,
        replace("min(sequence.num_unplanned, _)", "sequence.num_unplanned"),
    ),
    Bug(
        "the tokens left for a prompt are those at position 0",
        StepPlanner._admit_from,
        replace("len(shared) * batch.pool.block_size", "0"),
    ),
    Bug("admission leaves too little headroom", RunningBatch.headroom, off_by_one("-(-len(self.running) // 4)", -1)),
    Bug(
        "a prompt waits for the inter-token target",
        StepPlanner._prompt_tokens_left,
        replace("max(free_chunk - self._prompt_tokens, _1)", "max(0, _1)"),
    ),
    Bug(
        "a resuming sequence waits for the strategy",
        QueueWalk.next,
        replace("(self._resuming,)", "()"),
    ),
    Bug("the last to arrive goes first", Priority.key, replace("now + _1", "-now + _1")),
    Bug(
        "an idle tenant saves up tokens",
        FairShare.key,
        replace("max(account.charged, self._clock)", "account.charged"),
    ),
    Bug("the clock of shares stands still", FairShare.on_start, replace("max(...)", "0")),
    Bug("a tenant overtakes itself with a credit", FairShare.key, drop("key = max(key, account.last_key)")),
    Bug("unused tokens are not credited", FairShare.on_finish, drop("account.charged -= _")),
    Bug(
        "a request that was cancelled in the queue is charged",
        FairShare.on_finish,
        replace("0 if _1 else _2", "sequence.request.expected_len if _1 else _2"),
    ),
    Bug("tenants are not charged", FairShare.key, drop("account.charged += _")),
    Bug("weights of tenants are not charged", FairShare.key, replace("self._weight(request.tenant)", "1.0")),
    Bug("weights of tenants are not settled", FairShare.on_finish, replace("self._weight(tenant)", "1.0")),
    Bug(
        "shortest leaves out the expected output length",
        Shortest.key,
        replace("request.expected_len", "(len(request.prompt) + request.max_tokens)"),
    ),
    Bug(
        "fair shares leave out the expected output length",
        FairShare.key,
        replace("request.expected_len", "(len(request.prompt) + request.max_tokens)"),
    ),
    Bug(
        "more tokens than expected are not charged",
        FairShare.on_finish,
        replace("sequence.request.expected_len - used", "max(0, sequence.request.expected_len - used)"),
    ),
    Bug(
        "unused tokens are counted from max_tokens",
        FairShare.on_finish,
        replace(
            "sequence.request.expected_len - used",
            "len(sequence.request.prompt) + sequence.request.max_tokens - used",
        ),
    ),
)

_PLACES = (
    Bug(
        "a place leaves out preempted requests",
        wait_prediction.queue_position,
        replace("_1.num_before(key) + _2", "_2"),
    ),
    Bug(
        "a place counts from the end",
        RequestQueue.num_before,
        replace("self._keys.rank(key)", "len(self) - self._keys.rank(key)"),
    ),
    Bug(
        "every place is behind all others",
        wait_prediction.queue_position,
        replace("state.fresh.num_before(key)", "len(state.fresh)"),
    ),
    Bug(
        "a request that waits gets no place",
        wait_prediction.must_wait,
        replace("place.requests_ahead >= _1 or _2 or _3", "place.requests_ahead > _1"),
    ),
    Bug("every request gets a place", Scheduler.submit, never("not request.wants_position")),
    Bug(
        "a running request takes less than no time",
        wait_prediction._seconds_left,
        replace("max(0.0, _1)", "_1"),
    ),
)

_SWITCHING = (
    Bug("waiting requests keep their place after a switch", Scheduler._assign_keys, drop("state.fresh.sort()")),
    Bug("preempted requests keep their place after a switch", Scheduler._assign_keys, drop("state.resuming.sort()")),
    Bug(
        "a switch forgets when requests arrived",
        Scheduler._assign_keys,
        replace("sequence.arrival", "0.0"),
    ),
    Bug(
        "a switch takes started requests for waiting ones",
        Scheduler._assign_keys,
        drop("state.queue_order.on_start(sequence)"),
    ),
    Bug(
        "a switch puts waiting requests before started ones",
        Scheduler._assign_keys,
        replace("s.started_at is None", "s.started_at is not None"),
    ),
    Bug("a switch keeps the queue order", Scheduler.switch, never("limits.order != before.order")),
    Bug("a switch keeps the preemption policy", Scheduler.switch, drop("state.preemption_policy = _")),
    Bug(
        "a switch reaches only the joined workers",
        Scheduler.switch,
        replace("(*state.workers.values(), *self._vacant)", "state.workers.values()"),
    ),
    Bug("a switch keeps the batching strategy", WorkerState.follow, drop("self.strategy = _")),
    Bug("a switch keeps the number of slots", WorkerState.follow, drop("self.batch.num_slots = _")),
    Bug("a switch keeps the token budget", WorkerState.follow, drop("self._limits = limits")),
    Bug(
        "fewer slots are not kept to",
        RunningBatch.num_free_slots,
        replace("max(0, _)", "len(self.unused_slots)"),
    ),
)

_STRATEGIES = (
    Bug("a fixed batch takes late requests", FixedSize.max_joins, without("state.num_active == 0")),
    Bug(
        "a fixed batch forgets its waiting members",
        FixedSize.max_joins,
        never("self._joins_left and _ and _"),
    ),
    Bug(
        "a fixed batch starts one short",
        FixedSize.max_joins,
        replace("_1 >= state.num_slots", "_1 >= state.num_slots - 1"),
    ),
    Bug("a fixed batch waits though the queue rejects", FixedSize.max_joins, without("state.refusing")),
    Bug("a group does not wait", DynamicTimeout._is_open, always("full or _ or _")),
    Bug(
        "a group waits for twice the timeout",
        DynamicTimeout._is_open,
        replace("self._settings.batch_timeout_seconds", "2 * _0"),
    ),
    Bug(
        "an idle engine does not wait for min_batch_size",
        Continuous._is_open,
        always("state.num_waiting >= min(...)"),
    ),
    Bug(
        "waiting ends a rounding error late",
        BatchingState.has_waited,
        replace("self.now >= self.oldest_arrival + seconds", "self.now - self.oldest_arrival >= seconds"),
    ),
    Bug("adaptive batching lets no request start", Adaptive.max_joins, replace("0 if state.num_active else 1", "0")),
    Bug(
        "a batch timeout is missed",
        Continuous.next_wakeup,
        replace("state.oldest_arrival + self._settings.batch_timeout_seconds", "None"),
    ),
    Bug(
        "a full pipeline spins",
        Scheduler.next_deadline,
        never("worker.is_full"),
    ),
    Bug("a past wakeup spins", Scheduler.next_deadline, without("wakeup > worker.planned_at")),
    Bug(
        "the deadline of a finished request wakes",
        LiveRequests.next_deadline,
        never("self._deadlines and self._deadlines[0][2].state is State.FINISHED"),
    ),
    Bug(
        "a plan beyond the pipeline depth",
        WorkerState.is_full,
        boundary("len(self.inflight) >= self._limits.pipeline_depth"),
    ),
    Bug(
        "a worker change restores the token budget",
        WorkerState.leave,
        replace("self._clear()", "(self._clear(), self.budget.restore())"),
    ),
)

_COUNTERS = (
    Bug("recomputed tokens are not counted", StepPlanner._add, drop("sequence.recomputed_tokens += again")),
    Bug("cached tokens are not counted", StepPlanner._start, drop("state.counters.prefix_cache_hits += start")),
    Bug(
        "a random slot",
        RunningBatch.admit,
        replace(
            "heapq.heappop(self.unused_slots)",
            "self.unused_slots.pop(__import__('random').randrange(len(self.unused_slots)))",
        ),
        is_random=True,
    ),
)

_MODEL = (
    Bug(
        "an answer continues on another model",
        Scheduler.worker_joined,
        replace("started_on if _ else ''", "''"),
    ),
    Bug(
        "a request that has not started is bound to the old model",
        Scheduler.worker_joined,
        replace("started_on if _ else ''", "started_on"),
    ),
    Bug("a request for another model is admitted", limits.check_model, never("wanted != hello.model_fingerprint")),
    Bug(
        "the model of the last worker is forgotten",
        Scheduler.worker_joined,
        replace("(state.model_fingerprint, hello.model_fingerprint)", "('', hello.model_fingerprint)"),
    ),
)

_LOGPROBS = (
    Bug(
        "a chunk gets the logprobs of the next row, too",
        ResultTokens.add,
        replace("self._result.logprobs[sample:_]", "self._result.logprobs[sample : sample + 2]"),
    ),
    Bug(
        "logprobs are taken by count, not by row",
        ResultTokens.add,
        replace(
            "self._result.logprobs[sample:_]",
            "self._result.logprobs[len(self._logprobs) : len(self._logprobs) + 1]",
        ),
    ),
    Bug(
        "logprobs of a skipped row stay",
        ResultTokens.add_decode_rows,
        replace("skipped if logprobs else ()", "()"),
    ),
    Bug(
        "decode rows get the logprobs of the chunks, too",
        ResultTokens.add_decode_rows,
        replace("self._result.logprobs[:_]", "self._result.logprobs"),
    ),
)

_TIES = (
    Bug(
        "a minimum batch of two counts as none",
        DynamicTimeout._is_open,
        replace("self._settings.min_batch_size > 1", "self._settings.min_batch_size > 2"),
    ),
    Bug(
        "of equal candidates the first to arrive is preempted",
        policies.cheapest,
        replace("-s.queue_key[1]", "s.queue_key[1]"),
    ),
    Bug(
        "of equal candidates the one with the better key is preempted",
        policies.cheapest,
        replace("-s.queue_key[0]", "s.queue_key[0]"),
    ),
    Bug(
        "of candidates with equal keys any is preempted",
        policies.newest,
        replace("s.queue_key", "s.queue_key[0]"),
    ),
    Bug(
        "the decode batch keeps its members when the worker is lost",
        Scheduler.worker_lost,
        drop("worker.batch.dissolve_decode()"),
    ),
)

BUGS = (
    *(*_BLOCKS, *_SLOTS, *_PREFIX_CACHE, *_SHARED_WHEN_PLANNED, *_NON_FINITE_VALUES),
    *(*_RESULTS, *_ENDS, *_POISON, *_QUEUE, *_ORDER),
    *(*_PLACES, *_SWITCHING, *_STRATEGIES, *_COUNTERS, *_MODEL, *_LOGPROBS, *_TIES, *WORKER_BUGS),
)
