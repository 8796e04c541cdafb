"""The commands that start, watch and control a server."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, cast, get_args

import typer
from rich.console import Console
from rich.live import Live
from typer.core import TyperCommand

from lineclear.client import AdminClient, local_server, rpc_methods
from lineclear.client.admin_results import LogLevel
from lineclear.client.results import HealthStatus
from lineclear.errors import LineclearError
from lineclear.exit_codes import ExitCode
from lineclear.extras import install_command

from . import batch_run, output
from .command_runner import command
from .options import Connection, Json, argument, option


class _Verbatim(TyperCommand):
    """A command that does not parse its arguments, `--` and --help included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


@command(name="serve", cls=_Verbatim)
def start(context: typer.Context) -> None:
    """Start a server on this machine: scheduler and worker. `serve --help` shows the flags of the scheduler."""
    _check_installed()
    _become(local_server.command(context.args))


@command(name="quantize", cls=_Verbatim)
def quantize_model(context: typer.Context) -> None:
    """Write a copy of a model with 4- or 8-bit matrices. `quantize --help` shows the flags."""
    _check_installed()
    _become([sys.executable, "-P", "-m", "lineclear.worker.quantize_command", *context.args])


def _check_installed() -> None:
    """Raise typer.Exit unless scheduler and worker are installed."""
    if absent := local_server.missing():
        output.print_stderr(
            f"error: a server needs more than the client: {', '.join(absent)} is not installed", "bold red"
        )
        output.print_stderr(f"this brings scheduler and worker: {install_command('all')}")
        raise typer.Exit(ExitCode.CONFIGURATION)


@command(name="simulate", cls=_Verbatim)
def simulate_load(context: typer.Context) -> None:
    """Predict latency and throughput of a load, on a virtual clock. `simulate --help` shows the flags."""
    # -P: a file in the working directory must not shadow a package.
    _become([sys.executable, "-P", "-m", "lineclear.planner", *context.args])


def _become(command_line: list[str]) -> NoReturn:
    """Replace this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command_line)


@command()
def health(
    connection: Connection,
    service: Annotated[
        str, typer.Option(help="The service to check; '' is the server process.")
    ] = rpc_methods.SERVICE,
    wait_seconds: Annotated[
        float, typer.Option("--wait-seconds", "--wait", help="Wait up to this long until the server serves.", min=0)
    ] = 0.0,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Check the health of the server: exit code 0 if it serves, 1 if it answers and does not serve."""
    until = time.monotonic() + wait_seconds
    with connection.client() as client:
        while True:
            left = until - time.monotonic()
            try:
                found = client.health(service, timeout_seconds=max(left, connection.timeout_seconds or 5.0))
            except LineclearError:
                if left <= 0:
                    raise
            else:
                if found is HealthStatus.SERVING or left <= 0:
                    break
            time.sleep(min(0.25, max(left, 0.0)))
    if json_lines:
        output.show_json({"status": found, "service": service})
    else:
        output.show(f"{found}\n")
    if found is not HealthStatus.SERVING:
        raise typer.Exit(ExitCode.NEGATIVE)


