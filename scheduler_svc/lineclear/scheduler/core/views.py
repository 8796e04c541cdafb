"""Copies of the core's state for observers: numbers without content. Nothing here changes the core."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from lineclear.scheduler.core.inflight_step import InflightStep
from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.sequence import Sequence
from lineclear.scheduler.core.shared_state import SharedState
from lineclear.scheduler.core.stats import Counters
from lineclear.scheduler.core.worker_state import WorkerState

MAX_WAITING = 64
"""Waiting requests in a view."""


class PlannedChunk(NamedTuple):
    """The request of a planned chunk. Positions below `computed_before` were computed in an earlier admission."""

    number: int
    prompt_len: int
    computed_before: int


class Occupancy(NamedTuple):
    """Waiting requests of all workers; running requests, usable slots and KV blocks of one."""

    num_waiting: int
    num_running: int
    num_slots: int
    blocks_used: int
    blocks_cached: int


class WaitingView(NamedTuple):
    """A request in the queue."""

    number: int
    prompt_len: int
    max_tokens: int
    arrival: float
    is_resuming: bool


class RunningView(NamedTuple):
    """A request with a slot. `position`: positions planned so far."""

    number: int
    slot: int
    prompt_len: int
    max_tokens: int
    position: int
    cached_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A joined worker. `references` has a count for each block, `cached` the free blocks that keep a prefix."""

    epoch: int
    device: str
    num_slots: int
    steps: int
    steps_in_flight: int
    block_size: int
    running: tuple[RunningView, ...]
    references: tuple[int, ...]
    cached: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CoreView:
    """The queue and the workers. `waiting` has the first MAX_WAITING requests."""

    draining: bool
    num_waiting: int
    num_tokens_waiting: int
    waiting: tuple[WaitingView, ...]
    workers: tuple[WorkerView, ...]
    counters: Counters


def planned_chunks(inflight: InflightStep) -> list[PlannedChunk]:
    """Return the request of each chunk, in the plan's order."""
    return [PlannedChunk(s.number, s.prompt_len, s.max_computed_before) for s, *_ in inflight.chunk_rows]


def occupancy(state: SharedState, worker: WorkerState) -> Occupancy:
    """Return the queue's length and what is in use of a worker."""
    batch, pool = worker.batch, worker.batch.pool
    waiting = len(state.fresh) + len(state.resuming)
    return Occupancy(waiting, batch.num_running, batch.num_slots, pool.num_used, pool.num_cached)


def core_view(state: SharedState) -> CoreView:
    """Return a copy of queue, slots and blocks."""
    return CoreView(
        draining=state.draining,
        num_waiting=len(state.fresh) + len(state.resuming),
        num_tokens_waiting=state.fresh.num_tokens + state.resuming.num_tokens,
        waiting=_waiting(state.fresh, state.resuming),
        workers=tuple(map(_worker, state.workers.values())),
        counters=state.counters.copy(),
    )


def _waiting(fresh: RequestQueue, resuming: RequestQueue) -> tuple[WaitingView, ...]:
    """Return the requests that are served next, in their order."""
    heads = chain(fresh.first(MAX_WAITING), resuming.first(MAX_WAITING))
    ordered = sorted(heads, key=lambda s: s.queue_key)[:MAX_WAITING]
    return tuple(
        WaitingView(s.number, s.prompt_len, s.request.max_tokens, s.arrival, s.started_at is not None) for s in ordered
    )


def _worker(worker: WorkerState) -> WorkerView:
    batch, pool = worker.batch, worker.batch.pool
    return WorkerView(
        epoch=worker.hello.epoch,
        device=worker.hello.device,
        num_slots=batch.num_slots,
        steps=worker.step,
        steps_in_flight=len(worker.inflight),
        block_size=pool.block_size,
        running=tuple(_running(s, batch) for s in batch.running),
        references=pool.reference_counts(),
        cached=pool.cached_blocks(),
    )


def _running(sequence: Sequence, batch: RunningBatch) -> RunningView:
    position = sequence.num_planned
    if sequence.in_decode_batch:  # its own fields are as of the last sync
        position = sequence.decode_offset + batch.decode_batch.decode_step + 1
    return RunningView(
        sequence.number,
        sequence.slot,
        sequence.prompt_len,
        sequence.request.max_tokens,
        position,
        sequence.cached_tokens,
        sequence.preemptions,
    )
