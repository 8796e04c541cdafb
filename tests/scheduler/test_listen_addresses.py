"""Addresses: those that cannot be listened on, and those of `--demo`. Stale sockets and other files: test_server.py."""

from __future__ import annotations

import contextlib
import errno
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler import demo
from lineclear.scheduler.addresses import check_bindable
from lineclear.scheduler.settings import SchedulerSettings, load


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


OPENED = ("admin_listen", "metrics_listen", "status_listen")


def opened(*flags: str) -> list[str]:
    return [getattr(demo.with_addresses(load(flags)[0]), name) for name in OPENED]


def free_ports() -> int:
    """Return a port behind which the next three are free, too."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in (first + 1, first + 2, first + 3):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return int(first)


def test_addresses_are_behind_that_of_grpc() -> None:
    port = free_ports()
    assert opened("--demo", f"--listen=127.0.0.1:{port}") == [f"127.0.0.1:{port + n}" for n in (1, 2, 3)]
    assert opened("--demo", f"--listen=localhost:{port}") == [f"127.0.0.1:{port + n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.0.0.1:65534"])
def test_addresses_have_free_ports_of_their_own(listen: str) -> None:
    ports = [int(address.removeprefix("127.0.0.1:")) for address in opened("--demo", f"--listen={listen}")]
    assert len(set(ports)) == 3
    assert 0 not in ports


def test_port_in_use_is_left_to_its_owner() -> None:
    """As beside another demo, whose admin address is the middle one here."""
    port = free_ports()
    with socket.create_server(("127.0.0.1", port + 2)):
        admin, metrics, status = opened("--demo", f"--listen=127.0.0.1:{port}")
    assert (admin, status) == (f"127.0.0.1:{port + 1}", f"127.0.0.1:{port + 3}")
    assert metrics not in (admin, status, f"127.0.0.1:{port + 2}", "")


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "DIR"],
        ["--demo", "--listen", "unix:/tmp/a.sock"],  # as LocalServer: for this user alone
        ["--demo", "--listen", "0.0.0.0:50051", "--insecure-allow-remote"],
    ],
)
def test_other_servers_open_no_more_than_they_are_told(flags: list[str]) -> None:
    assert opened(*flags) == ["", "", ""]


def test_given_addresses_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINECLEAR_STATUS_LISTEN", "127.0.0.1:7")
    port = free_ports()
    found = opened("--demo", f"--listen=127.0.0.1:{port}", "--admin-listen=", "--metrics-listen=127.0.0.1:5")
    assert found == ["", "127.0.0.1:5", "127.0.0.1:7"]


def settings(**fields: Any) -> SchedulerSettings:
    return demo.with_addresses(load(["--demo"])[0]).model_copy(update=fields)


def test_commands_name_the_addresses(tmp_path: Path) -> None:
    fields = {name: f"127.0.0.1:{number}" for number, name in enumerate(OPENED, 1)}
    text = demo.commands(settings(**fields), "127.0.0.1:9")
    assert "generate" in text
    for fragment in ("--target 127.0.0.1:9", "top --target 127.0.0.1:1\n", "127.0.0.1:2/metrics", "127.0.0.1:3/status"):
        assert fragment in text
    assert "--target 127.0.0.1:50051" not in demo.commands(settings(**fields), "127.0.0.1:50051")
    assert "top" not in demo.commands(settings(**fields | {"admin_listen": ""}), "127.0.0.1:9")
    assert demo.commands(settings(tls_cert_file="cert.pem"), "127.0.0.1:9") == ""


def test_command_pastes_as_it_is() -> None:
    """A shell in another folder, without the virtual environment's bin on its PATH, finds the program."""
    line = next(line for line in demo.commands(settings(), "127.0.0.1:9").splitlines() if "generate" in line)
    program = shlex.split(line)[0]
    done = subprocess.run(f"command -v {program}", shell=True, capture_output=True, text=True)
    assert done.returncode == 0, line