@command()
def stats(
    connection: Connection,
    watch: Annotated[bool, option("Repeat until Ctrl-C.", "--watch", "-w")] = False,
    interval_seconds: Annotated[
        float, typer.Option("--interval-seconds", "--interval", help="With --watch: seconds between updates.", min=0.05)
    ] = 1.0,
    count: Annotated[int | None, option("With --watch: number of updates.", min=1)] = None,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Show the statistics of the server."""
    rounds = count if watch else 1
    with connection.client() as client:
        if json_lines:
            for values in batch_run.repeated(client.stats, interval_seconds, rounds):
                output.show_json(output.to_json(values))
            return
        console = Console()
        if not watch:
            console.print(output.stats_view(client.stats()))
            return
        with Live(console=console, auto_refresh=False, screen=console.is_terminal and count is None) as live:
            for values in batch_run.repeated(client.stats, interval_seconds, rounds):
                live.update(output.stats_view(values), refresh=True)


@command()
def model(connection: Connection, json_lines: Json = False) -> None:
    """Show the served model and the limits of the server."""
    with connection.client() as client:
        found = client.model()
    if json_lines:
        output.show_json(output.to_json(found))
    else:
        Console().print(output.model_view(found))


AdminCommand: TypeAlias = Literal["drain", "dump", "flush", "log-level", "restart-workers"]


@command(name="admin", epilog="Example: lineclear admin drain --target unix:/run/lineclear/admin.sock")
def operate(
    connection: Connection,
    action: Annotated[
        AdminCommand,
        typer.Argument(
            help="drain: shut down gracefully, as SIGTERM does. dump: write the flight recording. flush: drop cached "
            "prefixes. log-level: set the log level to LEVEL. restart-workers: restart one worker after the other.",
        ),
    ],
    level: Annotated[str | None, argument("debug, info, warning or error.")] = None,
    json_lines: Json = False,
) -> None:
    """Send an admin command. --target is the admin address of the server."""
    if (level is not None) != (action == "log-level") or level not in (None, *get_args(LogLevel)):
        raise typer.BadParameter("log-level takes debug, info, warning or error; the others take nothing")
    with connection.client() as client:
        admin = AdminClient(client)
        values: dict[str, Any] = {}
        sentence = ""
        if action == "drain":
            status = admin.drain()
            sentence = f"{status.requests_in_progress} requests in progress, at most {status.seconds:.1f} s left"
            values = status._asdict()
        elif action == "dump":
            sentence = admin.dump_recording()
            values = {"path": sentence}
        elif action == "flush":
            admin.flush_prefix_cache()
        elif action == "restart-workers":
            values = {"pids": admin.restart_workers(timeout_seconds=connection.timeout_seconds)}
            sentence = f"restarted; the new workers have the pids {', '.join(map(str, values['pids']))}"
        else:
            previous = admin.set_log_level(cast("LogLevel", level))
            sentence, values = f"{level}, previously {previous}", {"level": level, "previous": previous}
    if json_lines:
        output.show_json(values)
    elif sentence:
        output.show(f"{sentence}\n")


AdapterCommand: TypeAlias = Literal["load", "unload", "list"]


@command(epilog="Example: lineclear adapters load french adapters/french --target 127.0.0.1:50052")
def adapters(
    connection: Connection,
    action: Annotated[AdapterCommand, typer.Argument(help="load NAME PATH, unload NAME, or list.")] = "list",
    name: Annotated[str | None, argument("Name that requests use.")] = None,
    path: Annotated[str | None, argument("Folder of the adapter, below --lora-dir of the server.")] = None,
    json_lines: Json = False,
) -> None:
    """Load, unload or list LoRA adapters while the server runs. --target is the admin address."""
    if (name is not None, path is not None) != (action != "list", action == "load"):
        raise typer.BadParameter("it is load NAME PATH, unload NAME, or list")
    with connection.client() as client:
        admin = AdminClient(client)
        if action == "unload":
            count = admin.unload_adapter(str(name))
            values, text = [{"name": name, "requests_in_progress": count}], f"unloaded; {count} requests still use it\n"
        else:
            found = [admin.load_adapter(str(name), str(path))] if action == "load" else admin.adapters()
            values = [adapter._asdict() for adapter in found]
            lines = (f"{a.name}  rank {a.rank}  {a.digest[:16]}  {a.requests_in_progress} requests\n" for a in found)
            text = "".join(lines)
            for adapter in found:
                if adapter.warning:
                    output.print_stderr(f"{adapter.name}: {adapter.warning}")
    if json_lines:
        for entry in values:
            output.show_json(entry)
    else:
        output.show(text)


@command(epilog="Example: lineclear scheduling scheduling_policy=fair max_queue_size=200 --target 127.0.0.1:50052")
def scheduling(
    connection: Connection,
    changes: Annotated[
        list[str] | None, typer.Argument(help="Settings to change, all or none.", metavar="[NAME=VALUE]...")
    ] = None,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Show the scheduling settings in force, or change some while the server runs. --target is the admin address."""
    given = dict(_change(word) for word in changes or ())
    with connection.client() as client:
        admin = AdminClient(client)
        found = admin.update_scheduling(**given) if given else admin.scheduling()
    if json_lines:
        output.show_json(found)
    else:
        output.show("".join(f"{name}={value}\n" for name, value in found.items()))


def _change(word: str) -> tuple[str, str | float]:
    name, equals, text = word.partition("=")
    if not equals:
        raise typer.BadParameter(f"{word} is not NAME=VALUE", param_hint="changes")
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return name.replace("-", "_"), kind(text)
    return name.replace("-", "_"), text
