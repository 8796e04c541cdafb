"""Plans for the slots of a model runner, with block tables of its own: steps without scheduler and sockets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from lineclear.wire.messages import Decodes, Row, RowOutput, Sampling, SlotInit, StepPlan, StepResult
from lineclear.worker.loop.runner_interface import InflightStep
from lineclear.worker.runner.model_runner import ModelRunner

_IN_FLIGHT = 2  # as the scheduler's default


class Steps(NamedTuple):
    """Decode steps that ran one after the other."""

    seconds: float
    """Of the host's clock, from the first launch to the last result."""
    launch_seconds: list[float]
    """Of the host in each launch."""
    results: list[StepResult]


class Slots:
    """The slots of a runner from the first one on. Each row samples."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.size = runner.capacity.block_size
        self.clear(0)

    def clear(self, count: int) -> None:
        """Free all slots and begin with `count` empty ones."""
        self.runner.reset()
        self._step = self._used = 0
        self.positions = [0] * count
        self._blocks = [0] * count

    def open(self, prompts: Sequence[tuple[int, ...]]) -> list[int]:
        """Fill a slot with each prompt, as many prompts in a step as it may hold; return the tokens behind them."""
        self.clear(len(prompts))
        tokens, most, slot = list[int](), self.runner.capacity.max_step_tokens, 0
        while slot < len(prompts):
            rows, inits = list[tuple[int, int]](), list[SlotInit]()
            while slot < len(prompts) and sum(count for _, count in rows) + len(prompts[slot]) <= most:
                inits.append(SlotInit(slot, prompts[slot], len(prompts[slot]), (), Sampling()))
                rows.append((slot, len(prompts[slot])))
                slot += 1
            assert rows, f"a prompt is longer than a step of {most} tokens"
            tokens += self.launch(rows, tuple(inits)).result().tokens
        return tokens

    def launch(self, rows: Sequence[tuple[int, int]], inits: tuple[SlotInit, ...] = ()) -> InflightStep:
        """Launch a step of (slot, tokens) rows; without `inits` it is one of decodes, as the scheduler makes them."""
        self._step += 1
        planned = []
        for slot, count in rows:
            start = self.positions[slot]
            self.positions[slot] = start + count
            wanted = -(-self.positions[slot] // self.size) - self._blocks[slot]
            fresh = tuple(range(self._used, self._used + wanted))
            self._used += wanted
            self._blocks[slot] += wanted
            planned.append(Row(slot, start, count, RowOutput.SAMPLE, fresh))
        return self.runner.launch(
            StepPlan(1, self._step, tuple(planned), inits) if inits else _decodes(self._step, planned)
        )

    def decode(self, count: int, num_steps: int) -> Steps:
        """Decode the first `count` slots, with two steps in flight."""
        rows = [(slot, 1) for slot in range(count)]
        in_flight, results, launches = deque[InflightStep](), list[StepResult](), list[float]()
        began_at = time.perf_counter()
        for _ in range(num_steps):
            launched_at = time.perf_counter()
            in_flight.append(self.launch(rows))
            launches.append(time.perf_counter() - launched_at)
            if len(in_flight) == _IN_FLIGHT:
                results.append(in_flight.popleft().result())
        results += [step.result() for step in in_flight]
        return Steps(time.perf_counter() - began_at, launches, results)


def _decodes(step: int, rows: list[Row]) -> StepPlan:
    columns = [(row.slot, row.start) for row in rows]
    slots, starts = zip(*columns, strict=True)
    return StepPlan(1, step, decodes=Decodes(slots, starts, tuple((r.slot, b) for r in rows for b in r.new_blocks)))
