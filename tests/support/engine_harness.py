"""A scheduler's engine in the test's process, with toy workers as child processes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from support.events import TokensReady, flat
from support.time_limits import PATIENCE_SECONDS
from support.toy import expected, expected_logprobs
from support.toy_worker import ToyOptions
from support.waiting import eventually as eventually

from lineclear.scheduler.core.events import Event, Failed, Finished, WorkerJoined, WorkerLost
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.engine.engine import Engine
from lineclear.scheduler.engine.engine_loop import EngineLimits, EngineLoop
from lineclear.scheduler.engine.engine_stats import EngineSnapshot, WantedWorker
from lineclear.scheduler.engine.worker_link import WorkerLink
from lineclear.scheduler.engine.worker_pool import WorkerPool
from lineclear.scheduler.engine.worker_session import WorkerTimeouts
from lineclear.scheduler.engine.worker_subscribers import EngineCallbacks
from lineclear.scheduler.engine.worker_supervisor import SupervisorLimits
from lineclear.scheduler.observe.step_history import StepHistory
from lineclear.wire.messages import Hello, Logprobs, Sampling

TESTS = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])}
"""The environment of child processes, with the paths of the tests and of this process's sources."""


def kill(pid: int | None, number: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to a process that must exist, and return its pid."""
    assert pid is not None
    os.kill(pid, number)
    return pid


def short_directory() -> Path:
    """Create and return a directory whose sockets have short paths, unlike those of pytest."""
    return Path(tempfile.mkdtemp(prefix="lc"))


class Stream:
    """The events of one request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.end: Finished | Failed | None = None
        self.problem: str | None = None
        self.gaps: list[float] = []
        self._last = time.monotonic()

    def handle(self, event: Event) -> None:
        """Handle an event; record a problem if tokens are lost, repeated or late."""
        if self.end is not None:
            self.problem = f"{type(event).__name__} after the end"
        if isinstance(event, TokensReady):
            if event.first_index != len(self.tokens):
                self.problem = f"index {event.first_index} after {len(self.tokens)} tokens"
            self.tokens.extend(event.tokens)
            self.logprobs.extend(event.logprobs)
            now = time.monotonic()
            self.gaps.append(now - self._last)
            self._last = now
        elif isinstance(event, Finished | Failed):
            self.end = event

    def check(self, vocab_size: int) -> None:
        """Check that the answer is complete and correct."""
        assert self.problem is None, self.problem
        assert isinstance(self.end, Finished), self.end
        request = self.request
        right = expected(request.prompt, request.sampling, request.max_tokens, vocab_size)
        assert self.tokens == right, f"{request.request_id} differs"
        reported = expected_logprobs(request.prompt, right, request.sampling, vocab_size)
        asked = [entry for entry in reported if entry is not None]
        assert self.logprobs == asked, f"{request.request_id} has other log probabilities"


class EngineHarness:
    """An engine over real sockets. A context manager: it starts `num_workers` and waits until they have joined; its
    exit stops all that the engine started.
    """

    def __init__(
        self,
        *,
        directory: Path | None = None,
        core: CoreLimits | Scheduler | None = None,
        timeouts: WorkerTimeouts | None = None,
        max_workers: int = 64,
        max_inbox: int = 4096,
        check_every_steps: int = 1,
        step_history: StepHistory | None = None,
        num_workers: int = 0,
        options: ToyOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_anomaly: Callable[[str], object] = lambda what: None,
    ) -> None:
        self.root = short_directory()
        self.directory = directory or self.root / "run"
        self.options = options or ToyOptions()
        self.streams: dict[str, Stream] = {}
        self.joins: list[tuple[float, int]] = []
        self.losses: list[tuple[float, int]] = []
        self.broken: list[str] = []
        self.fatal: list[BaseException] = []
        self.give_ups: list[str] = []
        self.is_killing = False
        """Report to the engine that a condemned worker is being killed, without killing it."""
        self.pool: WorkerPool | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop of the supervisor."""
        self.workers: list[subprocess.Popen[bytes]] = []
        limits = core or CoreLimits(max_batch_size=self.options.num_slots)
        self.core = limits if isinstance(limits, Scheduler) else Scheduler(limits)
        self.on_publish: Callable[[Sequence[Event]], None] = lambda events: None
        self._changed = threading.Condition()
        self._num_workers = num_workers

        self.link = WorkerLink(self.directory, clock=clock)
        self.num_explained = 0
        self.engine = Engine(
            EngineLoop(
                self.core,
                self.link,
                cast("WorkerPool", self),
                EngineCallbacks(self._publish, on_anomaly=on_anomaly, on_fatal=self._died),
                # A worker that misses heartbeats for some seconds on a busy machine is not hung.
                EngineLimits(
                    timeouts or WorkerTimeouts(heartbeat_timeout_seconds=PATIENCE_SECONDS),
                    max_workers,
                    max_inbox,
                    check_every_steps,
                ),
                step_history,
                clock,
            )
        )

    def __enter__(self) -> EngineHarness:
        self.engine.start()
        for _ in range(self._num_workers):
            self.start_worker()
        self.wait_joined(self._num_workers)
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()
        self.link.close()
        for worker in self.workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGCONT)
                worker.kill()
            worker.wait()
        shutil.rmtree(self.root)
        assert self.engine.failure is None or self.fatal, "the engine died silently"

    def start_worker(self, options: ToyOptions | None = None) -> subprocess.Popen[bytes]:
        command = (options or self.options).arguments(self.directory)
        worker = subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.DEVNULL)
        self.workers.append(worker)
        return worker

    def submit(self, request: Request) -> Stream:
        stream = self.streams[request.request_id] = Stream(request)
        self.engine.submit(request)
        return stream

    def snapshot(self) -> EngineSnapshot:
        """Return figures that include all published events. Those of `engine.snapshot` may be 50 ms old."""
        return self.engine.fresh_snapshot().result(PATIENCE_SECONDS)

    def wait(self, condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS, what: str = "it") -> None:
        """Wait until a condition on received events holds."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self.fatal, seconds)
            assert condition(), f"{what} did not happen in {seconds} s; {self.fatal}"

    def wait_joined(self, count: int = 1) -> None:
        self.wait(lambda: len(self.joins) >= count, what=f"join {count}")

    def wait_ended(self, streams: Sequence[Stream], seconds: float = PATIENCE_SECONDS) -> None:
        self.wait(lambda: all(s.end is not None for s in streams), seconds, what="the end of all streams")

    def check(self, streams: Sequence[Stream]) -> None:
        """Wait until all `streams` have ended, and check that their answers are complete and correct."""
        self.wait_ended(streams)
        for stream in streams:
            stream.check(self.options.vocab_size)

    # --- the supervisor, as the engine uses it ---

    def worker_joined(self, hello: Hello) -> None:
        if self.pool is not None:
            self.pool.worker_joined(hello)

    def worker_broken(self, hello: Hello, reason: str) -> bool:
        self.broken.append(reason)
        if self.pool is None or self.is_killing:
            return self.is_killing
        return self.pool.worker_broken(hello, reason)

    def crashes_explained(self) -> None:
        self.num_explained += 1
        if self.pool is not None:
            self.pool.crashes_explained()

    def worker_waits(self, hello: Hello) -> None:
        if self.pool is not None:
            self.pool.worker_waits(hello)

    def wanted(self) -> tuple[WantedWorker, ...]:
        return () if self.pool is None else self.pool.wanted()

    def number_of(self, hello: Hello) -> int | None:
        return None if self.pool is None else self.pool.number_of(hello)

    def worker_progressed(self, hello: Hello) -> None:
        if self.pool is not None:
            self.pool.worker_progressed(hello)

    def _died(self, error: BaseException) -> None:
        with self._changed:
            self.fatal.append(error)
            self._changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Block the engine's thread."""
        entered, released = threading.Event(), threading.Event()

        def hold() -> None:
            entered.set()
            released.wait()

        self.engine.call_on_engine_thread(hold)
        assert entered.wait(PATIENCE_SECONDS)
        yield
        released.set()

    def _publish(self, events: Sequence[Event]) -> None:
        self.on_publish(events)
        with self._changed:
            for event in flat(events):
                if isinstance(event, WorkerJoined):
                    self.joins.append((time.monotonic(), event.epoch))
                elif isinstance(event, WorkerLost):
                    self.losses.append((time.monotonic(), event.epoch))
                else:
                    self.streams[event.request_id].handle(event)
            self._changed.notify_all()


class ToyScheduler:
    """A scheduler process, which supervises a toy worker if `options` are given. Its exit ends the process."""

    def __init__(self, directory: Path, num_streams: int = 0, options: ToyOptions | None = None) -> None:
        toy = json.dumps(options and asdict(options))
        command = [sys.executable, "-m", "support.toy_scheduler", str(directory), str(num_streams), toy]
        self.process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> ToyScheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGKILL)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def read_pid(self, key: str) -> int:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if key in (said := json.loads(line)):
                return int(said[key])
        raise AssertionError(f"the scheduler exited before it wrote {key}")

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_SECONDS)


