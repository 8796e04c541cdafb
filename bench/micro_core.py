"""Measures the scheduler core: plan and apply of a step, and a long queue.

    python -m bench.micro_core

Microseconds of CPU time per running sequence at steady decoding with a full pipeline, and per operation with 100,000
waiting requests.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterator

from bench.figures import Figure, arguments, main
from bench.instant import BLOCK_SIZE, TOKEN, InstantRunner
from bench.measure import median
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.flight_recorder.recorder import RecordingScheduler
from lineclear.wire.messages import Sampling, StepPlan, StepResult

DECODES = (1, 32, 256, 1024, 4096)
WAITING = 100_000
_EPOCH = 1
_PROMPT_LEN = 2 * BLOCK_SIZE
_OUTPUT_LEN = 1000
_STEPS, _ROUNDS = 20, 7
_GOAL_MICROSECONDS = 2.0


class Bench:
    """A core with immediate results. `now` counts steps."""

    def __init__(self, limits: CoreLimits, num_slots: int, make: Callable[[CoreLimits], Scheduler] = Scheduler) -> None:
        self.core = make(limits)
        self.core.worker_joined(InstantRunner(num_slots).hello(_EPOCH), 0.0)
        self.flights: deque[StepPlan] = deque()
        self.now = 0.0

    def submit(self, index: int, prompt_len: int = _PROMPT_LEN, deadline: float | None = None) -> None:
        """Return a request with a unique prompt."""
        prompt = (index & 0xFFFF, index >> 16, *range(prompt_len - 2))
        self.core.submit(Request(f"r{index}", prompt, Sampling(), _OUTPUT_LEN, deadline=deadline), self.now)

    def fill(self) -> int:
        """Plan until the pipeline is full; return the number of rows of the new plans."""
        rows = 0
        while (plan := self.core.plan(_EPOCH, self.now)) is not None:
            self.flights.append(plan)
            rows += plan.num_rows
        self.core.drain_events()
        return rows

    def apply(self) -> None:
        """Apply the result of the oldest plan."""
        plan = self.flights.popleft()
        self.now += 1.0
        self.core.apply(StepResult(plan.epoch, plan.step, (TOKEN,) * plan.num_samples, step_seconds=0.01), self.now)


def decoding(count: int, make: Callable[[CoreLimits], Scheduler] = Scheduler, note: str = "") -> Iterator[Figure]:
    """Measure plan and apply with `count` running sequences."""
    budget = count + 8192
    bench = Bench(
        CoreLimits(max_batch_size=count, target_batch_tokens=budget, max_queue_size=count, max_queue_tokens=1 << 30),
        count,
        make,
    )
    for index in range(count):
        bench.submit(index)
    # Run until every sequence decodes in every step.
    while bench.fill() != count or bench.flights[-1].num_rows != count:
        bench.apply()
    plans, applies = [], []
    gc.collect()
    for _ in range(_ROUNDS):
        planning = applying = 0.0
        for _ in range(_STEPS):
            begin = time.thread_time()
            bench.apply()
            middle = time.thread_time()
            rows = bench.fill()
            planning += time.thread_time() - middle
            applying += middle - begin
            assert rows == count
        plans.append(planning / _STEPS)
        applies.append(applying / _STEPS)
    both = median([p + a for p, a in zip(plans, applies, strict=True)])
    case = f"{count} decodes{note}"
    yield Figure("core: plan", case, median(plans) * 1e6, "us a step")
    yield Figure("core: apply", case, median(applies) * 1e6, "us a step")
    goal = _GOAL_MICROSECONDS if count >= 256 else None
    yield Figure("core: plan and apply", case, both * 1e6 / count, "us a sequence", goal)


def queueing(count: int) -> Iterator[Figure]:
    """Measure submit, cancel and decode with `count` requests waiting behind a running one."""
    limits = CoreLimits(max_batch_size=1, max_queue_size=2 * count, max_queue_tokens=1 << 30)
    bench = Bench(limits, 1)
    bench.submit(0)
    bench.fill()
    begin = time.thread_time()
    for index in range(1, count + 1):
        bench.submit(index)
    case = f"{count} waiting"
    yield Figure("queue: submit, from empty", case, (time.thread_time() - begin) / count * 1e6, "us")
    sample = 1000
    begin = time.thread_time()
    for index in range(count + 1, count + sample + 1):
        bench.submit(index)
    yield Figure("queue: submit", case, (time.thread_time() - begin) / sample * 1e6, "us")
    chosen = random.Random(0).sample(range(1, count), sample)
    begin = time.thread_time()
    for index in chosen:
        bench.core.cancel(f"r{index}", None, bench.now)
    yield Figure("queue: cancel", case, (time.thread_time() - begin) / sample * 1e6, "us")
    begin = time.thread_time()
    for _ in range(sample // 4):
        bench.apply()
        bench.fill()
    yield Figure("queue: a step of one decode", case, (time.thread_time() - begin) / (sample // 4) * 1e6, "us")
    gc.collect()  # avoids a collection inside the measurement
    begin = time.thread_time()
    for index in range(2 * count, 2 * count + sample):
        bench.submit(index, deadline=bench.now - 1.0)
    bench.core.expire(bench.now)
    yield Figure("queue: submit, expire", case, (time.thread_time() - begin) / sample * 1e6, "us")
    running = next(index for index in range(count) if f"r{index}" in bench.core._live.by_id)
    begin = time.thread_time()
    for _ in range(sample // 4):  # the running request ends, the next one starts
        bench.core.cancel(f"r{running}", None, bench.now)
        bench.apply()
        bench.fill()
        running += 1
        while f"r{running}" not in bench.core._live.by_id:
            running += 1
    yield Figure("queue: leave, join, step", case, (time.thread_time() - begin) / (sample // 4) * 1e6, "us")


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure all figures."""
    for count in options.decodes:
        yield from decoding(count)
    yield from decoding(max(options.decodes), RecordingScheduler, ", recorded")
    yield from queueing(options.waiting)


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--decodes", type=int, nargs="+", default=list(DECODES))
    found.add_argument("--waiting", type=int, default=WAITING)
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
