"""Measures the path between the processes with a worker that computes nothing.

    python -m bench.micro_ipc

First the link alone (codec, sockets, both loops), then engine and core as well: the largest possible steps per second.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from bench.figures import Figure, arguments, main
from bench.measure import percentile
from bench.micro_wire import decodes
from lineclear.process.logging_setup import configure
from lineclear.scheduler.core.events import Event, Finished
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.engine.engine import Engine
from lineclear.scheduler.engine.engine_loop import EngineLoop
from lineclear.scheduler.engine.worker_link import WorkerLink
from lineclear.scheduler.engine.worker_pool import WorkerPool
from lineclear.scheduler.engine.worker_registry import WorkerRegistry
from lineclear.scheduler.engine.worker_session import Fact, Joined, WorkerTimeouts
from lineclear.scheduler.engine.worker_subscribers import EngineCallbacks
from lineclear.wire.messages import Sampling, StepResult

T = TypeVar("T", bound=Fact)

ROWS = (1, 32, 256)
_ROUND_TRIPS = 2000
_OUTPUT_LEN = 500
_JOIN_SECONDS = 30.0
REPOSITORY = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def worker(num_slots: int) -> Iterator[Path]:
    """Run a worker process with sockets in the given directory."""
    root = Path(tempfile.mkdtemp(prefix="lcb"))
    directory = root / "run"
    command = [
        sys.executable,
        "-m",
        "bench.instant",
        "--socket-directory",
        str(directory),
        "--max-batch-size",
        str(num_slots),
    ]
    directory.mkdir(mode=0o700)
    process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL)
    try:
        yield directory
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)
        shutil.rmtree(root)


def round_trips(count: int, trips: int) -> Iterator[Figure]:
    """Time round trips of plans of `count` decodes: encode, send, decode, and back."""
    with worker(count) as directory:
        link = WorkerLink(directory)
        try:
            workers = WorkerRegistry(WorkerTimeouts())
            hello = _next(link, workers, Joined).hello
            plan, _ = decodes(count)
            times = []
            for step in range(1, trips + 1):
                message = replace(plan, epoch=hello.epoch, step=step)
                begin = time.perf_counter()
                link.send(message)
                assert _next(link, workers, StepResult).step == step
                times.append(time.perf_counter() - begin)
        finally:
            link.close()
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        value = percentile(times[len(times) // 10 :], share)
        assert value is not None
        yield Figure(f"ipc: round trip, {name}", f"{count} decodes", value * 1e6, "us")


def _next(link: WorkerLink, workers: WorkerRegistry, kind: type[T]) -> T:
    """Return the next message, which must be of this kind."""
    give_up = time.monotonic() + _JOIN_SECONDS
    while not (facts := list(link.receive(workers, time.monotonic()))):
        assert time.monotonic() < give_up, f"no {kind.__name__} arrived"
        link.wait(time.monotonic() + 1.0)
    (fact,) = facts
    assert isinstance(fact, kind), fact
    return fact


def engine_steps(count: int) -> Iterator[Figure]:
    """Run `count` requests through engine, core, link and worker."""
    done, left = threading.Event(), count

    def publish(events: Sequence[Event]) -> None:
        nonlocal left
        left -= sum(isinstance(event, Finished) for event in events)
        if left == 0:
            done.set()

    with worker(count) as directory:
        link = WorkerLink(directory)
        limits = CoreLimits(max_batch_size=count, target_batch_tokens=8192)
        engine = Engine(EngineLoop(Scheduler(limits), link, WorkerPool([]), EngineCallbacks(publish)))
        engine.start()
        try:
            give_up = time.monotonic() + _JOIN_SECONDS
            while engine.worker_status.hello is None:
                assert time.monotonic() < give_up, "the worker did not join"
                time.sleep(0.001)
            cpu, begin = time.process_time(), time.perf_counter()
            for index in range(count):
                engine.submit(Request(f"r{index}", (index, 1, 2, 3), Sampling(), _OUTPUT_LEN))
            assert done.wait(120.0), "the requests did not end"
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        finally:
            engine.stop()
            link.close()
    case = f"{count} decodes"
    yield Figure("engine: a step, nothing computed", case, seconds / _OUTPUT_LEN * 1e6, "us")
    yield Figure("engine: scheduler's CPU time", case, cpu / (_OUTPUT_LEN * count) * 1e6, "us a token")


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure all figures."""
    configure("scheduler", "warning")
    for count in options.rows:
        yield from round_trips(count, options.trips)
    for count in options.rows:
        yield from engine_steps(count)


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    found.add_argument("--trips", type=int, default=_ROUND_TRIPS)
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