_PARAMETERS = (
    Sampling(),
    Sampling(temperature=0.7, logprobs=0),
    Sampling(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=-0.5, min_tokens=4),
    Sampling(top_k=40, top_p=0.9, min_p=0.05, logprobs=2),
    Sampling(logit_bias=((3, 1.5), (5, -2.0)), banned_ids=(7, 11, 13)),
    Sampling(allowed_ids=tuple(range(0, 97, 2)), temperature=1.5, logprobs=1),
)


def request(
    index: int, *, prompt_len: int = 12, max_tokens: int = 24, stop_ids: frozenset[int] = frozenset()
) -> Request:
    """Return a request that differs for each `index`; some share a prefix, most differ in sampling parameters."""
    prompt = (*((7 * (index % 5) + 3 * i + 1) % 97 for i in range(prompt_len - 1)), index % 97)
    sampling = replace(_PARAMETERS[index % len(_PARAMETERS)], seed=index, stop_ids=tuple(sorted(stop_ids)))
    return Request(f"r{index}", prompt, sampling, max_tokens, stop_ids=stop_ids)


def supervised(
    harness: EngineHarness,
    body: Callable[[WorkerPool], None],
    limits: SupervisorLimits | None = None,
    *,
    standby: bool = False,
    flags: Sequence[Sequence[str]] = ((),),
) -> WorkerPool:
    """Run `body` on a thread, while a supervisor on the event loop keeps workers of `harness` running."""

    async def scenario() -> WorkerPool:
        pool = WorkerPool(
            harness.options.arguments(harness.directory),
            flags=flags,
            limits=limits or SupervisorLimits(),
            environment=ENVIRONMENT,
            standby=standby,
            on_exit=harness.engine.worker_exited,
            on_give_up=harness.give_ups.append,
        )
        harness.pool, harness.loop = pool, asyncio.get_running_loop()
        pool.start()
        try:
            await asyncio.to_thread(body, pool)
        finally:
            harness.engine.release_worker()
            assert await pool.stop()
        return pool

    return asyncio.run(scenario())
