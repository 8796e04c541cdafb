"""Predicts when a waiting request starts: the requests before it take slots in order, as slots become free.

That is list scheduling (Graham 1966) over the slots of all workers, with the expected output lengths and the pace of
the requests that ended last. Later requests with an earlier key, and preemptions, are not foreseen.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice

from lineclear.scheduler.core.core_state import SharedState, WorkerState
from lineclear.scheduler.core.events import QueuePosition
from lineclear.scheduler.core.sequence import Sequence

_MAX_SIMULATED = 64  # requests that are given a slot one by one; the others count by their mean
LAST = (float("inf"), 0)
"""A key behind all requests."""


def queue_position(state: SharedState, key: tuple[float, int], now: float, *, arriving: int = 0) -> QueuePosition:
    """Return the place and the predicted wait of a request with this key, which waits or is one that is `arriving`."""
    ahead = state.resuming.num_before(key) + state.fresh.num_before(key)
    if state.limits.batching_strategy == "fixed_size":
        return QueuePosition(ahead, _seconds_to_batch(state, ahead, now, len(state.fresh) + arriving))
    return QueuePosition(ahead, _seconds_to_slot(state, ahead, now))


def must_wait(state: SharedState, place: QueuePosition) -> bool:
    """Return whether a request that has just arrived waits for others to end."""
    is_unknown_batch = state.limits.batching_strategy == "fixed_size" and place.seconds is None
    return place.requests_ahead >= _num_free_slots(state) or bool(place.seconds) or is_unknown_batch


def _seconds_to_slot(state: SharedState, ahead: int, now: float) -> float | None:
    if not ahead and _num_free_slots(state):
        return 0.0
    free_in: list[float] = []  # seconds until each slot is free, a heap
    for worker in state.workers.values():
        busy = [_seconds_left(state, sequence, now) for sequence in worker.batch.running]
        if any(seconds is None for seconds in busy):
            return None
        free_in += [seconds or 0.0 for seconds in busy] + [0.0] * (_capacity(worker) - len(busy))
    if not free_in:
        return None
    heapq.heapify(free_in)
    if not ahead:
        return free_in[0]
    for sequence in islice(_in_order(state), min(ahead, _MAX_SIMULATED)):
        seconds = _seconds_to_run(state, sequence)
        if seconds is None:
            return None
        heapq.heapreplace(free_in, free_in[0] + seconds)
    return free_in[0] + max(0, ahead - _MAX_SIMULATED) * (_mean_seconds(state) or 0.0) / len(free_in)


def _seconds_to_batch(state: SharedState, ahead: int, now: float, num_fresh: int) -> float | None:
    """Return the wait with `fixed_size`: batches start full, one after the other. None if the batch is not full.

    `num_fresh` requests have not started.
    """
    slots = sum(_capacity(worker) for worker in state.workers.values())
    timeout = state.limits.policy.fixed_size_timeout_seconds
    batches = ahead // max(slots, 1)
    if not slots or (num_fresh < (batches + 1) * slots and timeout is None):
        return None
    busy = [_seconds_left(state, s, now) for worker in state.workers.values() for s in worker.batch.running]
    mean = _mean_seconds(state) if batches else 0.0
    if mean is None or any(seconds is None for seconds in busy):
        return None
    running = max((seconds or 0.0 for seconds in busy), default=0.0)
    is_full = num_fresh >= (batches + 1) * slots
    return max(running + batches * mean, 0.0 if is_full else timeout or 0.0)


def _num_free_slots(state: SharedState) -> int:
    return sum(worker.batch.num_free_slots for worker in state.workers.values())


def _in_order(state: SharedState) -> Iterator[Sequence]:
    return heapq.merge(state.resuming, state.fresh, key=lambda sequence: sequence.queue_key)


def _capacity(worker: WorkerState) -> int:
    """Return how many requests run at once: as many as the slots, or as the blocks at the size of the present ones."""
    batch = worker.batch
    running, size = len(batch.running), batch.pool.block_size
    if running < 2:
        return batch.num_slots
    mean_blocks = sum(-(-s.request.expected_len // size) for s in batch.running) / running
    return max(running, min(batch.num_slots, int(batch.pool.num_blocks / mean_blocks)))


def _seconds_left(state: SharedState, sequence: Sequence, now: float) -> float | None:
    """Return how long a running sequence keeps its slot."""
    request = sequence.request
    if sequence.first_token_at is None:
        seconds = _seconds_to_run(state, sequence)
        return None if seconds is None else max(0.0, seconds - (now - (sequence.started_at or now)))
    return state.pace.seconds(0, _output_left(sequence, request.expected_len - sequence.prompt_len))


def _seconds_to_run(state: SharedState, sequence: Sequence) -> float | None:
    """Return how long a waiting sequence will hold a slot."""
    expected = sequence.request.expected_len - sequence.prompt_len
    return state.pace.seconds(len(sequence.tokens), _output_left(sequence, expected))


def _output_left(sequence: Sequence, expected: int) -> float:
    """Return the expected number of further tokens: past `expected`, half of it, as long as max_tokens allows."""
    left = expected - sequence.num_outputs
    return left if left > 0 else min(expected / 2, sequence.max_len - len(sequence.tokens))


def _mean_seconds(state: SharedState) -> float | None:
    """Return how long a waiting request will hold a slot, on average."""
    count = len(state.fresh) + len(state.resuming)
    tokens = state.fresh.num_tokens + state.resuming.num_tokens
    output = state.fresh.expected_len + state.resuming.expected_len - tokens
    return state.pace.seconds(tokens / count, max(0, output) / count) if count else 0.0
