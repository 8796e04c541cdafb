"""The address of a server: its forms, and the default."""

from __future__ import annotations

import ipaddress
import os
import re

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_PORT = 50051


def default_target() -> str:
    """Return the value of LINECLEAR_TARGET, or the default target."""
    return os.environ.get("LINECLEAR_TARGET") or DEFAULT_TARGET


def hint_of_default(target: str) -> str:
    """Return what a failure to reach `target` adds if it is the default, which nothing has overridden."""
    is_default = target == DEFAULT_TARGET and not os.environ.get("LINECLEAR_TARGET")
    return "; LINECLEAR_TARGET is not set, and names another address" if is_default else ""


def checked_target(target: str) -> str:
    """Return `target` in gRPC's form. A host without a port gets the default port. Raises ValueError."""
    target = target.strip().removeprefix("grpc://")
    if not target:
        raise ValueError("the target is empty; it is host:port or unix:/path")
    if target.startswith(("http://", "https://", "grpcs://")):
        raise ValueError(f"the target {target!r} is a URL; write host:port, and pass credentials for TLS")
    if target.startswith("unix:"):
        path = target.removeprefix("unix:")
        if len(path.encode()) > 107 + len("//"):
            raise ValueError("the path of a unix socket has at most 107 bytes")
        return target
    if ":" not in target:
        return f"{target}:{DEFAULT_PORT}"
    for port in _ports(target):
        if not 1 <= int(port) <= 65535:  # gRPC takes it modulo 65536
            raise ValueError(f"the port of the target is {port}; ports are from 1 to 65535")
    return target


def _ports(target: str) -> list[str]:
    """Return the ports in a target: of host:port, or of each address after a scheme."""
    addresses = target.rpartition("/")[2].split(",")
    return [found[1] for address in addresses if (found := _WITH_PORT.fullmatch(address))]


# scheme:host:port, host:port, [IPv6]:port
_WITH_PORT = re.compile(r"(?:[a-z0-9]+:)?(?:\[[^\]]*\]|[^:\[\]]+):([0-9]{1,20})")


def names_one_server(target: str) -> bool:
    """Whether every connection to the target reaches the same server.

    A host name may stand for several servers. gRPC balances calls among them; a Session would stay at one.
    """
    if target.startswith("unix:"):
        return True
    host = target.rpartition("/")[2].rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
