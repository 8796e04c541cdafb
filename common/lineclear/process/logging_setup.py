"""Log lines of both processes: one JSON object a line, or text for people. Decides form and destination, not content.

Lines go to standard error through a bounded queue and a thread of its own. A full disk or a reader that stopped reading
must not stop a step: what finds no room is dropped and counted. What other code writes to standard error (stacks by
faulthandler, notes of gRPC or torch, a traceback) comes from any thread, the event loop's too. So descriptor 2 is made
not to block, and the lines have a descriptor of their own that may. A socket, which journald gives to services, cannot
be opened a second time: there descriptor 2 becomes a pipe, and a thread makes lines of what is written to it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import logging
import os
import queue
import stat
import sys
import threading
import traceback
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_STDERR = 2
_MAX_UNFINISHED_BYTES = 1 << 16
_level = "info"


class LineWriter:
    """A text stream that never blocks its writers. Its own thread writes to `target`.

    `num_dropped` counts lines that found the queue full or the target broken.
    """

    def __init__(self, target: TextIO, max_lines: int = 4096) -> None:
        self.num_dropped = 0
        self._target = target
        self.relay: _Relay | None = None
        """What is closed with the writer."""
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Queue `text` (whole lines), or drop it."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self.num_dropped += 1

    def flush(self) -> None:
        """Nothing: the thread writes as fast as the target takes it."""

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Write what is queued, for at most `timeout_seconds`. What was not read by then is dropped."""
        if self.relay is not None:
            self.relay.close(timeout_seconds)
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=timeout_seconds)
        self._thread.join(timeout_seconds)
        if self.relay is not None and self._thread.is_alive():
            _discard(_STDERR)  # it blocks again since the relay is closed

    def _run(self) -> None:
        while (text := self._lines.get()) is not None:
            try:
                self._target.write(text)
                self._target.flush()
            except (OSError, ValueError):  # disk full, reader gone, stream closed
                self.num_dropped += 1


class _Relay:
    """A pipe in the place of descriptor 2, and a thread that hands what is written to a LineWriter.

    `close` puts back what was there before. Stacks of a crash go to the socket itself, because the thread ends
    with the process.
    """

    def __init__(self, writer: LineWriter, original: int) -> None:
        self._writer = writer
        self.original = original
        self._reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writing, False)
        os.dup2(writing, _STDERR)
        os.close(writing)
        if faulthandler.is_enabled():
            faulthandler.enable(original)
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self._thread.start()

    def close(self, timeout_seconds: float) -> None:
        """Make descriptor 2 the socket again, and hand over what is left. Idempotent."""
        if self._thread.is_alive():
            os.dup2(self.original, _STDERR)
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
    """Return the descriptor that a child is to have as its standard error; None for the one of this process."""
    return None if _relay is None else _relay.original


def write_stderr(text: str) -> None:
    """Print to standard error before the log is set up. A reader that is gone changes nothing, the exit code least."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(_STDERR)


def _discard(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def configure(process: str, level: str = "info", form: str = "auto") -> LineWriter:
    """Set up structlog for this process; every line carries `process`. Call once, before the first line.

    `level` is a key of LEVELS, `form` what `chosen` takes.
    """
    console = chosen(form) == "console"
    set_level(level)
    writer = LineWriter(_lines_target())
    _relay_socket(writer)
    atexit.register(writer.close)
    shared: list[Processor] = [
        _drop_below_level,
        lambda logger, method, event: {"process": process, **event},
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _tell_exception,
    ]
    ending = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), sort_keys=False) if console else _JSON
    structlog.configure(
        processors=[*shared, ending],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),  # the level that holds can change
        logger_factory=structlog.WriteLoggerFactory(writer),  # type: ignore[arg-type]  # asks for write and flush only
        cache_logger_on_first_use=True,
    )
    return writer


def _lines_target() -> TextIO:
    """Return the stream for the lines, and make descriptor 2 not block where it is a pipe or a terminal.

    It is opened anew, because the flags of a descriptor are shared with the processes that it was inherited from. Where
    that is not permitted, descriptor 2 stays as it is. Of a socket it is a copy.
    """
    standard_error = sys.__stderr__
    if standard_error is None or not _is_standard_error():
        return sys.stderr
    kind = os.fstat(_STDERR).st_mode
    if stat.S_ISSOCK(kind):
        copy = fcntl.fcntl(_STDERR, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1)
        return os.fdopen(copy, "w", encoding=standard_error.encoding, errors="backslashreplace")
    if not stat.S_ISFIFO(kind) and not stat.S_ISCHR(kind):
        return standard_error
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        # Without O_NONBLOCK, opening a pipe whose reader is gone would wait for another one.
        lines, others = (os.open(f"/proc/self/fd/{_STDERR}", flags) for _ in range(2))
    except OSError:
        return standard_error
    os.set_blocking(lines, True)
    os.dup2(others, _STDERR)
    os.close(others)
    return os.fdopen(lines, "w", encoding=standard_error.encoding, errors="backslashreplace")


def _is_standard_error() -> bool:
    """Whether sys.stderr is what the process was started with, on descriptor 2."""
    standard_error = sys.__stderr__
    return standard_error is not None and standard_error is sys.stderr and standard_error.fileno() == _STDERR


def _relay_socket(writer: LineWriter) -> None:
    """Put a pipe in the place of descriptor 2 where that is a socket."""
    global _relay
    if _is_standard_error() and stat.S_ISSOCK(os.fstat(_STDERR).st_mode):
        _relay = _Relay(writer, fcntl.fcntl(_STDERR, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1))
        writer.relay = _relay


def chosen(form: str) -> str:
    """The form "json" or "console" as it is; for "auto", console when standard error is a terminal."""
    if form not in ("auto", "json", "console"):
        raise ValueError(f"log form {form!r} is none of auto, json, console")
    if form == "auto":
        return "console" if sys.stderr.isatty() else "json"
    return form


def set_level(level: str) -> str:
    """Log from `level` upwards from now on, and return the level before. Any thread, any time."""
    global _level
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    before, _level = _level, level
    return before


def exception_location(error: BaseException) -> list[str]:
    """Where an exception came through, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames]


_JSON = structlog.processors.JSONRenderer()


def _drop_below_level(logger: Any, method: str, event: EventDict) -> EventDict:
    if LEVELS.get(method, logging.ERROR) < LEVELS[_level]:
        raise structlog.DropEvent
    return event


def _tell_exception(logger: Any, method: str, event: EventDict) -> EventDict:
    """`exc_info` becomes type and places. Not the message, nor any variable: they may quote what a user wrote."""
    error = event.pop("exc_info", None)
    if error is True:
        error = sys.exc_info()[1]
    if isinstance(error, BaseException):
        event["error"], event["places"] = type(error).__name__, exception_location(error)
    return event
