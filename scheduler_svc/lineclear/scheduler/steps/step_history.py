"""The last executed steps, kept as references to plans and turned into records when somebody reads them.

The engine's thread writes and any number of threads read, without a lock: a reader that is overtaken finds another
number in its place of the ring, and counts the step as missed. Plans are immutable. Their `inits`, which hold prompts,
are not kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lineclear.scheduler.core.events import Admitted, Event, Failed, Finished, Preempted, Started
from lineclear.scheduler.core.views import Occupancy, PlannedChunk
from lineclear.scheduler.steps.step_record import RowKind, StepRecord, StepRows
from lineclear.wire.messages import Decodes, Hello, Row, StepPlan

MAX_ROWS = 2**18
"""Rows kept in all: about 40 bytes each."""


class _Slot(NamedTuple):
    """The request in a slot, and the positions that it found in the prefix cache."""

    request: int
    cached_tokens: int


_EMPTY = _Slot(0, 0)
_NONE: tuple[int, ...] = ()


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
    requests: Sequence[PlannedChunk]
    """Of each chunk."""
    slots: tuple[_Slot, ...]
    started: tuple[int, ...]
    preempted: tuple[int, ...]
    at: float


class ExecutedStep(NamedTuple):
    """A step with its result. `record` makes the record of it; that costs microseconds for each row."""

    number: int
    worker: _Worker
    plan: _Planned
    step_seconds: float
    total_seconds: float
    occupancy: Occupancy
    ended: tuple[int, ...]
    num_rows: int

    def record(self) -> StepRecord:
        """Return the step as numbers."""
        worker, plan = self.worker, self.plan
        return StepRecord(
            number=self.number,
            worker=worker.index,
            epoch=worker.epoch,
            step=plan.step,
            planned_at=plan.at,
            step_seconds=self.step_seconds,
            total_seconds=self.total_seconds,
            rows=_rows(plan),
            started=plan.started,
            ended=self.ended,
            preempted=plan.preempted,
            num_waiting=self.occupancy.num_waiting,
            num_running=self.occupancy.num_running,
            num_slots=self.occupancy.num_slots,
            blocks_used=self.occupancy.blocks_used,
            blocks_cached=self.occupancy.blocks_cached,
            num_blocks=worker.num_blocks,
        )


class StepHistory:
    """The last `size` steps of all workers, fewer if they have more than MAX_ROWS rows."""

    def __init__(self, size: int = 512) -> None:
        self.size = size
        self.last = 0
        """Number of the newest step. Any thread."""
        self._ring: list[ExecutedStep | None] = [None] * size
        self._oldest = 1
        self._num_rows = 0
        self._workers: dict[int, _Worker] = {}
        self._numbers: dict[str, int] = {}  # of live requests, by request id
        self._num_admitted = 0
        self._ended: list[int] = []  # since the last result

    # --- any thread -------------------------------------------------------------------------------------------------

    def after(self, number: int, max_rows: int) -> tuple[list[ExecutedStep], int]:
        """Return steps after `number`, oldest first, and how many of them are not kept any more.

        Ends before the step that would exceed `max_rows`, but returns at least one.
        """
        found: list[ExecutedStep] = []
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
            found.append(step)
        return found, missed

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def index_of(self, epoch: int) -> int:
        """Return the small number of a joined worker."""
        return self._workers[epoch].index

    def worker_joined(self, hello: Hello, index: int) -> None:
        """Note a worker and its small number."""
        self._workers[hello.epoch] = _Worker(index, hello.epoch, hello.num_slots, hello.num_blocks)

    def worker_lost(self, epoch: int) -> None:
        """Forget a worker and its plans in flight."""
        self._workers.pop(epoch, None)

    def planned(self, plan: StepPlan, chunks: Sequence[PlannedChunk], events: Iterable[Event], now: float) -> None:
        """Note a plan. `chunks` are the requests of its chunks, `events` those of planning it."""
        worker = self._workers[plan.epoch]
        if plan.inits:
            worker.slots = _with_new(worker.slots, plan, chunks)
        started = preempted = _NONE
        if events:
            started, preempted = self._of(events, Started), self._of(events, Preempted)
        worker.planned.append(
            _Planned(plan.step, plan.decodes, plan.chunks, chunks, worker.slots, started, preempted, now)
        )

    def executed(
        self, epoch: int, step_seconds: float, total_seconds: float, occupancy: Occupancy, events: Iterable[Event]
    ) -> None:
        """Note the result of a worker's oldest plan in flight. `events` are those of applying it."""
        worker = self._workers[epoch]
        self.request_events(events)
        ended = _NONE
        if self._ended:
            ended = tuple(self._ended)
            self._ended.clear()
        number, plan = self.last + 1, worker.planned.popleft()
        num_rows = len(plan.decodes.slots) + len(plan.chunks)
        step = ExecutedStep(number, worker, plan, step_seconds, total_seconds, occupancy, ended, num_rows)
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
        self._ring[place] = None
        self._oldest += 1


def _with_new(slots: tuple[_Slot, ...], plan: StepPlan, chunks: Sequence[PlannedChunk]) -> tuple[_Slot, ...]:
    """Return the slots after the admissions of a plan. The first row of one starts behind its cached prefix."""
    taken, changed = {init.slot for init in plan.inits}, list(slots)
    for row, request in zip(plan.chunks, chunks, strict=True):
        if row.slot in taken:
            changed[row.slot] = _Slot(request.number, row.start)
    return tuple(changed)


def _rows(plan: _Planned) -> StepRows:
    """Return the rows as columns: the decodes, then the chunks."""
    decodes, chunks, slots = plan.decodes, plan.chunks, plan.slots
    count = len(decodes.slots)
    kinds = [_kind(row, request) for row, request in zip(chunks, plan.requests, strict=True)]
    return StepRows(
        slot=(*decodes.slots, *(row.slot for row in chunks)),
        request=(*[slots[slot].request for slot in decodes.slots], *(request.number for request in plan.requests)),
        start=(*decodes.starts, *(row.start for row in chunks)),
        num_tokens=(*(1,) * count, *(row.num_tokens for row in chunks)),
        cached_tokens=(
            *[slots[slot].cached_tokens for slot in decodes.slots],
            *(slots[row.slot].cached_tokens for row in chunks),
        ),
        kind=(*(RowKind.DECODE,) * count, *kinds),
        samples=(*(True,) * count, *(row.sample for row in chunks)),
    )


def _kind(row: Row, request: PlannedChunk) -> RowKind:
    if row.start < request.computed_before:
        return RowKind.RECOMPUTE
    if row.start < request.prompt_len or row.num_tokens > 1:
        return RowKind.PREFILL
    return RowKind.DECODE
