"""The progress of a batch on standard error, if that is a terminal: a bar of rich, or a plain line without rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO, TypeAlias

# True: a bar on a terminal. A function: called with (done, total) on the caller's thread; total is None if unknown.
Progress: TypeAlias = bool | Callable[[int, int | None], None] | None


class Display(Protocol):
    """Shows the progress of a batch. `close` ends the line on the terminal."""

    def update(self, done: int, failed: int, tokens: int, total: int | None) -> None: ...
    def close(self) -> None: ...


def display(progress: Progress, stream: TextIO | None = None) -> Display:
    """Return the display for a `progress` argument."""
    stream = stream or sys.stderr
    if callable(progress):
        return _Callback(progress)
    if not progress or not stream.isatty():
        return _Silent()
    try:
        return RichBar()
    except ImportError:
        return PlainBar(stream)


class _Silent:
    def update(self, done: int, failed: int, tokens: int, total: int | None) -> None:
        pass

    def close(self) -> None:
        pass


class _Callback(_Silent):
    def __init__(self, function: Callable[[int, int | None], None]) -> None:
        self._function = function

    def update(self, done: int, failed: int, tokens: int, total: int | None) -> None:
        self._function(done, total)


class PlainBar:
    """One line, rewritten at most ten times a second."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic, width: int = 30) -> None:
        self._stream = stream
        self._clock = clock
        self._width = width
        self._started_at = clock()
        self._written: float | None = None
        self._line = ""

    def update(self, done: int, failed: int, tokens: int, total: int | None) -> None:
        now = self._clock()
        self._line = self._text(done, failed, tokens, total, now - self._started_at)
        if self._written is None or now - self._written >= 0.1 or done == total:
            self._written = now
            self._stream.write(f"\r{self._line}\x1b[K")
            self._stream.flush()

    def close(self) -> None:
        if self._written is not None:
            self._stream.write(f"\r{self._line}\x1b[K\n")
            self._stream.flush()

    def _text(self, done: int, failed: int, tokens: int, total: int | None, elapsed: float) -> str:
        rate = tokens / elapsed if elapsed > 0 else 0.0
        facts = f"{rate:.1f} tok/s {elapsed:.0f} s" + (f", {failed} failed" if failed else "")
        if not total:
            return f"{done} done {facts}"
        filled = self._width * done // total
        left = f", {elapsed / done * (total - done):.0f} s left" if 0 < done < total else ""
        return f"[{'#' * filled}{'.' * (self._width - filled)}] {done}/{total} {facts}{left}"


class RichBar:
    """A progress bar of rich. Raises ImportError if rich is not installed."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=None, facts="")
        self._started_at = time.monotonic()
        self._bar.start()

    def update(self, done: int, failed: int, tokens: int, total: int | None) -> None:
        elapsed = time.monotonic() - self._started_at
        facts = f"{tokens / elapsed:.1f} tok/s" if elapsed > 0 else ""
        facts += f" [red]{failed} failed[/red]" if failed else ""
        self._bar.update(self._task, completed=done, total=total, facts=facts)

    def close(self) -> None:
        self._bar.stop()
