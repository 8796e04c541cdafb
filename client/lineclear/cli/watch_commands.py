"""The commands that show what a server does in each step: top, trace, explain, profile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf import json_format
from rich.console import Console
from rich.table import Table

from lineclear.client import AdminClient, StepProfile, StepRow, step_rows
from lineclear.client.admin_results import seconds_of
from lineclear.errors import LineclearError
from lineclear.exit_codes import ExitCode
from lineclear.render.attention_mask import mask_svg, mask_text
from lineclear.render.chrome_trace import json_chunks
from lineclear.render.timeline import panels
from lineclear.render.timeline_svg import timeline_svg
from lineclear.v1 import steps_pb2 as pb

from . import output, top
from .command_runner import command
from .options import Connection, Json, argument, option
from .step_reader import StepReader

_ANSWER_SECONDS = 10.0
_WHOLE_HISTORY = 1_000_000
_MAX_SVG_STEPS = 2000
"""Steps of an SVG timeline; of more, a step is narrower than half a pixel."""


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
        option("FILE.json: a Chrome trace, for ui.perfetto.dev. FILE.svg: slots over steps.", "--output", "-o",
               dir_okay=False),
    ],
    seconds: Annotated[
        float | None, option("Length; until Ctrl-C by default.", "--seconds", "-s", min=0.1)
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
    _check_folder(output_file)
    most = _MAX_SVG_STEPS if output_file.suffix == ".svg" else None
    with StepReader(connection.client, history=history, include_state=True) as reader, reader.on_signals():
        recording = _Recording(reader, seconds, most)
        _write(output_file, iter(recording))
    if recording.ended_by:
        output.print_stderr(f"the recording ended early: {recording.ended_by}", "yellow")
    if recording.num_skipped:
        output.print_stderr(f"{recording.num_skipped} steps are missing: the server steps faster than this reader")
    if not recording.num_steps:
        output.print_stderr("no step was executed: the server is idle. Send it requests, or add --history.", "yellow")
        raise typer.Exit(ExitCode.NEGATIVE)
    workers = len(recording.workers)
    output.show(f"{recording.num_steps} steps of {workers} worker{'s' * (workers > 1)} in {output_file}\n")


def _check_folder(file: Path) -> None:
    if not file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {file.parent}", param_hint="--output")


def _write(path: Path, steps: Iterator[pb.StepRecord]) -> None:
    """Write the file by its suffix. A .json file grows. Without a step no file is written, and none is replaced."""
    first = next(steps, None)
    if first is not None and path.suffix == ".svg":
        path.write_text(timeline_svg(panels([first, *steps])), encoding="utf-8")
    elif first is not None:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json_chunks(itertools.chain([first], steps)))


class _Recording:
    """The steps of a running server, until `seconds` have passed or a signal. Iterate once."""

    def __init__(self, reader: StepReader, seconds: float | None, most_steps: int | None) -> None:
        self.num_steps = self.num_skipped = 0
        self.workers: set[int] = set()
        self.ended_by = ""
        """Why the recording is shorter than asked; empty if it is not."""
        self._reader, self._seconds, self._most_steps = reader, seconds, most_steps

    def __iter__(self) -> Iterator[pb.StepRecord]:
        """Yield each step. A server that stops after its first response ends the recording without an error."""
        has_answered = False
        try:
            for response in self._reader.responses(self._seconds):
                has_answered = True
                self.num_skipped += response.skipped
                for step in response.steps:
                    if self.num_steps == self._most_steps:
                        self.ended_by = f"{self._most_steps} steps are the most for an SVG; a .json file takes more"
                        return
                    self.num_steps += 1
                    self.workers.add(step.worker)
                    yield step
        except LineclearError as error:
            if not has_answered:
                raise
            self.ended_by = str(error)
        if self._reader.has_ended:
            self.ended_by = "the server has stopped"


@command(name="explain", epilog="Example: lineclear explain --target 127.0.0.1:50052")
def explain_step(
    connection: Connection,
    step: Annotated[int | None, argument("Number of a step; the last one by default.", min=1)] = None,
    worker: Annotated[int | None, option("Worker of the step.", min=0)] = None,
    svg: Annotated[Path | None, option("Write the mask as an image to FILE.svg.", dir_okay=False)] = None,
    json_lines: Json = False,
) -> None:
    """Show a step: its packed row, positions, KV blocks, and which query attends to which key.

    --target is the admin address of the server.
    """
    limit = connection.timeout_seconds or _ANSWER_SECONDS
    with StepReader(connection.client, history=_WHOLE_HISTORY, include_state=True) as reader:
        watched = next(reader.responses(limit), None)
    if watched is None:
        output.print_stderr(f"no answer within {limit:g} s", "bold red")
        raise typer.Exit(ExitCode.NEGATIVE)
    found = _choose(watched.steps, step, worker)
    rows = step_rows(found)
    if svg is not None:
        title = f"Attention mask of step {found.step} of worker {found.worker}: one packed row, no padding"
        svg.write_text(mask_svg(rows, title), encoding="utf-8")
    if json_lines:
        output.show_json(
            json_format.MessageToDict(
                found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
        )
        return
    sizes = {w.worker: w.block_size for w in watched.state.workers}
    output.show(_step_text(found, rows, sizes.get(found.worker), Console().width))


def _choose(steps: Sequence[pb.StepRecord], number: int | None, worker: int | None) -> pb.StepRecord:
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


def _step_text(record: pb.StepRecord, rows: Sequence[StepRow], block_size: int | None, width: int) -> str:
    """Return the step in words. `block_size`: positions of a KV block; None if unknown."""
    queries = sum(record.rows.num_tokens)
    milliseconds = seconds_of(record.step_time) * 1000
    lines = [
        f"Step {record.step} of worker {record.worker}, {milliseconds:.2f} ms: {queries} queries of"
        f" {len(rows)} requests in one packed row, no padding",
        "",
        *_table(rows, block_size),
        "",
        *_changes(record),
        "",
        "Which query attends to which key:",
        "",
    ]
    return "\n".join(lines) + "\n" + mask_text(rows, width)


def _table(rows: Sequence[StepRow], block_size: int | None) -> Iterator[str]:
    yield "packed row  slot  request    kind       positions    cached  KV blocks  samples"
    begin = 0
    for row in rows:
        packed = _span(begin, row.num_tokens)
        positions = _span(row.start, row.num_tokens)
        blocks = "-" if block_size is None else str(-(-(row.start + row.num_tokens) // block_size))
        request = f"[{row.request}]"
        yield (
            f"{packed:<10}  {row.slot:4}  {request:<9}  {row.kind:<9}  {positions:<11}  {row.cached_tokens:6}"
            f"  {blocks:>9}  {'a token' if row.samples else '-'}"
        )
        begin += row.num_tokens


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _changes(record: pb.StepRecord) -> Iterator[str]:
    for what, requests in (("started", record.started), ("ended", record.ended), ("preempted", record.preempted)):
        if requests:
            yield f"{what}: {', '.join(f'[{request}]' for request in requests)}"
    free = record.num_blocks - record.blocks_used - record.blocks_cached
    yield (
        f"after it: {record.num_running} of {record.num_slots} slots in use, {record.num_waiting} requests waiting;"
        f" KV blocks: {record.blocks_used} in use, {record.blocks_cached} cached, {free} free"
    )


@command(epilog="Example: lineclear profile --target 127.0.0.1:50052 --steps 50 --output profile.json.gz")
def profile(
    connection: Connection,
    steps: Annotated[int, typer.Option("--steps", "-n", help="Most steps to record.", min=1, max=1000)] = 20,
    seconds: Annotated[
        float, typer.Option("--seconds", "-s", help="Most seconds to wait for them.", min=0.1, max=60.0)
    ] = 10.0,
    worker: Annotated[int, typer.Option(help="Worker to record.", min=0)] = 0,
    top: Annotated[int, typer.Option(help="Lines of the table.", min=1)] = 20,
    output_file: Annotated[
        Path | None,
        option("FILE.json.gz: also write the trace, for ui.perfetto.dev.", "--output", "-o", dir_okay=False),
    ] = None,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Record what the next steps of a worker spend their time on: kernels, operations and Python.

    --target is the admin address of the server. Recorded steps are slower. A trace of 3 MB ends the recording early.
    """
    if output_file is not None:
        _check_folder(output_file)
    with connection.client() as client:
        found = AdminClient(client).profile(num_steps=steps, worker=worker, max_seconds=seconds)
    if output_file is not None:
        output_file.write_bytes(found.trace)
        output.print_stderr(f"wrote {output_file}")
    if json_lines:
        for operation in found.operations():
            output.show_json(operation._asdict())
    else:
        Console().print(_profile_table(found, top))


def _profile_table(found: StepProfile, num_lines: int) -> Table:
    total, steps = found.step_seconds(), found.num_steps
    title = f"{steps} steps of {total / steps * 1000:.2f} ms"
    table = Table("where", "calls a step", "ms a step", "share", title=title, title_justify="left", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    operations = found.operations()
    rows = [(x.name if x.is_kernel else f"host: {x.name}", x.calls, x.seconds) for x in operations[:num_lines]]
    if rest := operations[num_lines:]:
        rows.append((f"{len(rest)} others", sum(x.calls for x in rest), sum(x.seconds for x in rest)))
    for name, calls, seconds in rows:
        table.add_row(name, f"{calls / steps:.1f}", f"{seconds / steps * 1000:.3f}", f"{seconds / total:.1%}")
    return table
