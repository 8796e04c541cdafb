"""`lineclear top`: redraw the view of a server in place until Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

import typer
from rich.console import Console
from rich.live import Live

from lineclear.client import Client
from lineclear.errors import LineclearError, Unreachable

from . import output
from .step_feed import StepFeed
from .top_history import TopHistory
from .top_view import view

_HISTORY = 512
_REDRAW_SECONDS = 1.0
"""Longest time between two redraws: rates fall while the server is idle."""
_TERMINATED = 128 + signal.SIGTERM


def snapshot(console: Console, connect: Callable[[], Client], target: str, timeout_seconds: float) -> None:
    """Print the view once. Raises Unreachable without an answer in time."""
    history = TopHistory()
    with _feed(connect, retries=False, interval_seconds=0.0) as feed:
        until = time.monotonic() + timeout_seconds
        while history.state is None:
            item = feed.get(max(0.0, until - time.monotonic()))
            if item is None and (feed.is_at_end or time.monotonic() >= until):
                raise Unreachable(f"no state from {target} within {timeout_seconds:g} s")
            if item is not None and not isinstance(item, LineclearError):
                history.add(item)
    console.print(view(history, target, "", console.width, None))


def run(console: Console, connect: Callable[[], Client], target: str, interval_seconds: float) -> None:
    """Redraw until Ctrl-C, which raises KeyboardInterrupt, or SIGTERM. A server that is away is waited for.

    Both leave the terminal as it was: the signal handlers only record the signal, and the loop ends.
    """
    history, notice = TopHistory(), f"waiting for {target}"
    with (
        _feed(connect, retries=True, interval_seconds=interval_seconds) as feed,
        _signals(feed.wake) as received,
        Live(console=console, auto_refresh=False, screen=True) as live,
    ):
        drawn_at = time.monotonic()
        while not received:
            live.update(view(history, target, notice, console.width, console.height), refresh=True)
            item = feed.get(_REDRAW_SECONDS)
            now = time.monotonic()
            if item is None:
                history.elapse(now - drawn_at)
            elif isinstance(item, LineclearError):
                notice = f"waiting for {target}: {output.strip_control_chars(' '.join(str(item).split()))}"
            else:
                history.add(item)
                notice = ""
            drawn_at = now
    if signal.SIGTERM in received:
        raise typer.Exit(_TERMINATED)
    raise KeyboardInterrupt


def _feed(connect: Callable[[], Client], *, retries: bool, interval_seconds: float) -> StepFeed:
    return StepFeed(
        connect, retries=retries, history=_HISTORY, min_interval_seconds=interval_seconds,
        include_state=True, include_block_map=True,
    )  # fmt: skip


@contextlib.contextmanager
def _signals(wake: Callable[[], None]) -> Iterator[list[int]]:
    """Record SIGINT and SIGTERM, and `wake` for them and for a new size of the terminal."""
    received: list[int] = []

    def record(number: int, _: FrameType | None) -> None:
        received.append(number)
        wake()

    handlers: dict[int, Callable[[int, FrameType | None], None]] = {signal.SIGINT: record, signal.SIGTERM: record}
    if hasattr(signal, "SIGWINCH"):
        handlers[signal.SIGWINCH] = lambda *_: wake()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
