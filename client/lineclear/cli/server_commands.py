"""The commands that start, watch and control a server."""

from __future__ import annotations

import contextlib
import time
from enum import StrEnum
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.live import Live
from typer.core import TyperCommand

from lineclear.client import AdminClient, rpc_methods
from lineclear.client.admin_results import LogLevel
from lineclear.client.results import HealthStatus
from lineclear.errors import LineclearError
from lineclear.exit_codes import ExitCode

from . import batch_run, output, serve, simulate
from .command_runner import command
from .options import Connection, Json


class _Verbatim(TyperCommand):
    """A command that does not parse its arguments, `--` and --help included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


@command(name="serve", cls=_Verbatim)
def start(context: typer.Context) -> None:
    """Start a server on this machine: scheduler and worker. `serve --help` shows the flags of the scheduler."""
    serve.run(context.args)


@command(name="simulate", cls=_Verbatim)
def simulate_load(context: typer.Context) -> None:
    """Predict latency and throughput of a load, on a virtual clock. `simulate --help` shows the flags."""
    simulate.run(context.args)


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
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C.")] = False,
    interval_seconds: Annotated[
        float, typer.Option("--interval-seconds", "--interval", help="With --watch: seconds between updates.", min=0.05)
    ] = 1.0,
    count: Annotated[
        int | None, typer.Option(help="With --watch: number of updates.", min=1, show_default=False)
    ] = None,
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


class AdminCommand(StrEnum):
    """The admin commands."""

    DRAIN = "drain"
    DUMP = "dump"
    FLUSH = "flush"
    LOG_LEVEL = "log-level"
    RESTART_WORKERS = "restart-workers"


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
    level: Annotated[
        str | None, typer.Argument(help="debug, info, warning or error.", show_default=False)
    ] = None,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Send an admin command. --target is the admin address of the server."""
    if (level is not None) != (action is AdminCommand.LOG_LEVEL) or level not in (None, *get_args(LogLevel)):
        raise typer.BadParameter("log-level takes debug, info, warning or error; the others take nothing")
    with connection.client() as client:
        admin = AdminClient(client)
        if action is AdminCommand.DRAIN:
            status = admin.drain()
            sentence = f"{status.requests_in_progress} requests in progress, at most {status.seconds:.1f} s left"
            values = status._asdict()
        elif action is AdminCommand.DUMP:
            sentence = admin.dump_recording()
            values = {"path": sentence}
        elif action is AdminCommand.FLUSH:
            admin.flush_prefix_cache()
            sentence, values = "", {}
        elif action is AdminCommand.RESTART_WORKERS:
            pids = admin.restart_workers(timeout_seconds=connection.timeout_seconds)
            sentence, values = f"restarted; the new workers have the pids {', '.join(map(str, pids))}", {"pids": pids}
        else:
            previous = admin.set_log_level(cast("LogLevel", level))
            sentence, values = f"{level}, previously {previous}", {"level": level, "previous": previous}
    if json_lines:
        output.show_json(values)
    elif sentence:
        output.show(f"{sentence}\n")


class AdapterCommand(StrEnum):
    """The commands about adapters."""

    LOAD = "load"
    UNLOAD = "unload"
    LIST = "list"


@command(epilog="Example: lineclear adapters load french adapters/french --target 127.0.0.1:50052")
def adapters(
    connection: Connection,
    action: Annotated[
        AdapterCommand, typer.Argument(help="load NAME PATH, unload NAME, or list.")
    ] = AdapterCommand.LIST,
    name: Annotated[str | None, typer.Argument(help="Name that requests use.", show_default=False)] = None,
    path: Annotated[
        str | None, typer.Argument(help="Folder of the adapter, below --lora-dir of the server.", show_default=False)
    ] = None,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Load, unload or list LoRA adapters while the server runs. --target is the admin address."""
    needs = {
        AdapterCommand.LOAD: (True, True),
        AdapterCommand.UNLOAD: (True, False),
        AdapterCommand.LIST: (False, False),
    }
    if needs[action] != (name is not None, path is not None):
        raise typer.BadParameter("it is load NAME PATH, unload NAME, or list")
    with connection.client() as client:
        admin = AdminClient(client)
        if action is AdapterCommand.UNLOAD:
            count = admin.unload_adapter(str(name))
            values, text = [{"name": name, "requests_in_progress": count}], f"unloaded; {count} requests still use it\n"
        else:
            found = [admin.load_adapter(str(name), str(path))] if action is AdapterCommand.LOAD else admin.adapters()
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
