"""Whether one could listen on an address now. Decides what is in the way and says so; keeps nothing, builds nothing.

A moment later somebody else may have come, so whoever binds has a sentence of his own for that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.addresses import parse_address

_IN_THE_WAY = {errno.EADDRINUSE: "in use", errno.EADDRNOTAVAIL: "not an address of this machine"}


def check_bindable(address: str) -> None:
    """Raises ConfigurationError where nobody could listen. The socket file of a server that is dead is removed."""
    parsed = parse_address(address)
    if isinstance(parsed, str):
        _remove_dead_socket(Path(parsed))
    else:
        _try_port(address, parsed[0].strip("[]"), parsed[1])


def _try_port(address: str, host: str, port: int) -> None:
    """A name may stand for several addresses: none may be in use, and one must be ours."""
    problems: list[OSError] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {address}: {error.strerror}") from None
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As the listeners do: connections of a server that has just left are no reason to wait.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            problems.append(error)
    taken = [error for error in problems if error.errno == errno.EADDRINUSE]
    if taken or len(problems) == len(found):
        first = (taken or problems)[0]
        raise ConfigurationError(f"cannot listen on {address}: {_IN_THE_WAY.get(first.errno or 0, first.strerror)}")


def _remove_dead_socket(path: Path) -> None:
    """gRPC would take a path away from a server that lives there; so look first, and remove what a dead one left."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ConfigurationError(
                f"cannot listen on unix:{path}: {path.parent} is no directory that we may write to"
            ) from None
        return
    except OSError as error:
        raise ConfigurationError(f"cannot listen on unix:{path}: {error.strerror}") from None
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigurationError(f"cannot listen on unix:{path}: something else is there; remove it, or choose another")
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.settimeout(1.0)
        probe.connect(str(path))
        raise ConfigurationError(f"cannot listen on unix:{path}: another server does")
    path.unlink(missing_ok=True)
