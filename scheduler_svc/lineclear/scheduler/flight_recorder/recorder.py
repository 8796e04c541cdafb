"""A core that records its last calls and decisions, bounded and without content.

Every call that can change a decision becomes a record. Facts from content are recorded without it: that a token ended
an answer, the key of a new prefix block, and the block that begins like the rest of a prompt. Records follow a dump of
the whole core, so `replay` can start in the middle of a life. A full segment is followed by a new dump of the core, and
only one older segment is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, repeat
from typing import Any

from lineclear.errors import LineclearError
from lineclear.scheduler.core.block_pool import Donor
from lineclear.scheduler.core.core_state import WorkerState
from lineclear.scheduler.core.dump import dump, dump_core
from lineclear.scheduler.core.events import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Pooled,
    Preempted,
    Scored,
    Started,
    StepTokens,
    WorkerJoined,
    WorkerLost,
)
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.prefix_keys import BlockHasher
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import StepError, StepPlan, StepResult

FORMAT = "lineclear flight recording 14"
"""Raise the number when records or dumps of the core change: `replay` refuses other formats."""
KEY_BYTES = 8
"""Recorded bytes of a prefix-cache key."""
_MAX_LIVE_AT_DUMP = 4096  # a dump of the core stops the engine for about 10 us per live request


def _recorded(name: str) -> Any:
    """Return a method of the core whose record has its arguments and its answer. One that returns no event has none."""
    call: Callable[..., Any] = getattr(Scheduler, name)
    name = name.removeprefix("_")

    def method(core: RecordingScheduler, *arguments: Any) -> Any:
        *given, now = arguments
        facts = [fact[:KEY_BYTES].hex() if isinstance(fact, bytes) else dump(fact) for fact in given]
        try:
            answer = call(core, *arguments)
        except LineclearError as error:
            core._record(name, now, facts, type(error).__name__)
            raise
        if answer != []:
            core._record(name, now, facts, answer if isinstance(answer, int) else core._summary(answer or ()))
        return answer

    return method


class RecordingScheduler(Scheduler):
    """A Scheduler that records its last `max_records` calls, up to twice as many."""

    def __init__(self, limits: CoreLimits, max_records: int = 4096) -> None:
        super().__init__(limits, self._recorded_hash, self._recorded_donor)
        self._max_records = max_records
        self._hash = BlockHasher(limits.cache_secret)
        self._keys = bytearray()  # of the current call; a prompt of 32k tokens has 2,048, so no object for each
        self._donors: list[Donor | None] = []  # of the current call: one for each search
        self._num_admitted = 0
        self._numbers: dict[str, int] = {}  # of live requests, by arrival
        self._earlier: tuple[Any, list[list[Any]]] | None = None
        self._core_state: Any | None = dump_core(self)
        self._records: list[list[Any]] = []

    def recording(self) -> Iterator[Any]:
        """Return header, dump of the core and records in JSON's types, for any thread to iterate.

        Only the header while more requests are live than a dump of the core may have.
        """
        entries: list[Any] = [{"format": FORMAT, "limits": dump(self.limits)}]
        records: list[list[Any]] = []
        if self._core_state is not None:
            core_state, earlier = self._earlier or (self._core_state, [])
            entries.append(core_state)
            records += earlier + self._records
        return map(to_json_types, chain(entries, map(_with_separate_keys, records)))

    def submit(self, request: Request, now: float) -> list[Event]:
        number = self._numbers.get(request.request_id, self._num_admitted + 1)
        try:
            events = super().submit(request, now)
        except LineclearError as error:
            self._record("submit", now, [number, dump(request)], type(error).__name__)
            raise
        self._numbers[request.request_id] = number
        self._num_admitted += 1
        self._record("submit", now, [number, dump(request)], "Admitted")
        return events

    def cancel(self, request_id: str, error: LineclearError | None, now: float) -> list[Event]:
        events = super().cancel(request_id, error, now)
        if events:
            self._record("cancel", now, [self._numbers.pop(request_id)], [])
        return events

    def finish_at_stop_string(self, request_id: str, num_tokens: int, now: float) -> list[Event]:
        events = super().finish_at_stop_string(request_id, num_tokens, now)
        if events:
            self._record("finish", now, [self._numbers[request_id], num_tokens], self._summary(events))
        return events

    _expire = _recorded("_expire")
    drain = _recorded("drain")
    switch = _recorded("switch")
    clear_prefix_cache = _recorded("clear_prefix_cache")
    load_adapter = _recorded("load_adapter")
    unload_adapter = _recorded("unload_adapter")
    worker_joined = _recorded("worker_joined")

    def worker_lost(self, epoch: int, now: float, loss: WorkerLoss = WorkerLoss.CLEAN) -> list[Event]:
        events = super().worker_lost(epoch, now, loss)
        if events:
            self._record("worker_lost", now, [epoch, loss.name], self._summary(events))
        return events

    def on_step_error(self, error: StepError, now: float) -> list[Event]:
        events = super().on_step_error(error, now)
        self._record("on_step_error", now, [error.epoch, error.step, error.kind.value], self._summary(events))
        return events

    def _make_plan(self, worker: WorkerState, now: float) -> StepPlan | None:
        num_earlier = len(self._events)
        plan = super()._make_plan(worker, now)
        events = self._events[num_earlier:]
        donors, self._donors = self._donors, []
        self._record("plan", now, [worker.epoch, donors], [plan_summary(plan), self._summary(events)])
        return plan

    def apply(self, result: StepResult, now: float) -> list[Event]:
        owners = self.expected_samples(result.epoch) if result.counts else []
        events = super().apply(result, now)
        tokens, vocab_size = result.tokens, self._state.workers[result.epoch].hello.vocab_size
        void: list[int] = []
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            rows = chain.from_iterable(map(repeat, count(), result.counts or repeat(1, len(tokens))))
            void = sorted({row for row, token in zip(rows, tokens, strict=True) if not 0 <= token < vocab_size})
        counts = _counts_used(owners, result.counts, events)
        stops = [
            [self._numbers[event.request_id], event.reason.value]
            for event in events
            if isinstance(event, Finished) and event.reason in (FinishReason.STOP_EOS, FinishReason.STOP_TOKEN)
        ]
        bad, stuck = sorted(result.bad_rows), sorted(result.stuck_rows)
        drafts = result.num_drafted, result.draft_seconds
        facts = [result.epoch, result.step, result.step_seconds, bad, void, stops, stuck, counts, *drafts]
        if result.deferred_rows:
            facts.append(sorted(result.deferred_rows))
        self._record("apply", now, facts, self._summary(events))
        return events

    def _recorded_hash(self, cache_salt: bytes, parent: bytes | None, tokens: bytes) -> bytes:
        key = self._hash(cache_salt, parent, tokens)
        self._keys += key[:KEY_BYTES]
        return key

    def _recorded_donor(self, found: Donor | None) -> Donor | None:
        self._donors.append(found)
        return found

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
            self._start_segment()

    def _start_segment(self) -> None:
        if self.num_live > _MAX_LIVE_AT_DUMP:
            self._earlier = self._core_state = None
        else:
            self._earlier = None if self._core_state is None else (self._core_state, self._records)
            self._core_state = dump_core(self)
        self._records = []


def _counts_used(owners: Iterable[str], counts: Iterable[int], events: Iterable[Event]) -> list[int]:
    """Return the number of tokens of each sampling row without those behind the end of an answer."""
    used = Counter(chain.from_iterable(event.request_ids for event in events if isinstance(event, StepTokens)))
    return [used.get(owner, num) for owner, num in zip(owners, counts, strict=True)]


def _with_separate_keys(record: list[Any]) -> list[Any]:
    call, now, facts, keys, outcome = record
    return [call, now, facts, keys.hex(" ", KEY_BYTES).split(), outcome]


def to_json_types(value: Any) -> Any:
    """Return the value in JSON's types, with keys cut to KEY_BYTES."""
    if isinstance(value, bytes):
        return {"bytes": value[:KEY_BYTES].hex()}
    if isinstance(value, dict):
        return {name: to_json_types(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_types(entry) for entry in value]
    return value


def plan_summary(plan: StepPlan | None) -> list[Any] | None:
    """Return the decisions of a plan: a hash of its decodes, and the lengths of new slots."""
    if plan is None:
        return None
    inits = [[init.slot, len(init.tokens), init.prompt_len, init.blocks, init.adapter] for init in plan.inits]
    copies = plan.zero_blocks, plan.copy_blocks, plan.copy_states
    return [plan.step, len(plan.decodes.slots), hash(plan.decodes), plan.chunks, inits, *copies]


def event_summary(events: Iterable[Event], number_of: Callable[[str], int]) -> list[Any]:
    """Return events without content."""
    found: list[Any] = []
    for event in events:
        if isinstance(event, StepTokens):
            found.append(["tokens", len(event), hash(tuple(event.indices))])
        elif isinstance(event, Scored):
            count = len(event.scores.logprobs)
            found.append(["scored", number_of(event.request_id), event.first_position, count])
        elif isinstance(event, Pooled):
            found.append(["pooled", number_of(event.request_id)])
        elif isinstance(event, Finished):
            number = number_of(event.request_id)
            found.append(["finished", number, event.reason.name, event.stats.completion_tokens])
        elif isinstance(event, Failed):
            found.append(["failed", number_of(event.request_id), type(event.error).__name__])
        elif isinstance(event, Started):
            found.append(["started", number_of(event.request_id), event.slot, event.cached_tokens])
        elif isinstance(event, Preempted):
            found.append(["preempted", number_of(event.request_id)])
        elif isinstance(event, WorkerJoined | WorkerLost):
            found.append([type(event).__name__, event.epoch])
    return found
