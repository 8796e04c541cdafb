"""The progress of a batch: a bar of rich on standard error if that is a terminal, or a function of the caller."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from lineclear.extras import install_command

# True: a bar on a terminal, if rich is installed. A function: called with (done, total), total None if unknown.
Progress: TypeAlias = bool | Callable[[int, int | None], None] | None


class Display(Protocol):
    """Shows the progress of a batch. `close` ends the line on the terminal."""

    def update(self, done: int, failed: int, tokens: int, total: int | None) -> None: ...
    def close(self) -> None: ...


def display(progress: Progress) -> Display:
    if callable(progress):
        return _Callback(progress)
    if not progress or not sys.stderr.isatty():
        return _Silent()
    try:
        return RichBar()
    except ImportError:
        command = install_command("cli")
        warnings.warn(f"progress=True shows nothing without the package rich; run: {command}", stacklevel=4)
        return _Silent()


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
