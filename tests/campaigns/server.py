"""A scheduler process with its worker, the log lines of both, and threads that read answers from it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.figures import IDLE_GAUGES, Page, check_page
from support.processes import RUN, Process, is_running, worker_flags
from support.time_limits import PATIENCE_SECONDS

TESTS = Path(__file__).parents[1]
BOUND_SECONDS = PATIENCE_SECONDS
CODE = RUN
"""Python code that runs the scheduler."""
TENANTS = ("one", "two", "three")
TOY: dict[str, Any] = {"min_step_seconds": 0.002, "max_step_seconds": 0.006, "num_blocks": 2048}
"""Options of a toy worker."""


def write_tokens(folder: Path, tenants: Sequence[str] = TENANTS) -> tuple[Path, dict[str, str]]:
    """Write a token file. Return its path and the token of each tenant."""
    tokens = {name: f"token-of-{name}-0123456789" for name in tenants}
    path = folder / "tokens"
    path.write_text("".join(f"{name} {token}\n" for name, token in tokens.items()))
    path.chmod(0o400)
    return path, tokens


class Server(Process):
    def __init__(
        self,
        target: str,
        flags: Sequence[str],
        toy: dict[str, Any] | None = None,
        code: str = "",
        variables: Mapping[str, str] = {},
    ) -> None:
        """With `toy`, run the torch-free toy worker with these options. `code` replaces CODE."""
        command = ["--listen", target, "--log-format", "json"]
        command += ["--spawn-worker"] if toy is None else worker_flags()
        command += [] if "--metrics-listen" in flags else ["--metrics-listen", "127.0.0.1:0"]
        super().__init__([*command, *flags], code or CODE, variables=variables, **toy or {})
        # A failed campaign must not leave a server, which would keep its output open.
        atexit.register(self.popen.kill)

    def _pids(self, event: str) -> list[int]:
        return [line["pid"] for line in self.logged(event)]

    def worker_pids(self) -> list[int]:
        """Return the pids of all workers so far, the last one last."""
        return self._pids("worker_started")

    def joined_pids(self) -> list[int]:
        found: dict[int, None] = {}
        for line in list(self.lines):
            if line.get("event") == "worker_joined":
                found[line["pid"]] = None
            elif line.get("event") in ("worker_lost", "worker_exited", "worker_crashed"):
                found.pop(line["pid"], None)
        return list(found)

    def standby_pids(self) -> list[int]:
        """Return the pids of all standbys so far, promoted or not."""
        return self._pids("standby_started")

    def standby_pid(self) -> int | None:
        ended = {*self.worker_pids(), *self._pids("standby_exited")}
        return next((pid for pid in self.standby_pids()[-1:] if pid not in ended), None)

    def state(self) -> str:
        """Describe the scheduler, each worker that it started, the load of the machine, and the last log lines."""
        code, now, joined = self.popen.poll(), time.monotonic(), self.joined_pids()
        found = ["the scheduler runs" if code is None else f"the scheduler exited with {code}"]
        for line in self.logged("worker_started"):
            pid = line["pid"]
            states = "runs" if is_running(pid) else "has exited", "joined" if pid in joined else "not joined"
            found.append(f"worker {line.get('worker')} (pid {pid}) started {now - line.read_at:.1f} s ago, {states}")
        found.append(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
        found += [json.dumps(line) for line in self.lines if not line.get("event", "").startswith("request_")][-30:]
        return "; ".join([*found, *self.other])

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition()` holds. Fails if the server exits before."""
        end = time.monotonic() + BOUND_SECONDS
        while not condition():
            assert self.popen.poll() is None, f"the server exited instead of {what}: {self.state()}"
            assert time.monotonic() < end, f"no {what} within {BOUND_SECONDS:g} s: {self.state()}"
            time.sleep(0.002)

    def wait_for_tokens(self, readers: Sequence[Reader], number: int, what: Callable[[], bool] = lambda: False) -> None:
        """Wait until the readers have got `number` more tokens, or until `what()` holds."""
        goal = sum(reader.num_tokens for reader in readers) + number
        self.wait_until(lambda: what() or sum(reader.num_tokens for reader in readers) >= goal, "progress")

    def check_figures(self) -> None:
        """Check the equations between the figures, those of an idle server if no request is live."""
        page, end = Page(self.metrics_page()), time.monotonic() + BOUND_SECONDS
        while not page["open_streams"] and any(page[name] for name in IDLE_GAUGES) and time.monotonic() < end:
            time.sleep(0.1)  # the core's figures are of a moment ago
            page = Page(self.metrics_page())
        check_page(page, idle=not page["open_streams"])

    def stop(self, number: signal.Signals) -> int:
        """Send a signal and wait for the exit. Return the exit code. Before SIGTERM, check the figures."""
        if self.popen.poll() is None:
            if number is signal.SIGTERM and self.logged("serving"):
                self.check_figures()
            self.popen.send_signal(number)
        return self.exit_code()


class Reader(threading.Thread, ABC):
    """Request one answer after another by `ask` until `stop`, each to its end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.num_tokens = 0
        """Tokens of all answers so far."""
        self.last_at = 0.0
        """Time of the last token."""
        self._stopped = threading.Event()

    @abstractmethod
    def ask(self) -> None:
        """Request one answer and read it to its end."""

    def run(self) -> None:
        while not self._stopped.is_set():
            self.ask()

    def progress(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.last_at = time.monotonic()

    def stop(self) -> None:
        self._stopped.set()


def finish(readers: Sequence[Reader]) -> None:
    """Stop readers and wait until their answers in progress are complete."""
    for reader in readers:
        reader.stop()
    for reader in readers:
        reader.join(BOUND_SECONDS)
        assert not reader.is_alive(), f"an answer did not end: {getattr(reader, 'busy_with', reader)}"


def report(options: dict[str, Any], run: Callable[..., Any]) -> int:
    """Run a campaign in a new folder, and print its options and figures as JSON. Return 0 if it is clean."""
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lc") as folder:
        done = run(Path(folder), **options)
    seconds = round(time.monotonic() - started_at, 1)
    print(json.dumps({**options, "clean": done.is_clean, **done.figures(), "seconds": seconds}))
    return 0 if done.is_clean else 1


def ranks_of(pid: int) -> list[int]:
    """Return the pids of the processes that a worker has started: its other ranks."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def is_orphan(pid: int) -> bool:
    """Whether `pid` is a worker whose parent is no scheduler. A pid may have been reused."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        return is_running(pid) and "worker" in _command(pid) and "lineclear.scheduler" not in _command(parent)
    except (FileNotFoundError, ProcessLookupError):
        return False


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
