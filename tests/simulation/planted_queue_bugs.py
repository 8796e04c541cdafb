"""Bugs to plant in the queue, its orders and places, and in preemption. See `mutations` for operators and patterns."""

from __future__ import annotations

from simulation.mutations import Bug, always, boundary, drop, never, off_by_one, replace, swap, without

from lineclear.scheduler.core import limits, policies, wait_prediction
from lineclear.scheduler.core.fair_share import FairShare
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.policies import Deadline, Priority, Shortest
from lineclear.scheduler.core.queue_walk import QueueWalk
from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.core.shared_state import SharedState
from lineclear.scheduler.core.slot_pace import SlotPace
from lineclear.scheduler.core.sorted_keys import SortedKeys

_QUEUE = (
    Bug("the id of a live request is accepted again", Scheduler.submit, never("request.request_id in self._live")),
    Bug("one request too many waits", limits.check_queue, boundary("waiting.num_places >= limits.max_queue_size")),
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
        without("num_rows > tokens_left"),
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
        replace("max(free_tokens, _1)", "max(0, _1)"),
    ),
    Bug(
        "a resuming sequence waits for the strategy",
        QueueWalk.next,
        replace("(self._resuming,)", "()"),
    ),
    Bug("the last to arrive goes first", Priority.key, replace("now + _1", "-now + _1")),
    Bug(
        "shortest leaves out the expected output length",
        Shortest.key,
        replace("request.expected_len", "(len(request.prompt) + request.max_tokens)"),
    ),
    Bug(
        "an expected length is taken for the whole length", Request.expected_len, replace("len(self.prompt) + _1", "_1")
    ),
)

_DEADLINES = (
    Bug("the order deadline leaves out the run time", Deadline.key, replace("due - run_seconds", "due")),
    Bug("a start in the past goes before all that wait", Deadline.key, replace("max(now, _1)", "_1")),
    Bug(
        "the run time leaves out the expected output length",
        SlotPace.run_seconds,
        replace("request.expected_len", "(len(request.prompt) + request.max_tokens)"),
    ),
    Bug(
        "a wait leaves out the expected output length",
        wait_prediction._seconds_to_run,
        replace("sequence.request.expected_len - sequence.prompt_len", "sequence.request.max_tokens"),
    ),
    Bug(
        "deadlines that would pass in the queue are admitted",
        Scheduler.submit,
        never("self.limits.reject_unmeetable_deadlines and _ and _"),
    ),
    Bug(
        "a deadline is compared with the whole wait",
        limits.check_deadline,
        replace("place.seconds / MAX_SPEEDUP", "place.seconds"),
    ),
    Bug(
        "a preview ignores what the tenant has waiting",
        FairShare.preview,
        replace("max(key, account.last_key) if _ else key", "key"),
    ),
    Bug(
        "a request that completes a batch is not counted",
        Scheduler._preview,
        replace("queue_position(_1, _2, _3, arriving=1)", "queue_position(_1, _2, _3)"),
    ),
    Bug(
        "requests are rejected behind less than a batch",
        limits.check_deadline,
        replace("place.requests_ahead < num_slots", "place.requests_ahead < 1"),
    ),
)

_SHARES = (
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

_PREEMPTION = (
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
        never("sequence.protected"),
    ),
    Bug("newest preempts the oldest", policies.newest, swap("max", "min")),
    Bug("cheapest preempts the dearest", policies.cheapest, swap("min", "max")),
    Bug(
        "a sequence with a row in this step is preempted",
        StepPlanner._take_block_or_preempt,
        without("other.planned_step != self._step"),
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

QUEUE_BUGS = (*_QUEUE, *_ORDER, *_DEADLINES, *_SHARES, *_PREEMPTION, *_PLACES)
