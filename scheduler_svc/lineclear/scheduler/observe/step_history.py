"""The last executed steps, kept as references to plans and turned into messages when somebody reads them.

The engine's thread writes and any number of threads read, without a lock: a reader that is overtaken finds another
number in its place of the ring, and counts the step as missed. Plans are immutable. Their `inits`, which hold prompts,
are not kept.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from lineclear.scheduler.core.core_state import SharedState
from lineclear.scheduler.core.events import Admitted, Event, Failed, Finished, Preempted, Started
from lineclear.scheduler.core.inflight_step import ChunkRow
from lineclear.scheduler.observe.scheduler_state import duration
from lineclear.v1 import steps_pb2 as pb
from lineclear.wire.messages import Decodes, Hello, Row, StepPlan, StepResult

MAX_ROWS = 2**18
"""Rows kept in all: about 40 bytes each."""


class _Slot(NamedTuple):
    """The request in a slot, and the positions that it found in the prefix cache."""

    request: int
    cached_tokens: int


_EMPTY = _Slot(0, 0)
_NONE: tuple[int, ...] = ()


class _Chunk(NamedTuple):
    """The request of a planned chunk. Positions below `computed_before` were computed in an earlier admission."""

    request: int
    prompt_len: int
    computed_before: int


class _Worker:
    """A joined worker: its small number, its slots, and the plans without result."""

    def __init__(self, index: int, epoch: int, num_slots: int, num_blocks: int) -> None:
        self.index, self.epoch, self.num_blocks = index, epoch, num_blocks
        self.slots: tuple[_Slot, ...] = (_EMPTY,) * num_slots  # replaced, never changed: steps refer to it
        self.planned: deque[_Planned] = deque()


class _Planned(NamedTuple):
    """A plan without its prompts."""

    step: int
    decodes: Decodes
    chunks: tuple[Row, ...]
    requests: Sequence[_Chunk]
    """Of each chunk."""
    slots: tuple[_Slot, ...]
    started: tuple[int, ...]
    preempted: tuple[int, ...]
    at: float


class _Executed(NamedTuple):
    number: int
    worker: _Worker
    plan: _Planned
    step_seconds: float
    total_seconds: float
    ended: tuple[int, ...]
    num_rows: int
    num_waiting: int
    num_running: int
    num_slots: int
    blocks_used: int
    blocks_cached: int


class StepHistory:
    """The last `size` steps of all workers, fewer if they have more than MAX_ROWS rows."""

    def __init__(self, size: int = 512) -> None:
        self.size = size
        self.last = 0
        """Number of the newest step. Any thread."""
        self._ring: list[_Executed | None] = [None] * size
        self._messages: list[pb.StepRecord | None] = [None] * size  # those that were read, in the ring's places
        self._oldest = 1
        self._num_rows = 0
        self._workers: dict[int, _Worker] = {}
        self._numbers: dict[str, int] = {}  # of live requests, by request id
        self._num_admitted = 0
        self._ended: list[int] = []  # since the last result

    # --- any thread -------------------------------------------------------------------------------------------------

    def after(self, number: int, max_rows: int) -> tuple[list[pb.StepRecord], int]:
        """Return steps after `number`, oldest first, and how many of them are not kept any more.

        Ends before the step that would exceed `max_rows`, but returns at least one. The message of a step is made once,
        for all readers; that costs microseconds for each row.
        """
        found: list[pb.StepRecord] = []
        last, rows_left = self.last, max_rows
        first = max(number + 1, last - self.size + 1)
        missed = first - number - 1
        for wanted in range(first, last + 1):
            step = self._ring[wanted % self.size]
            if step is None or step.number != wanted:
                missed += 1
                continue
            rows_left -= step.num_rows
            if found and rows_left < 0:
                break
            found.append(self._message(step))
        return found, missed

    def _message(self, step: _Executed) -> pb.StepRecord:
        place = step.number % self.size
        message = self._messages[place]
        if message is None or message.number != step.number:
            message = self._messages[place] = _record(step)
        return message

    # --- the engine's thread ----------------------------------------------------------------------------------------

    @property
    def worker_indices(self) -> dict[int, int]:
        """Return the small number of each joined worker, by epoch."""
        return {epoch: worker.index for epoch, worker in self._workers.items()}

    def worker_joined(self, hello: Hello, index: int) -> None:
        """Note a worker and its small number."""
        self._workers[hello.epoch] = _Worker(index, hello.epoch, hello.num_slots, hello.num_blocks)

    def worker_lost(self, epoch: int) -> None:
        """Forget a worker and its plans in flight."""
        self._workers.pop(epoch, None)

    def planned(self, plan: StepPlan, core: SharedState, events: Iterable[Event], now: float) -> None:
        """Note a plan, the newest of its worker in flight. `events` are those of planning it."""
        worker = self._workers[plan.epoch]
        chunks: Sequence[_Chunk] = ()
        if plan.chunks:
            chunks = _chunks(core.workers[plan.epoch].inflight[-1].chunk_rows)
        if plan.inits:
            worker.slots = _with_new(worker.slots, plan, chunks)
        started = preempted = _NONE
        if events:
            started, preempted = self._of(events, Started), self._of(events, Preempted)
        worker.planned.append(
            _Planned(plan.step, plan.decodes, plan.chunks, chunks, worker.slots, started, preempted, now)
        )

    def executed(self, result: StepResult, core: SharedState, events: Iterable[Event], now: float) -> None:
        """Note the result of a worker's oldest plan in flight. `events` are those of applying it."""
        worker = self._workers[result.epoch]
        self.request_events(events)
        ended = _NONE
        if self._ended:
            ended = tuple(self._ended)
            self._ended.clear()
        number, plan = self.last + 1, worker.planned.popleft()
        num_rows = len(plan.decodes.slots) + len(plan.chunks)
        batch = core.workers[result.epoch].batch
        step = _Executed(
            number,
            worker,
            plan,
            result.step_seconds,
            now - plan.at,
            ended,
            num_rows,
            len(core.fresh) + len(core.resuming),
            batch.num_running,
            batch.num_slots,
            batch.pool.num_used,
            batch.pool.num_cached,
        )
        self._num_rows += num_rows
        while number - self._oldest >= self.size or (self._num_rows > MAX_ROWS and self._oldest < number):
            self._drop_oldest()
        self._ring[number % self.size] = step
        self.last = number

    def request_events(self, events: Iterable[Event]) -> None:
        """Note arrivals and ends. An end is noted once, however often its event is passed."""
        for event in events:
            if isinstance(event, Admitted):
                self._num_admitted += 1
                self._numbers[event.request_id] = self._num_admitted
            elif isinstance(event, Finished | Failed):
                number = self._numbers.pop(event.request_id, None)
                if number is not None:
                    self._ended.append(number)

    def _of(self, events: Iterable[Event], kind: type[Started | Preempted]) -> tuple[int, ...]:
        return tuple(self._numbers[event.request_id] for event in events if isinstance(event, kind))

    def _drop_oldest(self) -> None:
        place = self._oldest % self.size
        step = self._ring[place]
        assert step is not None
        self._num_rows -= step.num_rows
        self._ring[place] = self._messages[place] = None
        self._oldest += 1


