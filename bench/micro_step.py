"""Measures steps of a model runner in this process, without scheduler and sockets.

    python -m bench.micro_step --model DIR [--threads 2]

Decodes at 256 positions and prompt chunks, with the shares of matrix products and attention. The rest is norms, rotary
embedding, sampling, tables and Python. For models with the fused forward pass.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from bench.figures import Figure, arguments, main
from bench.measure import median
from bench.slots import Slots
from lineclear.process.logging_setup import configure
from lineclear.wire.messages import Sampling, SlotInit
from lineclear.worker.kernels.call_graph import timed_replays
from lineclear.worker.runner.runner_factory import make_runner
from lineclear.worker.settings import WorkerSettings, load

BATCHES = (1, 8, 32, 64)
CHUNK = 256
CONTEXT = 256
PRODUCTS = ("lineclear_gemm", "lineclear_grouped_gemm", "multiply")
"""Names of matrix products in the call graph: kernels, and Python calls of oneDNN."""
ATTENTION = ("lineclear_paged_attention", "attend")
_STEPS = 20


class Bench(Slots):
    """Times the steps of a runner and the kernel calls in them."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.spent = Counter[str]()
        """Nanoseconds of the last step by function name."""
        self._open = ExitStack()
        self._timed = self._open.enter_context(timed_replays())
        super().__init__(make_runner(settings))

    def fill(self, count: int) -> None:
        """Fill `count` slots up to position CONTEXT, in chunks."""
        self.clear(count)
        for slot in range(count):
            tokens = tuple(64 + (slot * 31 + i * 7) % 3000 for i in range(CONTEXT))
            self.run([(slot, CONTEXT)], (SlotInit(slot, tokens, CONTEXT, (), Sampling()),))

    def run(self, rows: list[tuple[int, int]], inits: tuple[SlotInit, ...] = ()) -> float:
        """Run a step of (slot, tokens) rows, all of which sample; return its seconds."""
        self._timed.clear()
        begin = time.perf_counter()
        self.launch(rows, inits).result()
        seconds = time.perf_counter() - begin
        self.spent.clear()
        for name, nanoseconds in chain.from_iterable(calls for _, calls in self._timed):
            self.spent[name] += nanoseconds
        return seconds


def decodes(bench: Bench, count: int) -> Iterator[Figure]:
    """Measure a step of `count` decodes."""
    bench.fill(count)
    rows = [(slot, 1) for slot in range(count)]
    bench.run(rows)
    steps, products, attention = [], [], []
    for _ in range(_STEPS):
        steps.append(bench.run(rows))
        products.append(sum(bench.spent[name] for name in PRODUCTS) / 1e9)
        attention.append(sum(bench.spent[name] for name in ATTENTION) / 1e9)
    assert min(products) > 0, f"no product is named {PRODUCTS}; the calls are {sorted(bench.spent)}"
    case = f"{count} decodes at {CONTEXT}"
    over = [step - product for step, product in zip(steps, products, strict=True)]
    rest = [all_else - attend for all_else, attend in zip(over, attention, strict=True)]
    yield Figure("step: all", case, median(steps) * 1e3, "ms")
    yield Figure("step: matrix products", case, median(products) * 1e3, "ms")
    yield Figure("step: attention", case, median(attention) * 1e3, "ms")
    yield Figure("step: the rest", case, median(rest) * 1e3, "ms")
    yield Figure("step: all but products", case, median(over) * 1e3, "ms", goal=1.0 if count == 1 else None)


def chunks(bench: Bench) -> Iterator[Figure]:
    """Measure a step with one chunk of a new prompt."""
    tokens = tuple(64 + i % 3000 for i in range(CHUNK))
    times = []
    for _ in range(_STEPS // 2):
        bench.clear(1)
        times.append(bench.run([(0, CHUNK)], (SlotInit(0, tokens, CHUNK, (), Sampling()),)))
    yield Figure("step: all", f"a chunk of {CHUNK}", median(times[1:]) * 1e3, "ms")


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure decodes at every batch size, then a prompt."""
    configure("worker", "warning")
    flags = ["--model", str(options.model), "--socket-directory", "unused", "--num-blocks", "4096", *options.flags]
    bench = Bench(load(flags))
    for count in options.batches:
        yield from decodes(bench, count)
    yield from chunks(bench)


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, required=True)
    found.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    found.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of the worker; must come last")
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
