"""Logging of both processes: one JSON object a line, or text for a terminal, on standard error.

A full disk or a reader that stopped reading must not block a step. So events go through a bounded queue to a thread. It
formats them and writes all that are queued at once. Lines that find the queue full are dropped and counted. The event
log_lines_dropped reports the count.

Libraries write to standard error from any thread: stacks of faulthandler, notes of gRPC and torch, tracebacks. So
descriptor 2 does not block, and the thread writes to a descriptor of its own, which does. The socket that journald
gives to services cannot be opened a second time. Then descriptor 2 becomes a pipe, which a second thread reads.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import json
import logging
import os
import queue
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor

from .exception_location import exception_fields
from .standard_error import STDERR, discard_stderr, flush_or_discard

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_MAX_UNFINISHED_BYTES = 1 << 16
_MAX_LINES_AT_ONCE = 64
_level = "info"

Line = str | Callable[[], str]
"""Whole lines, or a function that returns them: the thread calls it."""


class LineWriter:
    """A stream that never blocks its writers. A thread formats the queued lines and writes them to `target`.

    `num_dropped` counts lines lost to a full queue or a failed write. The thread calls `on_dropped` with the count when
    lines can be written again.
    """

    def __init__(
        self, target: TextIO, max_lines: int = 4096, on_dropped: Callable[[int], object] = lambda num_dropped: None
    ) -> None:
        self.num_dropped = self._num_reported = 0
        self._target = target
        self._on_dropped = on_dropped
        self.relay: _Relay | None = None
        """Closed with the writer."""
        self._max_lines = max_lines
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def write(self, line: Line) -> None:
        """Queue a line, or drop it if the queue is full."""
        if self._lines.qsize() < self._max_lines:
            self._lines.put(line)
        else:
            self.num_dropped += 1

    debug = info = warning = error = critical = write
    """The methods that structlog calls."""

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Write the queued lines, for at most `timeout_seconds`. Lines not written by then are lost."""
        if self.relay is not None:
            self.relay.close(timeout_seconds)
        self._lines.put(None)
        self._thread.join(timeout_seconds)
        if self.relay is not None and self._thread.is_alive():
            discard_stderr()  # which blocks again since the relay is closed
        elif _is_standard_error():
            flush_or_discard()

    def _run(self) -> None:
        is_closed = False
        while not is_closed or not self._lines.empty():
            lines = [self._lines.get()]
            while len(lines) < _MAX_LINES_AT_ONCE and not self._lines.empty():
                lines.append(self._lines.get())
            is_closed = is_closed or None in lines
            # A report behind a failed write would fail, too, and be reported, again and again.
            is_written = self._write_target([line for line in lines if line is not None])
            if is_written and (is_closed or self._lines.qsize() <= self._max_lines // 2):
                self._report_dropped()

    def _write_target(self, lines: Sequence[Line]) -> bool:
        """Format and write lines. Return whether they were written."""
        texts = list[str]()
        for line in lines:
            try:
                texts.append(line if isinstance(line, str) else line())
            except Exception:  # of the text of a value
                self.num_dropped += 1
        try:
            self._target.write("".join(texts))
            self._target.flush()
        except (OSError, ValueError):  # disk full, pipe without a reader, stream closed
            self.num_dropped += len(texts)
            return False
        return True

    def _report_dropped(self) -> None:
        if self.num_dropped > self._num_reported:
            self._num_reported = self.num_dropped
            self._on_dropped(self._num_reported)


class _Relay:
    """A pipe as descriptor 2, and a thread that passes its lines to a LineWriter.

    `close` restores descriptor 2. Stacks of a crash go to the original descriptor, because a crash ends the thread.
    """

    def __init__(self, writer: LineWriter, original: int) -> None:
        self._writer = writer
        self.original = original
        self._reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writing, False)
        os.dup2(writing, STDERR)
        os.close(writing)
        if faulthandler.is_enabled():
            faulthandler.enable(original)
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self._thread.start()

    def close(self, timeout_seconds: float) -> None:
        """Restore descriptor 2 and pass on the remaining lines. Idempotent."""
        if self._thread.is_alive():
            os.dup2(self.original, STDERR)
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        unfinished = b""
        while data := os.read(self._reading, 1 << 16):
            lines, end, unfinished = (unfinished + data).rpartition(b"\n")
            if len(unfinished) > _MAX_UNFINISHED_BYTES:
                lines, unfinished = lines + end + unfinished, b""
            if lines:
                self._writer.write((lines + end).decode("utf-8", "backslashreplace"))
        if unfinished:
            self._writer.write(unfinished.decode("utf-8", "backslashreplace"))


_relay: _Relay | None = None


