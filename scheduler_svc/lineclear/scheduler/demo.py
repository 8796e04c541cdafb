"""`--demo`: the model that comes with lineclear, addresses to watch it at, and commands to try."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from lineclear.extras import lineclear_command
from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.addresses import is_local, parse_address
from lineclear.scheduler.settings import SchedulerSettings

_MODELS = (
    Path(__file__).parents[1] / "demo" / "model",  # installed
    Path(__file__).parents[3] / "demo" / "model",  # a checkout
)
_OPENED = ("admin_listen", "metrics_listen", "status_listen")


def model_directory() -> Path:
    """Return the directory of the model. Raises ConfigurationError."""
    for directory in _MODELS:
        if directory.is_dir():
            return directory.resolve()
    raise ConfigurationError("the demonstration model is not installed; name a model with --model")


def with_addresses(settings: SchedulerSettings) -> SchedulerSettings:
    """Add admin address, metrics and status page of a demo on loopback, unless they are given, also as empty.

    They have the three ports behind that of `listen`, or free ones where those are in use: by another demo.
    """
    listen = parse_address(settings.listen)
    if not settings.demo or isinstance(listen, str) or not is_local(settings.listen):
        return settings
    with contextlib.ExitStack() as stack:  # holds each port until all are chosen
        ports = [_held_port(listen[1] + number if listen[1] else 0, stack) for number in (1, 2, 3)]
    found = {name: f"127.0.0.1:{port}" for name, port in zip(_OPENED, ports, strict=True)}
    return settings.model_copy(update={k: found[k] for k in found.keys() - settings.model_fields_set})


def _held_port(wanted: int, stack: contextlib.ExitStack) -> int:
    """Return the wanted port of 127.0.0.1 if it is free, else another one."""
    probe = stack.enter_context(socket.socket())
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the listeners: a demo that is restarted keeps it
    try:
        probe.bind(("127.0.0.1", wanted))
    except (OSError, OverflowError):
        probe.bind(("127.0.0.1", 0))
    return int(probe.getsockname()[1])


def commands(settings: SchedulerSettings, address: str) -> str:
    """Return commands to paste for a demo at `address`; empty if they would need a certificate or token."""
    if settings.tls_cert_file or settings.token_file or settings.admin_token_file:
        return ""
    program = lineclear_command()
    target = "" if address == type(settings).model_fields["listen"].default else f" --target {address}"
    lines = [f'{program} generate "The capital of France is" --max-tokens 6 --temperature 0{target}']
    if settings.admin_listen:
        lines.append(f"{program} top --target {settings.admin_listen}")
    if settings.metrics_listen:
        lines.append(f"curl http://{settings.metrics_listen}/metrics")
    if settings.status_listen:
        lines.append(f"curl http://{settings.status_listen}/status  # or in a browser")
    return "\n  ".join(["Try in another terminal:", *lines])
