"""Errors for addresses that cannot be listened on. Stale sockets and other files: test_server.py."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.addresses import check_bindable


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_port_in_use_is_rejected(used_port: int, host: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^cannot listen on {host}:{used_port}: in use$"):
        check_bindable(f"{host}:{used_port}")


def test_partly_used_name_is_rejected(used_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC would accept the other half, and callers of the first would reach another server."""
    both = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, used_port)) for host in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with pytest.raises(ConfigurationError, match="in use"):
        check_bindable(f"name:{used_port}")


def test_name_may_have_foreign_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*hosts: str) -> Any:
        return lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0)) for host in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", resolve("192.0.2.1", "127.0.0.1"))
    check_bindable("name:0")
    monkeypatch.setattr(socket, "getaddrinfo", resolve("192.0.2.1"))
    with pytest.raises(ConfigurationError, match="not an address of this machine"):
        check_bindable("name:0")


def test_other_system_errors_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(ConfigurationError, match="80: Permission denied"):
        check_bindable("127.0.0.1:80")


def test_socket_in_a_missing_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"/absent is missing or not writable"):
        check_bindable(f"unix:{tmp_path}/absent/s")


def test_free_address_stays_free(tmp_path: Path) -> None:
    """The check leaves no socket behind."""
    for _ in range(2):
        check_bindable("127.0.0.1:0")
        check_bindable(f"unix:{tmp_path}/s")
    assert list(tmp_path.iterdir()) == []
