"""The commands that show what a server does in each step: top, trace, explain."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lineclear.client import StepRecord, WatchedSteps
from lineclear.errors import LineclearError
from lineclear.exit_codes import ExitCode
from lineclear.render.attention_mask import mask_svg

from . import output, top, trace_file
from .command_runner import command
from .options import Connection, Json
from .step_feed import StepFeed
from .step_text import step_text

ADMIN = "--target is the admin address of the server (--admin-listen)."
_ANSWER_SECONDS = 10.0
_WHOLE_HISTORY = 1_000_000


@command(name="top", epilog="Example: lineclear top --target 127.0.0.1:50052")
def show_top(
    connection: Connection,
    interval_seconds: Annotated[
        float, typer.Option("--interval-seconds", "--interval", help="Seconds between updates.", min=0.02, max=10.0)
    ] = 0.5,
) -> None:  # fmt: skip
    """Watch queue, slots, KV blocks and workers, live until Ctrl-C; once if the output is no terminal.

    --target is the admin address of the server.
    """
    console = Console(highlight=False)
    client = connection.client()
    target = client.target
    client.close()
    if console.is_terminal and not console.is_dumb_terminal:
        top.run(console, connection.client, target, interval_seconds)
    else:
        top.snapshot(console, connection.client, target, connection.timeout_seconds or _ANSWER_SECONDS)


@command(name="trace", epilog="Example: lineclear trace --target 127.0.0.1:50052 --seconds 10 --output trace.json")
def record_trace(
    connection: Connection,
    output_file: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="FILE.json: a Chrome trace, for ui.perfetto.dev. FILE.svg: slots over steps.",
            dir_okay=False,
        ),
    ],
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", "-s", help="Length; until Ctrl-C by default.", min=0.1, show_default=False),
    ] = None,
    history: Annotated[
        int, typer.Option(help="Steps before the call to include, as far as the server keeps them.", min=0)
    ] = 0,
) -> None:  # fmt: skip
    """Record the steps of a server: a trace of each row, or a timeline as an image.

    --target is the admin address of the server. Ctrl-C and SIGTERM end the recording and keep it.
    """
    if output_file.suffix not in (".json", ".svg"):
        raise typer.BadParameter("ends with .json or .svg", param_hint="--output")
    if not output_file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {output_file.parent}", param_hint="--output")
    most = trace_file.MAX_SVG_STEPS if output_file.suffix == ".svg" else None
    with StepFeed(connection.client, retries=False, history=history, include_state=True) as feed:
        recording = trace_file.Recording(feed, seconds, most)
        with _on_signal(recording.stop):
            trace_file.write(output_file, recording)
    if recording.ended_by:
        output.print_stderr(f"the recording ended early: {recording.ended_by}", "yellow")
    if recording.num_skipped:
        output.print_stderr(f"{recording.num_skipped} steps are missing: the server steps faster than this reader")
    if not recording.num_steps:
        output.print_stderr("no step was executed: the server is idle. Send it requests, or add --history.", "yellow")
        raise typer.Exit(ExitCode.NEGATIVE)
    workers = len(recording.workers)
    output.show(f"{recording.num_steps} steps of {workers} worker{'s' * (workers > 1)} in {output_file}\n")


@command(name="explain", epilog="Example: lineclear explain --target 127.0.0.1:50052")
def explain_step(
    connection: Connection,
    step: Annotated[
        int | None, typer.Argument(help="Number of a step; the last one by default.", min=1, show_default=False)
    ] = None,
    worker: Annotated[int | None, typer.Option(help="Worker of the step.", min=0, show_default=False)] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Write the mask as an image to FILE.svg.", dir_okay=False, show_default=False)
    ] = None,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Show a step: its packed row, positions, KV blocks, and which query attends to which key.

    --target is the admin address of the server.
    """
    watched = _history(connection)
    found = _choose(watched.steps, step, worker)
    if svg is not None:
        title = f"Attention mask of step {found.step} of worker {found.worker}: one packed row, no padding"
        svg.write_text(mask_svg(found.rows, title), encoding="utf-8")
    if json_lines:
        plain = dataclasses.asdict(found)
        del plain["planned_at"]
        output.show_json(plain)
        return
    sizes = {w.worker: w.block_size for w in watched.state.workers} if watched.state else {}
    output.show(step_text(found, sizes.get(found.worker), Console().width))


@contextlib.contextmanager
def _on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on Ctrl-C and SIGTERM, instead of an end in the middle of a write."""
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _history(connection: Connection) -> WatchedSteps:
    """Return the kept steps. Raises LineclearError."""
    seconds = connection.timeout_seconds or _ANSWER_SECONDS
    with StepFeed(connection.client, retries=False, history=_WHOLE_HISTORY, include_state=True) as feed:
        item = feed.get(seconds)
    if item is None or isinstance(item, LineclearError):
        output.print_stderr(f"no answer within {seconds:g} s", "bold red")
        raise typer.Exit(ExitCode.NEGATIVE)
    return item


def _choose(steps: tuple[StepRecord, ...], number: int | None, worker: int | None) -> StepRecord:
    """Return the last step that matches. Raises typer.Exit."""
    of_worker = [step for step in steps if worker in (None, step.worker)]
    matching = [step for step in of_worker if number in (None, step.step)]
    if matching:
        return matching[-1]
    if not of_worker and steps:
        workers = ", ".join(map(str, sorted({step.worker for step in steps})))
        output.print_stderr(f"no step of worker {worker} is kept; there are steps of worker {workers}", "yellow")
    elif not of_worker:
        output.print_stderr("no step yet: the server has computed nothing that it still keeps", "yellow")
    else:
        kept = [step.step for step in of_worker]
        output.print_stderr(f"step {number} is not kept; there are steps {min(kept)} to {max(kept)}", "yellow")
    raise typer.Exit(ExitCode.NEGATIVE)