def _chunks(rows: Iterable[ChunkRow]) -> list[_Chunk]:
    """Return the request of each chunk, without a reference to it."""
    return [_Chunk(s.number, s.prompt_len, s.max_computed_before) for s, *_ in rows]


def _with_new(slots: tuple[_Slot, ...], plan: StepPlan, chunks: Sequence[_Chunk]) -> tuple[_Slot, ...]:
    """Return the slots after the admissions of a plan. The first row of one starts behind its cached prefix."""
    taken, changed = {init.slot for init in plan.inits}, list(slots)
    for row, chunk in zip(plan.chunks, chunks, strict=True):
        if row.slot in taken:
            changed[row.slot] = _Slot(chunk.request, row.start)
    return tuple(changed)


def _record(step: _Executed) -> pb.StepRecord:
    worker, plan = step.worker, step.plan
    message = pb.StepRecord(
        number=step.number,
        worker=worker.index,
        epoch=worker.epoch,
        step=plan.step,
        planned_at=duration(plan.at),
        step_time=duration(step.step_seconds),
        total_time=duration(step.total_seconds),
        rows=_rows(plan),
        started=plan.started,
        ended=step.ended,
        preempted=plan.preempted,
        num_waiting=step.num_waiting,
        num_running=step.num_running,
        num_slots=step.num_slots,
        blocks_used=step.blocks_used,
        blocks_cached=step.blocks_cached,
        num_blocks=worker.num_blocks,
    )
    wall_offset = datetime.now(UTC).timestamp() - time.monotonic()
    message.planned_time.FromMicroseconds(round((plan.at + wall_offset) * 1e6))
    return message


def _rows(plan: _Planned) -> pb.StepRows:
    """Return the rows as columns: the decodes, then the chunks."""
    decodes, chunks, slots = plan.decodes, plan.chunks, plan.slots
    count = len(decodes.slots)
    kinds = [_kind(row, chunk) for row, chunk in zip(chunks, plan.requests, strict=True)]
    return pb.StepRows(
        slot=(*decodes.slots, *(row.slot for row in chunks)),
        request=(*[slots[slot].request for slot in decodes.slots], *(chunk.request for chunk in plan.requests)),
        start=(*decodes.starts, *(row.start for row in chunks)),
        num_tokens=(*(1,) * count, *(row.num_tokens for row in chunks)),
        cached_tokens=(
            *[slots[slot].cached_tokens for slot in decodes.slots],
            *(slots[row.slot].cached_tokens for row in chunks),
        ),
        kind=(*(pb.ROW_KIND_DECODE,) * count, *kinds),
        samples=(*(True,) * count, *(row.sample for row in chunks)),
    )


def _kind(row: Row, chunk: _Chunk) -> pb.RowKind.ValueType:
    if row.start < chunk.computed_before:
        return pb.ROW_KIND_RECOMPUTE
    if row.start < chunk.prompt_len or row.num_tokens > 1:
        return pb.ROW_KIND_PREFILL
    return pb.ROW_KIND_DECODE
