"""`lineclear top`: redraw the view of a server in place until Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.live import Live

from lineclear.client import Client
from lineclear.errors import LineclearError, Unreachable
from lineclear.render.top_view import TopHistory, view

from . import output
from .step_reader import StepReader

_REDRAW_SECONDS = 1.0
"""Longest time between two redraws: rates fall while the server is idle."""
_TERMINATED = 128 + signal.SIGTERM
_RESIZED = (signal.SIGWINCH,) if hasattr(signal, "SIGWINCH") else ()
_WATCH: dict[str, Any] = {"history": 512, "include_state": True, "include_block_map": True}


def snapshot(console: Console, connect: Callable[[], Client], target: str, timeout_seconds: float) -> None:
    """Print the view once. Raises Unreachable without an answer in time."""
    history = TopHistory()
    with StepReader(connect, min_interval_seconds=0.0, **_WATCH) as reader:
        for response in reader.responses(timeout_seconds):
            history.add(response)
            if history.state is not None:
                console.print(view(history, target, "", console.width, None))
                return
    raise Unreachable(f"no state from {target} within {timeout_seconds:g} s")


def run(console: Console, connect: Callable[[], Client], target: str, interval_seconds: float) -> None:
    """Redraw until Ctrl-C, which raises KeyboardInterrupt, or SIGTERM. A server that is away is waited for.

    Both leave the terminal as it was: the signal handlers only record the signal, and the loop ends.
    """
    history, notice = TopHistory(), f"waiting for {target}"
    with (
        StepReader(connect, retries=True, min_interval_seconds=interval_seconds, **_WATCH) as reader,
        reader.on_signals(*_RESIZED) as received,
        Live(console=console, auto_refresh=False, screen=True) as live,
    ):
        drawn_at = time.monotonic()
        while not received:
            live.update(view(history, target, notice, console.width, console.height), refresh=True)
            item = reader.get(_REDRAW_SECONDS)
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
