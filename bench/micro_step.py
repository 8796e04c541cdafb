"""A worker's step alone: a model, slots and attention in this process, no scheduler and no sockets.

    python -m bench.micro_step --model DIR [--threads 2]

Decodes at 256 positions of context and chunks of a prompt, with the share of the matrix products and of attention; what
is left is norms, rotary positions, sampling, tables and Python.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench.figures import Figure, arguments, main
from bench.measure import median
from lineclear.logs import configure
from lineclear.wire.types import Row, Sampling, SlotInit, StepPlan
from lineclear.worker.runner import ModelRunner
from lineclear.worker.settings import WorkerSettings, load
from lineclear.worker.start import make_runner

BATCHES = (1, 8, 32, 64)
CHUNK = 256
CONTEXT = 256
_STEPS = 20
_PROFILED_STEPS = 5
_PRODUCTS = ("linear", "mm", "matmul")
"""What the names of operations that multiply matrices contain."""


class Bench:
    """Plans for a runner, with block tables that grow by hand."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.runner: ModelRunner = make_runner(settings)
        self.size = self.runner.capacity.block_size
        self._step = 0

    def open(self, count: int) -> None:
        """`count` slots whose next position is CONTEXT, computed in chunks."""
        self.runner.reset()
        self._step = 0
        self._used = 0
        self.positions = [0] * count
        self._blocks = [0] * count
        for slot in range(count):
            tokens = tuple(64 + (slot * 31 + i * 7) % 3000 for i in range(CONTEXT))
            init = SlotInit(slot, tokens, CONTEXT, (), Sampling())
            self.run([(slot, CONTEXT)], (init,))

    def run(self, rows: list[tuple[int, int]], inits: tuple[SlotInit, ...] = ()) -> float:
        """One step of (slot, tokens) rows, all of which sample; its seconds."""
        self._step += 1
        planned = []
        for slot, count in rows:
            start = self.positions[slot]
            self.positions[slot] = start + count
            wanted = -(-self.positions[slot] // self.size) - self._blocks[slot]
            fresh = tuple(range(self._used, self._used + wanted))
            self._used += wanted
            self._blocks[slot] += wanted
            planned.append(Row(slot, start, count, True, fresh))
        plan = StepPlan(1, self._step, tuple(planned), inits)
        begin = time.perf_counter()
        self.runner.launch(plan).result()
        return time.perf_counter() - begin


def decodes(bench: Bench, count: int) -> Iterator[Figure]:
    """A step of `count` decodes."""
    bench.open(count)
    rows = [(slot, 1) for slot in range(count)]
    bench.run(rows)
    seconds = median([bench.run(rows) for _ in range(_STEPS)])
    case = f"{count} decodes at {CONTEXT}"
    yield Figure("step: all", case, seconds * 1e3, "ms")
    attention = _Watch(bench.runner)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        profiled = sum(bench.run(rows) for _ in range(_PROFILED_STEPS)) / _PROFILED_STEPS
    spent = attention.stop() / _PROFILED_STEPS
    products = _products(profiler) / _PROFILED_STEPS
    yield Figure("step: matrix products (profiled)", case, products * 1e3, "ms")
    yield Figure("step: attention (profiled)", case, spent * 1e3, "ms")
    yield Figure("step: the rest (profiled)", case, (profiled - products - spent) * 1e3, "ms")


def chunks(bench: Bench) -> Iterator[Figure]:
    """A step with a chunk of a new prompt, alone."""
    tokens = tuple(64 + i % 3000 for i in range(CHUNK))
    times = []
    for _ in range(_STEPS // 2):
        bench.open(0)
        bench.positions, bench._blocks = [0], [0]
        times.append(bench.run([(0, CHUNK)], (SlotInit(0, tokens, CHUNK, (), Sampling()),)))
    yield Figure("step: all", f"a chunk of {CHUNK}", median(times[1:]) * 1e3, "ms")


class _Watch:
    """Adds up the time inside the backend's `attend`. Exact on a CPU, where it returns when it is done."""

    def __init__(self, runner: ModelRunner) -> None:
        self._backend = runner._backend
        self._attend = self._backend.attend
        self._seconds = 0.0
        self._backend.attend = self._timed  # type: ignore[method-assign]

    def _timed(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        output = self._attend(layer, query, key, value)
        self._seconds += time.perf_counter() - begin
        return output

    def stop(self) -> float:
        """Seconds so far; the backend is as it was."""
        del self._backend.attend
        return self._seconds


def _products(profiler: profile) -> float:
    """Seconds inside operations that multiply matrices."""
    found = [event for event in profiler.key_averages() if any(name in event.key for name in _PRODUCTS)]
    return float(sum(event.self_cpu_time_total for event in found)) / 1e6


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Decodes at every batch size, then a prompt."""
    configure("worker", "warning")
    flags = ["--model", str(options.model), "--directory", "unused", "--num-blocks", "4096", *options.flags]
    bench = Bench(load(flags))
    for count in options.batches:
        yield from decodes(bench, count)
    yield from chunks(bench)


def parser() -> argparse.ArgumentParser:
    """The sizes are options."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, required=True)
    found.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    found.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of the worker; must come last")
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