def standard_error_of_children() -> int | None:
    """Return the standard error for child processes; None: they inherit that of this process."""
    return None if _relay is None else _relay.original


def configure(process: str, level: str = "info", form: str = "auto") -> LineWriter:
    """Configure structlog for this process. Call once, before the first line.

    `process` is a field of every line, `level` a key of LEVELS, `form` an argument of `chosen`.
    """
    console = chosen(form) == "console"
    set_level(level)
    writer = LineWriter(_lines_target(), on_dropped=_report_dropped)
    _relay_socket(writer)
    atexit.register(writer.close)
    shared: list[Processor] = [
        _drop_below_level,
        lambda logger, method, event: {"process": process, **event},
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _replace_exception,
    ]
    render = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), sort_keys=False) if console else _json
    structlog.configure(
        processors=[*shared, lambda logger, method, event: ((partial(_line, render, method, event),), {})],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),  # set_level filters
        logger_factory=lambda *names: writer,
        cache_logger_on_first_use=True,
    )
    return writer


def _lines_target() -> TextIO:
    """Return the stream for the lines. If descriptor 2 is a pipe or a terminal, make it non-blocking.

    It is opened again, because the flags of a descriptor are shared with the parent process. If that is not permitted,
    descriptor 2 stays as it is. A socket is duplicated.
    """
    standard_error = sys.__stderr__
    if standard_error is None or not _is_standard_error():
        return sys.stderr
    kind = os.fstat(STDERR).st_mode
    if stat.S_ISSOCK(kind):
        copy = fcntl.fcntl(STDERR, fcntl.F_DUPFD_CLOEXEC, STDERR + 1)
        return os.fdopen(copy, "w", encoding=standard_error.encoding, errors="backslashreplace")
    if not stat.S_ISFIFO(kind) and not stat.S_ISCHR(kind):
        return standard_error
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        # Without O_NONBLOCK, opening a pipe would block until it has a reader.
        lines, others = (os.open(f"/proc/self/fd/{STDERR}", flags) for _ in range(2))
    except OSError:
        return standard_error
    os.set_blocking(lines, True)
    os.dup2(others, STDERR)
    os.close(others)
    return os.fdopen(lines, "w", encoding=standard_error.encoding, errors="backslashreplace")


def _is_standard_error() -> bool:
    """Return whether sys.stderr is the original stream on descriptor 2."""
    standard_error = sys.__stderr__
    return standard_error is not None and standard_error is sys.stderr and standard_error.fileno() == STDERR


def _relay_socket(writer: LineWriter) -> None:
    """Replace descriptor 2 by a pipe if it is a socket."""
    global _relay
    if _is_standard_error() and stat.S_ISSOCK(os.fstat(STDERR).st_mode):
        _relay = _Relay(writer, fcntl.fcntl(STDERR, fcntl.F_DUPFD_CLOEXEC, STDERR + 1))
        writer.relay = _relay


def chosen(form: str) -> str:
    """Return "json" or "console". "auto" is "console" if standard error is a terminal."""
    if form not in ("auto", "json", "console"):
        raise ValueError(f"log form {form!r} is none of auto, json, console")
    if form == "auto":
        return "console" if sys.stderr.isatty() else "json"
    return form


def set_level(level: str) -> str:
    """Log from `level` upwards and return the previous level. Thread-safe."""
    global _level
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    before, _level = _level, level
    return before


def should_log(count: int) -> bool:
    """Return whether to log the `count`-th event of a kind: the 1st, 2nd, 4th, 8th ...

    Events that others cause without limit, such as malformed messages, cannot fill the log.
    """
    return count & (count - 1) == 0


_encode = json.JSONEncoder(default=repr).encode  # json.dumps would make an encoder for each line


def _json(logger: Any, method: str, event: EventDict) -> str:
    return _encode(event)


def _line(render: Callable[[Any, str, EventDict], Any], method: str, event: EventDict) -> str:
    return f"{render(None, method, event)}\n"


def _drop_below_level(logger: Any, method: str, event: EventDict) -> EventDict:
    if LEVELS.get(method, logging.ERROR) < LEVELS[_level]:
        raise structlog.DropEvent
    return event


def _report_dropped(num_dropped: int) -> None:
    structlog.get_logger().warning("log_lines_dropped", num_dropped=num_dropped)


def _replace_exception(logger: Any, method: str, event: EventDict) -> EventDict:
    """Replace `exc_info` by type and location. Message and variables may quote a prompt."""
    error = event.pop("exc_info", None)
    if error is True:
        error = sys.exc_info()[1]
    if isinstance(error, BaseException):
        event.update(exception_fields(error))
    return event
