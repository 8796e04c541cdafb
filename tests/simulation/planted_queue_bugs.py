"""Bugs to plant in admission, the queue and its orders, batching strategies, and predicted waits. See `mutations`."""

from __future__ import annotations

from simulation.mutations import Bugs, always, boundary, drop, never, off_by_one, replace, swap, without

from lineclear.scheduler.core import limits, policies, wait_prediction
from lineclear.scheduler.core.core_state import SlotPace
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.policies import (
    Adaptive,
    BatchingState,
    BatchingStrategy,
    Deadline,
    DynamicTimeout,
    FairShare,
    FixedSize,
    Priority,
    QueueOrder,
    Shortest,
)
from lineclear.scheduler.core.request_queue import RequestQueue, SortedKeys

QUEUE_BUGS: Bugs = {
    CoreLimits: {"a switch keeps the tenants' weights": replace("self.policy.share_weights", "None")},
    limits: {
        "one request too many waits": boundary("waiting.num_places >= limits.max_queue_size"),
        "one token too many waits": replace("_1 > limits.max_queue_tokens", "_1 > limits.max_queue_tokens + 1"),
        "a sibling needs a place in the queue": never("request.is_sibling", role="test"),
        "siblings count as waiting requests": replace("waiting.num_places", "len(waiting)", times=4),
        "tokens of siblings count as waiting": replace("waiting.place_tokens", "waiting.num_tokens", times=3),
        "a deadline is compared with the whole wait": replace("place.seconds / MAX_SPEEDUP", "place.seconds"),
        "requests are rejected behind less than a batch": replace(
            "place.requests_ahead < num_slots", "place.requests_ahead < 1"
        ),
        "a request for another model is admitted": never("wanted != hello.model_fingerprint"),
        "the last output token needs a position": off_by_one("total - 1"),
    },
    RequestQueue: {
        "each embedding adds a share": replace("len(self._live) - self.num_without_output", "len(self._live)"),
        "a token that arrives while waiting is not counted": drop("self.num_tokens += 1"),
        "a token of a waiting sibling is not counted": drop("self.sibling_tokens += sequence.request.is_sibling"),
        "a place counts from the end": replace("self._keys.rank(key)", "len(self) - self._keys.rank(key)"),
    },
    RequestQueue.push: {"a sibling is not counted": never("sequence.request.is_sibling", role="test")},
    RequestQueue.remove: {
        "a sibling that leaves the queue stays counted": never("sequence.request.is_sibling", role="test")
    },
    SortedKeys: {"a new key goes to the end": always("key > keys[-1]")},
    FairShare: {
        "a preview ignores what the tenant has waiting": replace("max(key, account.last_key) if _ else key", "key"),
        "a tenant overtakes itself with a credit": drop("key = max(key, account.last_key)"),
        "tenants are not charged": drop("account.charged += _"),
        "weights of tenants are not charged": replace("self._weight(request.tenant)", "1.0"),
        "fair shares leave out the expected output length": replace(
            "request.expected_len", "(len(request.prompt) + request.max_tokens)"
        ),
        "unused tokens are not credited": drop("account.charged -= _"),
        "a request that was cancelled in the queue is charged": replace(
            "0 if _1 else _2", "sequence.request.expected_len if _1 else _2"
        ),
        "weights of tenants are not settled": replace("self._weight(tenant)", "1.0"),
        "more tokens than expected are not charged": replace(
            "sequence.request.expected_len - used", "max(0, sequence.request.expected_len - used)"
        ),
        "unused tokens are counted from max_tokens": replace(
            "sequence.request.expected_len - used", "len(sequence.request.prompt) + sequence.request.max_tokens - used"
        ),
    },
    FairShare.key: {"an idle tenant saves up tokens": replace("max(account.charged, self._clock)", "account.charged")},
    FairShare.on_start: {"the clock of shares stands still": replace("max(...)", "0")},
    BatchingState: {
        "waiting ends a rounding error late": replace(
            "self.now >= self.oldest_arrival + seconds", "self.now - self.oldest_arrival >= seconds"
        )
    },
    BatchingStrategy: {
        "a batch timeout is missed": replace("state.oldest_arrival + self._settings.batch_timeout_seconds", "None"),
        "an idle engine does not wait for min_batch_size": always("state.num_waiting >= min(...)"),
    },
    FixedSize: {
        "a fixed batch takes late requests": without("state.num_active == 0"),
        "a fixed batch forgets its waiting members": never("self._joins_left and _"),
        "a fixed batch starts one short": replace("_1 >= state.num_slots", "_1 >= state.num_slots - 1"),
        "a fixed batch waits though the queue rejects": without("state.refusing"),
    },
    DynamicTimeout: {
        "a group does not wait": always("full or _ or _"),
        "a group waits for twice the timeout": replace("self._settings.batch_timeout_seconds", "2 * _0"),
        "a minimum batch of two counts as none": replace(
            "self._settings.min_batch_size > 1", "self._settings.min_batch_size > 2"
        ),
    },
    Adaptive: {"adaptive batching lets no request start": replace("0 if state.num_active else 1", "0")},
    QueueOrder: {"the first to arrive has no earlier key": replace("return now", "return 0.0")},
    Priority: {"the last to arrive goes first": replace("now + _1", "-now + _1")},
    Shortest: {
        "shortest leaves out the expected output length": replace(
            "request.expected_len", "(len(request.prompt) + request.max_tokens)"
        )
    },
    Deadline: {
        "the order deadline leaves out the run time": replace("due - run_seconds", "due"),
        "a start in the past goes before all that wait": replace("max(now, _1)", "_1"),
    },
    policies: {
        "of equal candidates the first to arrive is preempted": replace("-s.queue_key[1]", "s.queue_key[1]"),
        "of equal candidates the one with the better key is preempted": replace("-s.queue_key[0]", "s.queue_key[0]"),
    },
    policies.newest: {
        "newest preempts the oldest": swap("max", "min"),
        "of candidates with equal keys any is preempted": replace("s.queue_key", "s.queue_key[0]"),
    },
    policies.cheapest: {"cheapest preempts the dearest": swap("min", "max")},
    SlotPace: {
        "the run time leaves out the expected output length": replace(
            "request.expected_len", "(len(request.prompt) + request.max_tokens)"
        )
    },
    wait_prediction: {
        "a place leaves out preempted requests": replace("_1.num_before(key) + _2", "_2"),
        "every place is behind all others": replace("state.fresh.num_before(key)", "len(state.fresh)"),
        "a request that waits gets no place": replace(
            "place.requests_ahead >= _1 or _2 or _3", "place.requests_ahead > _1"
        ),
        "a running request takes less than no time": replace("max(0.0, seconds - _1)", "seconds - _1"),
        "a wait leaves out the expected output length": replace(
            "sequence.request.expected_len - sequence.prompt_len", "sequence.request.max_tokens"
        ),
    },
}
