"""Log lines: one JSON object each, and never in the way of the work, wherever they go."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.time_limits import PATIENCE_SECONDS

from lineclear.process.logging_setup import LineWriter, chosen, configure
from lineclear.process.standard_error import write_stderr
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.worker.settings import WorkerSettings

SCRIPT = """
import structlog, sys
from lineclear.process.logging_setup import configure, set_level
configure("worker", {level!r}, {form!r})
log = structlog.get_logger()
log.debug("too_fine", n=1)
log.info("worker_joined", epoch=3, model_id="toy")
set_level("error")
log.warning("too_mild")
try:
    secret = "what the user wrote"
    raise KeyError(secret)
except KeyError:
    log.exception("step_failed")
"""


def lines_of(level: str, form: str) -> list[str]:
    script = SCRIPT.format(level=level, form=form)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_json_lines_carry_process_level_time_and_fields() -> None:
    """An exception has its type and place, and not its text."""
    lines = lines_of("info", "auto")
    first, second = (json.loads(line) for line in lines)
    assert first.pop("timestamp").endswith("Z")
    assert first == {"process": "worker", "level": "info", "event": "worker_joined", "epoch": 3, "model_id": "toy"}
    assert (second["event"], second["level"]) == ("step_failed", "error")
    assert (second["error"], second["location"]) == ("KeyError", ["<string>:12 <module>"])
    assert "what the user wrote" not in "".join(lines)


def test_console_format() -> None:
    lines = lines_of("debug", "console")
    assert "too_fine" in lines[0]
    assert "worker_joined" in lines[1]
    assert lines[1].split()[4:] == ["process=worker", "epoch=3", "model_id=toy"]
    assert "KeyError" in "".join(lines)
    assert "what the user wrote" not in "".join(lines)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_terminal_gets_the_console_format(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    assert chosen("auto") == ("console" if is_terminal else "json")
    assert WorkerSettings(model="m", socket_directory="d").log_format == "auto"
    assert SchedulerSettings().log_format == "auto"


def test_an_unknown_level_or_form_is_named() -> None:
    for level, form, wrong in (("loud", "json", "loud"), ("info", "xml", "xml")):
        with pytest.raises(ValueError, match=wrong):
            configure("worker", level, form)


class Stuck(io.StringIO):
    """A stream without a reader: the first write blocks until `released`."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.released = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.released.wait()
        return super().write(text)


def test_stuck_reader_drops_lines_without_blocking_and_they_are_reported_later() -> None:
    target, reports = Stuck(), list[int]()
    writer = LineWriter(target, max_lines=10, on_dropped=reports.append)
    writer.write("0\n")
    assert target.entered.wait(PATIENCE_SECONDS)
    for number in range(1, 21):
        writer.write(f"{number}\n")  # would block here for ever
    assert (writer.num_dropped, reports) == (10, [])
    target.released.set()
    writer.close(10.0)
    assert reports == [10]
    assert target.getvalue().split() == [str(n) for n in range(11)]


def test_events_are_formatted_by_the_writing_thread() -> None:
    """In order, none lost at the end, and a value that has no text costs its own line only."""
    script = """
import threading, structlog
from lineclear.process.logging_setup import configure

class Value:
    def __init__(self, number):
        self.number = number

    def __repr__(self):
        assert self.number != 7
        return f"{self.number} {threading.current_thread().name}"

writer = configure("scheduler", form="json")
for number in range(2000):
    structlog.get_logger().info("line", value=Value(number))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=PATIENCE_SECONDS, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["num_dropped"] for line in lines if line["event"] == "log_lines_dropped"] == [1]
    assert [line["value"] for line in lines if line["event"] == "line"] == [
        f"{number} logs" for number in range(2000) if number != 7
    ]


def written(script: str) -> tuple[int, list[Any]]:
    """Return the exit code and the log lines of a program whose reader starts when it has written them."""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()
    _, output = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, [json.loads(line) for line in output.splitlines()]


def test_the_log_reports_dropped_lines() -> None:
    """A pipe holds about 500 of these lines and the queue 4096, so most of 20000 are dropped."""
    _, lines = written("""
import structlog
from lineclear.process.logging_setup import configure
writer = configure("scheduler", form="json")
log = structlog.get_logger()
for number in range(20000):
    log.info("line", number=number)
print("written", flush=True)
writer.close(60.0)
""")
    reports = [line["num_dropped"] for line in lines if line["event"] == "log_lines_dropped"]
    assert reports
    assert reports[-1] == 20000 - sum(line["event"] == "line" for line in lines)


def test_full_disk_drops_lines() -> None:
    with open("/dev/full", "w") as target:
        writer = LineWriter(target)
        writer.write("lost\n")
        writer.close(10.0)
        assert writer.num_dropped == 1
        with open(os.devnull, "w") as elsewhere:
            os.dup2(elsewhere.fileno(), target.fileno())  # closing flushes once more


class Broken(io.StringIO):
    """A pipe without a reader."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tries = 0

    def write(self, text: str) -> int:
        self.num_tries += 1
        raise BrokenPipeError


def test_report_of_lost_lines_is_not_reported() -> None:
    """The thread would write, fail and report without an end, and the other threads would share their lock with it."""
    target = Broken()
    threads = set(threading.enumerate())
    writer: LineWriter
    writer = LineWriter(target, on_dropped=lambda count: writer.write(f"{count}\n"))
    for number in range(3):
        writer.write(f"{number}\n")
    writer.close(1.0)
    assert threads.issuperset(threading.enumerate())
    assert target.num_tries <= 4, "one for each line, and one for the end"
    assert writer.num_dropped == 3


def test_process_survives_a_closed_standard_error(tmp_path: Path) -> None:
    done = tmp_path / "done"
    script = f"""
import pathlib, structlog
from lineclear.process.logging_setup import configure
writer = configure("scheduler", form="json")
log = structlog.get_logger()
for number in range(2000):
    log.info("line", number=number)
pathlib.Path({str(done)!r}).touch()
"""
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run([sys.executable, "-c", script], stderr=writing, timeout=PATIENCE_SECONDS)
    os.close(writing)
    assert done.exists()
    assert process.returncode == 0


def test_text_for_a_terminal_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may log between two."""
    writes = []

    class Terminal(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any, /) -> int:
            writes.append(bytes(data))
            return len(data)

    stream = io.TextIOWrapper(io.BufferedWriter(Terminal()), line_buffering=True)
    monkeypatch.setattr(sys, "stderr", stream)
    write_stderr("Try:\n  lineclear top")
    assert writes == [b"Try:\n  lineclear top\n"]


def test_nonblocking_standard_error_gets_whole_lines() -> None:
    """Thousands of lines, more than the pipe holds, reach a reader that starts late, whole."""
    code, lines = written("""
import os, sys, structlog
from lineclear.process.logging_setup import configure
writer = configure("scheduler", form="json")
log = structlog.get_logger()
for number in range(3000):
    log.info("line", number=number)
print("as soon as the lines are queued", flush=True)
assert not os.get_blocking(2)
writer.close(60.0)
""")
    assert [line["number"] for line in lines] == list(range(3000))
    assert code == 0
