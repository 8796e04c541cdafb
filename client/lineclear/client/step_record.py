"""Executed steps and the state of a scheduler, as `AdminClient.watch_steps` returns them.

Requests are numbers of arrival; there are no prompts, answers, request ids or tenants.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from google.protobuf.duration_pb2 import Duration

from lineclear.v1 import steps_pb2 as pb


class RowKind(StrEnum):
    """What a row computes: positions of a prompt, one position of an answer, or positions that were computed before.

    A kind newer than this client counts as PREFILL.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class StepRow:
    """Consecutive positions of one request. `cached_tokens`: positions from the prefix cache.

    `samples`: the row samples a token.
    """

    slot: int
    request: int
    start: int
    num_tokens: int
    kind: RowKind
    cached_tokens: int = 0
    samples: bool = True


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one worker. `started`, `ended` and `preempted` are numbers of requests.

    `time_seconds`: when the step was planned, by a clock whose differences alone have a meaning; `planned_at` is the
    same by the wall clock. `seconds`: how long the worker computed; `total_seconds`: from the plan to the result.
    Requests, blocks and slots are those after the step. `number` counts the steps of all workers.
    """

    worker: int
    epoch: int
    step: int
    time_seconds: float
    seconds: float
    rows: tuple[StepRow, ...]
    ended: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    num_slots: int = 0
    num_waiting: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    num_blocks: int = 0
    started: tuple[int, ...] = ()
    num_running: int = 0
    total_seconds: float = 0.0
    planned_at: datetime | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request in the queue. `is_resuming`: it has run before, and was preempted or lost its worker."""

    request: int
    prompt_tokens: int
    max_tokens: int
    waited_seconds: float
    is_resuming: bool


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request with a slot. `position`: positions planned so far, of prompt_tokens + max_tokens - 1."""

    request: int
    worker: int
    slot: int
    prompt_tokens: int
    max_tokens: int
    position: int
    cached_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class WatchedWorker:
    """A joined worker.

    `block_map`: a byte for each KV block: 0 free, 1 free with a cached prefix, otherwise one more than the number of
    requests that use it, at most 255. Empty unless requested.
    """

    worker: int
    epoch: int
    device: str
    num_slots: int
    num_running: int
    steps_in_flight: int
    steps: int
    num_blocks: int
    block_size: int
    blocks_used: int
    blocks_shared: int
    blocks_cached: int
    block_map: bytes


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """A scheduler at one moment: `time_seconds`, by the clock of `StepRecord.time_seconds`.

    `waiting` has the 64 requests that are served next at most; `num_waiting` counts all. Tokens and preemptions are
    totals since the server started.
    """

    time_seconds: float
    draining: bool
    num_waiting: int
    num_tokens_waiting: int
    waiting: tuple[WaitingRequest, ...]
    running: tuple[RunningRequest, ...]
    workers: tuple[WatchedWorker, ...]
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: int
    num_workers_wanted: int = 0
    """Workers that the server keeps running, joined or not; 0 if another program starts them."""


@dataclass(frozen=True, slots=True)
class WatchedSteps:
    """The steps since the last one of these, `skipped` of which are lost, and the state if requested."""

    steps: tuple[StepRecord, ...]
    skipped: int
    state: SchedulerState | None


def watched_steps(message: pb.WatchStepsResponse) -> WatchedSteps:
    """Return a response as values."""
    state = _state(message.state) if message.HasField("state") else None
    return WatchedSteps(tuple(map(_record, message.steps)), message.skipped, state)


def _record(message: pb.StepRecord) -> StepRecord:
    return StepRecord(
        worker=message.worker,
        epoch=message.epoch,
        step=message.step,
        time_seconds=_seconds(message.planned_at),
        seconds=_seconds(message.step_time),
        rows=_rows(message.rows),
        ended=tuple(message.ended),
        preempted=tuple(message.preempted),
        num_slots=message.num_slots,
        num_waiting=message.num_waiting,
        blocks_used=message.blocks_used,
        blocks_cached=message.blocks_cached,
        num_blocks=message.num_blocks,
        started=tuple(message.started),
        num_running=message.num_running,
        total_seconds=_seconds(message.total_time),
        planned_at=datetime.fromtimestamp(message.planned_time.ToNanoseconds() / 1e9, UTC),
        number=message.number,
    )


_KINDS = {
    pb.ROW_KIND_DECODE: RowKind.DECODE,
    pb.ROW_KIND_RECOMPUTE: RowKind.RECOMPUTE,
}


def _rows(rows: pb.StepRows) -> tuple[StepRow, ...]:
    kinds = (_KINDS.get(kind, RowKind.PREFILL) for kind in rows.kind)
    columns = rows.slot, rows.request, rows.start, rows.num_tokens, kinds, rows.cached_tokens, rows.samples
    return tuple(StepRow(*row) for row in zip(*columns, strict=False))


def _state(message: pb.SchedulerState) -> SchedulerState:
    return SchedulerState(
        time_seconds=_seconds(message.taken_at),
        draining=message.draining,
        num_waiting=message.num_waiting,
        num_tokens_waiting=message.num_tokens_waiting,
        waiting=tuple(
            WaitingRequest(w.request, w.prompt_tokens, w.max_tokens, _seconds(w.waited), w.is_resuming)
            for w in message.waiting
        ),
        running=tuple(
            RunningRequest(
                r.request, r.worker, r.slot, r.prompt_tokens, r.max_tokens, r.position, r.cached_tokens, r.preemptions
            )
            for r in message.running
        ),
        workers=tuple(map(_worker, message.workers)),
        generation_tokens=message.generation_tokens,
        prefix_cache_queries=message.prefix_cache_queries,
        prefix_cache_hits=message.prefix_cache_hits,
        preemptions=message.preemptions,
        num_workers_wanted=message.num_workers_wanted,
    )


def _worker(message: pb.WatchedWorker) -> WatchedWorker:
    return WatchedWorker(
        worker=message.worker,
        epoch=message.epoch,
        device=message.device,
        num_slots=message.num_slots,
        num_running=message.num_running,
        steps_in_flight=message.steps_in_flight,
        steps=message.steps,
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        blocks_used=message.blocks_used,
        blocks_shared=message.blocks_shared,
        blocks_cached=message.blocks_cached,
        block_map=message.block_map,
    )


def _seconds(message: Duration) -> float:
    return message.ToNanoseconds() / 1e9
