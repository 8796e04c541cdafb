"""Addresses as settings name them, host:port or unix:/path, and who can reach them. Nothing is opened or looked up."""

from __future__ import annotations

import ipaddress


def parse_address(address: str) -> tuple[str, int] | str:
    """(host, port), or the path of a unix socket. Raises ValueError for anything else."""
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
    """Whether this is host:port, which TLS is for."""
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
