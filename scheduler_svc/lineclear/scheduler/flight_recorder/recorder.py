"""The flight recorder: a core that keeps what it was told and what it decided, bounded and without content.

Every call that can change a decision becomes a record; what the core learns from content (a token ended an answer, the
digest of a new prefix) is recorded as the fact that it was. Records follow a checkpoint of the whole state, so that
`replay` can start in the middle of a life. When a segment is full a new checkpoint begins the next one, and of old
segments one is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from lineclear.errors import LineclearError
from lineclear.scheduler.core.events import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Preempted,
    Started,
    StepTokens,
    WorkerJoined,
    WorkerLost,
)
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.scheduler import CoreLimits, Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.flight_recorder.core_state import KEY_BYTES, dump_core, limits_of, request_shape, to_json_types
from lineclear.wire.messages import Hello, StepError, StepPlan, StepResult

FORMAT = "lineclear flight recording 2"
_MAX_LIVE_AT_CHECKPOINT = 8192  # it stops the engine for about a microsecond each


class RecordingScheduler(Scheduler):
    """A Scheduler that remembers its last `max_records` to twice as many calls."""

    def __init__(self, limits: CoreLimits, max_records: int = 4096) -> None:
        super().__init__(limits)
        self._max_records = max_records
        self._numbers: dict[str, int] = {}
        self._keys = bytearray()  # a prompt of 32k tokens has 2,048 of them, so they are kept without an object each
        make = self._batch.new_key

        def new_key(*arguments: Any) -> bytes:
            key = make(*arguments)
            self._keys += key[:KEY_BYTES]
            return key

        self._batch.new_key = new_key  # type: ignore[assignment, method-assign]
        self._earlier: tuple[dict[str, Any], list[list[Any]]] | None = None
        self._core_state: dict[str, Any] | None = dump_core(self)
        self._records: list[list[Any]] = []

    def recording(self) -> Iterator[Any]:
        """Header, checkpoint and records up to now, in JSON's types, for any thread to go through.

        Only the header while too many requests live for a checkpoint.
        """
        entries: list[Any] = [{"format": FORMAT, "limits": limits_of(self.limits)}]
        records: list[list[Any]] = []
        if self._core_state is not None:
            checkpoint, earlier = self._earlier or (self._core_state, [])
            entries.append(checkpoint)
            records += earlier + self._records
        return map(to_json_types, chain(entries, map(_as_written, records)))

    # --- the calls --------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> list[Event]:
        number = self._numbers.get(request.request_id, self._num_arrivals + 1)
        try:
            events = super().submit(request, now)
        except LineclearError as error:
            self._record("submit", now, [number, *request_shape(request)], type(error).__name__)
            raise
        self._numbers[request.request_id] = number
        self._record("submit", now, [number, *request_shape(request)], "Admitted")
        return events

    def cancel(self, request_id: str, error: LineclearError | None, now: float) -> list[Event]:
        events = super().cancel(request_id, error, now)
        if events:
            self._record("cancel", now, [self._numbers.pop(request_id)], [])
        return events

    def finish(self, request_id: str, num_tokens: int, now: float) -> list[Event]:
        events = super().finish(request_id, num_tokens, now)
        if events:
            self._record("finish", now, [self._numbers[request_id], num_tokens], self._summary(events))
        return events

    def expire(self, now: float) -> list[Event]:
        events = super().expire(now)
        if events:
            self._record("expire", now, [], self._summary(events))
        return events

    def drain(self, now: float) -> None:
        super().drain(now)
        self._record("drain", now, [], [])

    def clear_prefix_cache(self) -> None:
        super().clear_prefix_cache()
        self._record("forget", 0.0, [], [])

    def on_worker_change(self, hello: Hello | None, now: float, loss: WorkerLoss = WorkerLoss.CLEAN) -> list[Event]:
        events = super().on_worker_change(hello, now, loss)
        fields = None if hello is None else {name: getattr(hello, name) for name in hello.__slots__}
        self._record("reset", now, [fields, loss.name], self._summary(events))
        return events

    def on_step_error(self, error: StepError, now: float) -> list[Event]:
        events = super().on_step_error(error, now)
        self._record("fail_step", now, [error.epoch, error.step, error.kind.value], self._summary(events))
        return events

    def plan(self, now: float) -> StepPlan | None:
        considers = self._hello is not None and len(self._inflight) < self.limits.pipeline_depth and bool(self._live)
        before = len(self._events)
        plan = super().plan(now)
        if considers:
            self._record("plan", now, [], [plan_summary(plan), self._summary(self._events[before:])])
        return plan

    def apply(self, result: StepResult, now: float) -> list[Event]:
        vocab_size = 0 if self._hello is None else self._hello.vocab_size
        events = super().apply(result, now)
        tokens = result.tokens
        void: list[int] = []
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            void = [row for row, token in enumerate(tokens) if not 0 <= token < vocab_size]
        stops = [
            [self._numbers[event.request_id], event.reason.value]
            for event in events
            if isinstance(event, Finished) and event.reason in (FinishReason.STOP_EOS, FinishReason.STOP_TOKEN)
        ]
        facts = [result.epoch, result.step, result.step_seconds, sorted(result.bad_rows), void, stops]
        self._record("apply", now, facts, self._summary(events))
        return events

    # --- the records ------------------------------------------------------------------------------------------------

    def _summary(self, events: Iterable[Event]) -> list[Any]:
        found = event_summary(events, lambda request_id: self._numbers[request_id])
        for event in events:
            if isinstance(event, Finished | Failed):
                del self._numbers[event.request_id]
        return found

    def _record(self, call: str, now: float, facts: list[Any], outcome: Any) -> None:
        keys = bytes(self._keys)
        self._keys.clear()
        if self._core_state is not None:
            self._records.append([call, now, facts, keys, outcome])
        if len(self._records) >= self._max_records or self._core_state is None:
            self._begin_segment()

    def _begin_segment(self) -> None:
        if len(self._live) > _MAX_LIVE_AT_CHECKPOINT:
            self._earlier = self._core_state = None
        else:
            self._earlier = None if self._core_state is None else (self._core_state, self._records)
            self._core_state = dump_core(self)
        self._records = []


def _as_written(record: list[Any]) -> list[Any]:
    """A record as the file has it, its keys apart."""
    call, now, facts, keys, outcome = record
    return [call, now, facts, [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)], outcome]


def plan_summary(plan: StepPlan | None) -> list[Any] | None:
    """What a plan decides: decodes as a digest, for there are many; of new owners the lengths."""
    if plan is None:
        return None
    inits = [[init.slot, len(init.tokens), init.prompt_len, init.blocks] for init in plan.inits]
    return [plan.step, len(plan.decodes.slots), hash(plan.decodes), plan.chunks, inits, plan.zero_blocks]


def event_summary(events: Iterable[Event], number_of: Callable[[str], int]) -> list[Any]:
    """What events say, without content."""
    found: list[Any] = []
    for event in events:
        if isinstance(event, StepTokens):
            found.append(["tokens", len(event), hash(tuple(event.indices))])
        elif isinstance(event, Finished):
            number = number_of(event.request_id)
            found.append(["finished", number, event.reason.name, event.record.completion_tokens])
        elif isinstance(event, Failed):
            found.append(["failed", number_of(event.request_id), type(event.error).__name__])
        elif isinstance(event, Started):
            found.append(["started", number_of(event.request_id), event.slot, event.cached_tokens])
        elif isinstance(event, Preempted):
            found.append(["preempted", number_of(event.request_id)])
        elif isinstance(event, WorkerJoined | WorkerLost):
            found.append([type(event).__name__, event.epoch])
    return found
