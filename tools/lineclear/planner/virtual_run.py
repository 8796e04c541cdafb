"""Runs the core on a virtual clock: discrete events, no sleeping, no tokens.

Prompts are blank but for shared prefixes. A worker computes its plans in order, each for the time that a StepTiming
gives it. Token times are counted in bulk: the rows of a step that were in the step before all have the same gap.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

from lineclear.errors import LineclearError
from lineclear.planner.arrivals import Arrival
from lineclear.planner.step_timing import StepTiming, StepWork
from lineclear.scheduler.core.events import Event, Failed, Finished, StepTokens
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.prefix_keys import BlockHasher
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Hello, Sampling, StepResult

_LOG_WIDTH = math.log(1.01)
_LEAST_SECONDS = 1e-7


class Distribution:
    """Counts of seconds; mean and maximum are exact, quantiles within 0.5 %."""

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self._sum = self._max = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a value `count` times."""
        bucket = int(math.log(seconds) / _LOG_WIDTH // 1) if seconds > _LEAST_SECONDS else -10_000
        self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += count
        self._sum += seconds * count
        if seconds > self._max:
            self._max = seconds

    @property
    def mean(self) -> float:
        """Return the mean; 0 without values."""
        return self._sum / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return the value below which `share` of the values are; 0 without values."""
        rank = share * self.count
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                return min(self._max, math.exp((bucket + 0.5) * _LOG_WIDTH)) if bucket > -10_000 else 0.0
        return self._max

    def to_json(self) -> dict[str, Any]:
        """Return mean, p50, p90, p99 and maximum."""
        quantiles = {f"p{round(share * 100)}": self.quantile(share) for share in (0.5, 0.9, 0.99)}
        return {"mean": self.mean, **quantiles, "max": self._max, "count": self.count}


_STOP_TOKEN = 1
_NO_STOP, _WITH_STOP = Sampling(), Sampling(stop_ids=(_STOP_TOKEN,))
_STOP_IDS = frozenset({_STOP_TOKEN})
_FIRST_TOKEN = 2  # of prompts
_VOCABULARY = 2**31 - 1
_MIN_KEPT = 10_000
_STEPS_PER_SAMPLE = 16  # between samples of queue, slots and blocks


@dataclass(slots=True)
class Outcome:
    """What a run measured. Times are seconds of the virtual clock but for `wall_seconds`."""

    workers: int
    rate: float
    num_requests: int = 0
    finished: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_hit_rate: float = 0.0
    slot_use: float = 0.0
    """Rows of all steps over slots of all steps."""
    worker_use: float = 0.0
    """Share of the time in which a worker computed."""
    block_use: float = 0.0
    """Mean share of blocks in use while a step ran."""
    block_use_max: float = 0.0
    queue_mean: float = 0.0
    """Mean number of waiting requests while a step ran."""
    queue_max: int = 0
    wall_seconds: float = 0.0
    time_to_first_token: Distribution = field(default_factory=Distribution)
    inter_token_latency: Distribution = field(default_factory=Distribution)
    request_seconds: Distribution = field(default_factory=Distribution)
    queue_seconds: Distribution = field(default_factory=Distribution)

    @property
    def tokens_per_second(self) -> float:
        """Return output tokens a second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_per_second(self) -> float:
        """Return finished requests a second."""
        return self.finished / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return every figure."""
        values = {name: getattr(self, name) for name in self.__slots__}
        figures = {n: v.to_json() if isinstance(v, Distribution) else v for n, v in values.items()}
        rate = self.rate if math.isfinite(self.rate) else "inf"
        derived = {"tokens_per_second": self.tokens_per_second, "requests_per_second": self.requests_per_second}
        return figures | {"rate": rate} | derived


class _Worker:
    """A worker on the virtual clock."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.results: deque[tuple[float, StepResult]] = deque()  # of plans in flight, by end
        self.free_at = -math.inf
        self.busy_seconds = 0.0
        self.last_ids: Sequence[str] = []  # requests with a token in the last result that had one
        self.last_at = 0.0


class VirtualRun:
    """One simulation. `limits` are the server's; `deadline_seconds` is that of each request."""

    def __init__(
        self, limits: CoreLimits, timing: StepTiming, num_workers: int, deadline_seconds: float, seed: int = 0
    ) -> None:
        self._core = Scheduler(limits, BlockHasher(b""))
        self._timing = timing
        self._deadline_seconds = deadline_seconds
        self._chance = random.Random(f"steps {seed}")
        self._workers = [_Worker(epoch) for epoch in range(1, num_workers + 1)]
        self._heap: list[tuple[float, int]] = []  # (time of its next result, index of the worker)
        self._last_token_at: dict[str, float] = {}  # of requests whose last token was not in the worker's last result
        self._live: set[str] = set()
        self._tokens_left: dict[str, int] = {}  # of requests that end with a stop token
        self._groups: dict[str, int] = {}
        self._num_unsampled = 0
        self._samples: list[tuple[int, int]] = []
        capacity = timing.worker
        self._num_slots = min(limits.max_batch_size, capacity.num_slots)
        for worker in self._workers:
            hello = Hello(
                epoch=worker.epoch,
                num_blocks=capacity.num_blocks,
                block_size=capacity.block_size,
                num_slots=capacity.num_slots,
                max_model_len=capacity.max_model_len,
                vocab_size=_VOCABULARY,
                eos_token_ids=(),
                max_step_tokens=capacity.max_step_tokens,
            )
            self._core.worker_joined(hello, 0.0)

    def run(
        self,
        arrivals: Iterable[Arrival],
        rate: float = math.inf,
        on_end: Callable[[Finished | Failed], object] | None = None,
    ) -> Outcome:
        """Run the requests, which are sorted by time, to their ends. Their ids are their numbers, from 0."""
        self._on_end = on_end
        began = time.perf_counter()
        self._outcome = outcome = Outcome(len(self._workers), rate)
        waiting = iter(arrivals)
        arrival = next(waiting, None)
        first = now = arrival.at if arrival is not None else 0.0
        number = 0
        core = self._core
        while True:
            while arrival is not None and arrival.at <= now:
                self._submit(number, arrival, now)
                number += 1
                arrival = next(waiting, None)
            while self._heap and self._heap[0][0] <= now:
                self._apply(self._workers[heapq.heappop(self._heap)[1]], now)
            self._count_ends(core.expire(now), now)
            for index, worker in enumerate(self._workers):
                self._plan(index, worker, now)
            core.drain_events()
            times = [self._heap[0][0]] if self._heap else []
            if arrival is not None:
                times.append(arrival.at)
            if (deadline := core.next_deadline()) is not None:
                times.append(deadline)
            if not times:
                break
            now = max(now, min(times))
        outcome.num_requests = number
        self._summarise(now - first)
        outcome.wall_seconds = time.perf_counter() - began
        return outcome

    # --- requests ---------------------------------------------------------------------------------------------------

    def _submit(self, number: int, arrival: Arrival, now: float) -> None:
        request_id = str(number)
        has_stop = arrival.max_tokens > arrival.output_tokens
        request = Request(
            request_id,
            self._prompt(number, arrival),
            _WITH_STOP if has_stop else _NO_STOP,
            max(arrival.max_tokens, arrival.output_tokens),
            stop_ids=_STOP_IDS if has_stop else frozenset(),
            priority=arrival.priority,
            deadline=arrival.at + self._deadline_seconds,
            tenant=arrival.tenant,
        )
        try:
            self._core.submit(request, now)
        except LineclearError as error:
            _count(self._outcome.rejected, error.reason)
        else:
            self._live.add(request_id)
            if has_stop:
                self._tokens_left[request_id] = arrival.output_tokens

    def _prompt(self, number: int, arrival: Arrival) -> tuple[int, ...]:
        """Return tokens that only requests of the same group share, in their first `prefix_tokens`."""
        own = _FIRST_TOKEN + 2 * number + 1
        if not arrival.prefix_tokens:
            return (own,) * arrival.prompt_tokens
        group = self._groups.setdefault(arrival.group, len(self._groups))
        prefix = (_FIRST_TOKEN + 2 * group,) * arrival.prefix_tokens
        return prefix + (own,) * (arrival.prompt_tokens - arrival.prefix_tokens)

    def _count_ends(self, events: Iterable[Event], now: float) -> None:
        outcome = self._outcome
        for event in events:
            if isinstance(event, Finished):
                stats = event.stats
                outcome.finished += 1
                outcome.prompt_tokens += stats.prompt_tokens
                outcome.output_tokens += stats.completion_tokens
                assert stats.first_token_at is not None
                assert stats.started_at is not None
                outcome.time_to_first_token.add(stats.first_token_at - stats.arrival)
                outcome.queue_seconds.add(stats.started_at - stats.arrival)
                outcome.request_seconds.add(now - stats.arrival)
            elif isinstance(event, Failed):
                _count(outcome.failed, event.error.reason)
            else:
                continue
            if self._on_end is not None:
                self._on_end(event)
            self._live.discard(event.request_id)
            self._tokens_left.pop(event.request_id, None)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _plan(self, index: int, worker: _Worker, now: float) -> None:
        core, timing = self._core, self._timing
        while (plan := core.plan(worker.epoch, now)) is not None:
            work = StepWork.of(plan)
            seconds = timing.draw(work, self._chance)
            is_busy = bool(worker.results)
            begin = worker.free_at + timing.draw_gap(work, self._chance) if is_busy else now + timing.latency_seconds
            end = begin + seconds
            worker.free_at = end
            worker.busy_seconds += seconds
            result = StepResult(plan.epoch, plan.step, (0,) * plan.num_samples, step_seconds=seconds)
            if not worker.results:
                heapq.heappush(self._heap, (end, index))
            worker.results.append((end, result))

    def _apply(self, worker: _Worker, now: float) -> None:
        _, result = worker.results.popleft()
        if worker.results:
            heapq.heappush(self._heap, (worker.results[0][0], worker.epoch - 1))
        if self._tokens_left:
            result = self._with_stops(worker, result)
        events = self._core.apply(result, now)
        if events and isinstance(events[0], StepTokens):
            self._count_gaps(worker, events[0].request_ids, now)
        self._count_ends(events, now)
        self._num_unsampled += 1
        if self._num_unsampled >= _STEPS_PER_SAMPLE:
            self._num_unsampled = 0
            snapshot = self._core.snapshot()
            self._samples.append((snapshot.num_requests_waiting, snapshot.blocks_used))

    def _with_stops(self, worker: _Worker, result: StepResult) -> StepResult:
        """Return the result with a stop token for each request whose last token this is."""
        left, tokens = self._tokens_left, list(result.tokens)
        for row, request_id in enumerate(self._core.expected_samples(worker.epoch)):
            if request_id in left:
                left[request_id] -= 1
                if left[request_id] == 0:
                    tokens[row] = _STOP_TOKEN
        return replace(result, tokens=tuple(tokens))

    def _count_gaps(self, worker: _Worker, ids: Sequence[str], now: float) -> None:
        """Count the time since the last token of each request in `ids`."""
        gaps = self._outcome.inter_token_latency
        if ids == worker.last_ids:
            gaps.add(now - worker.last_at, len(ids))
        else:
            last = self._last_token_at
            last.update(zip(worker.last_ids, repeat(worker.last_at)))
            for at, count in Counter(map(last.get, ids)).items():
                if at is not None:
                    gaps.add(now - at, count)
            worker.last_ids = ids
            if len(last) > 2 * len(self._live) + _MIN_KEPT:
                self._last_token_at = {name: last[name] for name in self._live if name in last}
        worker.last_at = now

    # --- figures ----------------------------------------------------------------------------------------------------

    def _summarise(self, seconds: float) -> None:
        outcome, core = self._outcome, self._core.snapshot()
        counters = core.counters
        outcome.seconds = seconds
        outcome.steps = counters.steps
        outcome.preemptions = counters.preemptions
        outcome.recomputed_tokens = counters.recomputed_tokens
        outcome.prefix_hit_rate = counters.prefix_cache_hits / max(1, counters.prefix_cache_queries)
        outcome.slot_use = counters.rows / max(1, counters.steps * self._num_slots)
        outcome.worker_use = sum(w.busy_seconds for w in self._workers) / (seconds * len(self._workers) or 1.0)
        if self._samples:
            waiting, used = zip(*self._samples, strict=True)
            outcome.queue_mean, outcome.queue_max = sum(waiting) / len(waiting), max(waiting)
            outcome.block_use = sum(used) / len(used) / core.num_blocks
            outcome.block_use_max = max(used) / core.num_blocks


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def curve(
    limits: CoreLimits,
    timing: StepTiming,
    workers: Iterable[int],
    loads: Iterable[tuple[float, Iterable[Arrival]]],
    deadline_seconds: float,
    seed: int = 0,
) -> Iterator[Outcome]:
    """Yield the outcome of each load with each number of workers."""
    counts = list(workers)
    for rate, arrivals in loads:
        requests = list(arrivals) if len(counts) > 1 else arrivals
        for count in counts:
            yield VirtualRun(limits, timing, count, deadline_seconds, seed).run(requests, rate)
