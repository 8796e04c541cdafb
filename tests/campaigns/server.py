"""A scheduler process with its worker, and the log lines of both."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.figures import IDLE_GAUGES, Page, check_page, fetch
from support.processes import is_running

TESTS = Path(__file__).parents[1]
BOUND_SECONDS = 120.0
PROGRAM: tuple[str, ...] = ("-m", "lineclear.scheduler.main")
"""Arguments of Python that run the scheduler."""


class Server:
    """A running server. `events` has the log lines of both processes with the time when they were read."""

    def __init__(
        self,
        target: str,
        flags: Sequence[str],
        toy: dict[str, Any] | None = None,
        program: Sequence[str] = (),
        variables: Mapping[str, str] = {},
    ) -> None:
        """With `toy`, run the torch-free toy worker with these options. `program` replaces PROGRAM."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LINECLEAR_")} | variables
        command = [sys.executable, *(program or PROGRAM), "--listen", target, "--spawn-worker", "--log-format", "json"]
        if toy is not None:
            path = os.pathsep.join(filter(None, (str(TESTS), environment.get("PYTHONPATH"))))
            environment |= {"PYTHONPATH": path, "TOY_OPTIONS": json.dumps(toy)}
            command.append(f"--worker-command={sys.executable} -m support.toy_worker_command")
        if "--metrics-listen" not in flags:
            command += ["--metrics-listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(
            [*command, *flags], env=environment, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        # A failed campaign must not leave a server, which would keep its output open.
        atexit.register(self.process.kill)
        self.events: list[tuple[float, dict[str, Any]]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            now = time.monotonic()
            try:
                event = json.loads(line)
            except ValueError:
                continue
            with self._changed:
                self.events.append((now, event))
                self._changed.notify_all()

    def wait_for(self, event: str, after: float = 0.0) -> tuple[float, dict[str, Any]]:
        """Wait for a log line of `event` that is read after `after`. Return its time and the line."""

        def found() -> tuple[float, dict[str, Any]] | None:
            return next((e for e in self.events if e[0] >= after and e[1].get("event") == event), None)

        with self._changed:
            is_found = self._changed.wait_for(lambda: found() is not None, BOUND_SECONDS)
            line = found()
        assert is_found, f"no {event} was logged within {BOUND_SECONDS:g} s: {self.state()}"
        assert line is not None
        return line

    def has_logged(self, event: str, after: float = 0.0) -> bool:
        """Whether a log line of `event` was read after `after`."""
        with self._changed:
            return any(at >= after and line.get("event") == event for at, line in self.events)

    def worker_pids(self) -> list[int]:
        """Return the pids of all workers so far, the last one last."""
        return [event["pid"] for event in self.logged("worker_started")]

    def joined_pids(self) -> list[int]:
        """Return the pids of the workers that are joined."""
        with self._changed:
            found: dict[int, None] = {}
            for _, event in self.events:
                if event.get("event") == "worker_joined":
                    found[event["pid"]] = None
                elif event.get("event") in ("worker_lost", "worker_exited", "worker_crashed"):
                    found.pop(event["pid"], None)
            return list(found)

    def standby_pids(self) -> list[int]:
        """Return the pids of all standbys so far, promoted or not."""
        return [event["pid"] for event in self.logged("standby_started")]

    def standby_pid(self) -> int | None:
        """Return the pid of the waiting standby."""
        ended = {*self.worker_pids(), *(event["pid"] for event in self.logged("standby_exited"))}
        return next((pid for pid in self.standby_pids()[-1:] if pid not in ended), None)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Return all log lines of `event` so far."""
        with self._changed:
            return [line for _, line in self.events if line.get("event") == event]

    def last_events(self, count: int = 30) -> list[tuple[float, dict[str, Any]]]:
        """Return the last log lines, except those of requests."""
        with self._changed:
            return [event for event in self.events if not event[1].get("event", "").startswith("request_")][-count:]

    def state(self) -> str:
        """Return the state of the scheduler and of each worker process that it started, and the load of the machine."""
        code, now, joined = self.process.poll(), time.monotonic(), self.joined_pids()
        with self._changed:
            started = {line["pid"]: (at, line) for at, line in self.events if line.get("event") == "worker_started"}
        found = ["the scheduler runs" if code is None else f"the scheduler exited with {code}"]
        for pid, (at, line) in started.items():
            place = "joined" if pid in joined else "not joined"
            state = "runs" if is_running(pid) else "has exited"
            found.append(f"worker {line.get('worker')} (pid {pid}) started {now - at:.1f} s ago, {state}, {place}")
        ends = [line for name in ("worker_killed", "worker_not_restarted") for line in self.logged(name)]
        found += [f"{line['event']}: {line.get('reason', '')}" for line in ends[-3:]]
        return "; ".join([*found, f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"])

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition()` holds. Fails if the server exits before."""
        end = time.monotonic() + BOUND_SECONDS
        while not condition():
            code = self.process.poll()
            assert code is None, f"the server exited instead of {what}: {self.state()}; {self.last_events()}"
            assert time.monotonic() < end, f"no {what} within {BOUND_SECONDS:g} s: {self.state()}; {self.last_events()}"
            time.sleep(0.002)

    def check_figures(self) -> None:
        """Check the equations between the figures, those of an idle server if no request is live."""
        address = self.wait_for("metrics_listening")[1]["address"]
        page, end = Page(fetch(address)), time.monotonic() + BOUND_SECONDS
        while not page["open_streams"] and any(page[name] for name in IDLE_GAUGES) and time.monotonic() < end:
            time.sleep(0.1)  # the core's figures are of a moment ago
            page = Page(fetch(address))
        check_page(page, idle=not page["open_streams"])

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the exit. Return the exit code. Before SIGTERM, check the figures."""
        if self.process.poll() is None:
            if number is signal.SIGTERM and self.has_logged("serving"):
                self.check_figures()
            self.process.send_signal(number)
        code = self.process.wait(BOUND_SECONDS)
        self._reader.join(BOUND_SECONDS)
        return code


def finish(readers: Sequence[Any]) -> None:
    """Stop readers and wait until their answers in progress are complete."""
    for reader in readers:
        reader.stop()
    for reader in readers:
        reader.join(BOUND_SECONDS)
        assert not reader.is_alive(), f"an answer did not end: {getattr(reader, 'busy_with', reader)}"


def is_orphan(pid: int) -> bool:
    """Whether `pid` is a worker whose parent is no scheduler. A pid may have been reused."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        return is_running(pid) and "worker" in _command(pid) and "lineclear.scheduler" not in _command(parent)
    except (FileNotFoundError, ProcessLookupError):
        return False


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
