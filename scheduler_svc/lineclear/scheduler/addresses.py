"""Listen addresses of the settings: host:port or unix:/path. Parsing, reachability and a bind probe."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from pathlib import Path

from lineclear.process.private_dir import own_socket_exists
from lineclear.process.settings_base import ConfigurationError

_BIND_PROBLEMS = {errno.EADDRINUSE: "in use", errno.EADDRNOTAVAIL: "not an address of this machine"}


def parse_address(address: str) -> tuple[str, int] | str:
    """Return (host, port), or the path of a unix socket. Raises ValueError for anything else."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path.startswith("/") or len(path.encode()) > 107:
            raise ValueError("unix: needs an absolute path of at most 107 bytes")
        return path
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError("an address is host:port or unix:/path")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("an IPv6 address is written [::1]:50051")
    return host, int(port)


def is_tcp(address: str) -> bool:
    """Whether the address is host:port, for which TLS is meant."""
    return bool(address) and not isinstance(parse_address(address), str)


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address."""
    parsed = parse_address(address)
    if isinstance(parsed, str):
        return True
    host = parsed[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_bindable(address: str) -> None:
    """Raise ConfigurationError if a server cannot listen on `address` now.

    Removes the socket file of a dead server. Another process may take the address after the check.
    """
    parsed = parse_address(address)
    if isinstance(parsed, str):
        _remove_dead_socket(Path(parsed))
    else:
        _try_port(address, parsed[0].strip("[]"), parsed[1])


def _try_port(address: str, host: str, port: int) -> None:
    """Try to bind every address of a host name: none may be in use, and one must belong to this machine."""
    problems: list[OSError] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {address}: {error.strerror}") from None
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As the listeners do: connections of a server that has just stopped do not block its address.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            problems.append(error)
    taken = [error for error in problems if error.errno == errno.EADDRINUSE]
    if taken or len(problems) == len(found):
        first = (taken or problems)[0]
        raise ConfigurationError(f"cannot listen on {address}: {_BIND_PROBLEMS.get(first.errno or 0, first.strerror)}")


def _remove_dead_socket(path: Path) -> None:
    """Check a socket path before gRPC does, which would take it away from a running server."""
    try:
        exists = own_socket_exists(path)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on unix:{path}: {error.strerror or error}") from None
    if not exists:
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ConfigurationError(
                f"cannot listen on unix:{path}: {path.parent} is missing or not writable; create it"
            )
        return
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.settimeout(1.0)
        probe.connect(str(path))
        raise ConfigurationError(f"cannot listen on unix:{path}: in use by another server")
    path.unlink(missing_ok=True)
