"""A scheduler process with its worker, and what both say, as a campaign sees them."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
BOUND_SECONDS = 120.0
PROGRAM: tuple[str, ...] = ("-m", "lineclear.scheduler.main")
"""What Python runs as the scheduler."""


class Server:
    """Runs until killed or stopped. `events` are the log lines of both processes with the moment they were read."""

    def __init__(self, target: str, flags: Sequence[str], toy: dict[str, Any] | None = None) -> None:
        """With `toy`, the worker is the torch-free one of the tests, with these options."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LINECLEAR_")}
        command = [sys.executable, *PROGRAM, "--listen", target, "--spawn-worker", "--log-format", "json"]
        if toy is not None:
            path = os.pathsep.join(filter(None, (str(TESTS), environment.get("PYTHONPATH"))))
            environment |= {"PYTHONPATH": path, "TOY_OPTIONS": json.dumps(toy)}
            for word in (sys.executable, "-m", "service.toy_worker"):
                command.append(f"--worker-command={word}")
        self.process = subprocess.Popen(
            [*command, *flags], env=environment, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        # A campaign that fails on the way leaves no server behind, which would hold on to its output.
        atexit.register(self.process.kill)
        self.events: list[tuple[float, dict[str, Any]]] = []
        self._heard = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            now = time.monotonic()
            try:
                said = json.loads(line)
            except ValueError:
                continue
            with self._heard:
                self.events.append((now, said))
                self._heard.notify_all()

    def wait_for(self, event: str, after: float = 0.0) -> tuple[float, dict[str, Any]]:
        """The first log line of that event read since `after`, and when that was."""

        def found() -> tuple[float, dict[str, Any]] | None:
            return next((e for e in self.events if e[0] >= after and e[1].get("event") == event), None)

        with self._heard:
            assert self._heard.wait_for(lambda: found() is not None, BOUND_SECONDS), f"no {event} was logged"
            line = found()
        assert line is not None
        return line

    def has_said(self, event: str, after: float = 0.0) -> bool:
        """Whether a log line of that event was read since `after`."""
        with self._heard:
            return any(at >= after and said.get("event") == event for at, said in self.events)

    def worker_pids(self) -> list[int]:
        """Of all workers started so far, the last one last."""
        return [event["pid"] for event in self.said("worker_started")]

    def standby_pids(self) -> list[int]:
        """Of all standbys started so far, promoted or not."""
        return [event["pid"] for event in self.said("standby_started")]

    def standby_pid(self) -> int | None:
        """Of the standby that waits."""
        gone = {*self.worker_pids(), *(event["pid"] for event in self.said("standby_ended"))}
        return next((pid for pid in self.standby_pids()[-1:] if pid not in gone), None)

    def said(self, event: str) -> list[dict[str, Any]]:
        """All log lines of that event so far."""
        with self._heard:
            return [said for _, said in self.events if said.get("event") == event]

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(BOUND_SECONDS)
        self._reader.join(BOUND_SECONDS)
        return code


def is_running(pid: int) -> bool:
    """Alive, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_orphan(pid: int) -> bool:
    """Whether this is still a worker, and no scheduler is its parent: in a long campaign pids are reused."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        return is_running(pid) and "worker" in _command(pid) and "lineclear.scheduler" not in _command(parent)
    except (FileNotFoundError, ProcessLookupError):
        return False


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
