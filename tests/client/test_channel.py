"""Targets, channel options and keepalive."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from client.conftest import started
from grpc._cython import cygrpc
from support.blackhole import BlackHole
from support.sources import REPOSITORY
from support.time_limits import PATIENCE_SECONDS, SOON_SECONDS

from lineclear.client import AsyncClient, Client, grpc_channel
from lineclear.client.target import checked_target
from lineclear.errors import ConnectionLost

TOO_HIGH = "ports are from 1 to 65535"  # gRPC takes 99999 for 34463


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("", "is empty"),
        ("https://x:1", "pass credentials"),
        ("unix:/" + "x" * 120, "at most 107 bytes"),
        *((f"{host}:{port}", TOO_HIGH) for host, port in (("127.0.0.1", 99999), ("localhost", 0), ("[::1]", 70000))),
        *((target, TOO_HIGH) for target in ("dns:///somewhere:65536", "ipv4:10.0.0.1:1,10.0.0.2:99999")),
    ],
)
def test_invalid_target_is_a_value_error(kind: type[Client | AsyncClient], target: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        kind(target)


@pytest.mark.parametrize("target", ["127.0.0.1:65535", "[::1]:1", "dns:///somewhere", "dns:///a:1", "ipv6:[::1]:5"])
def test_valid_targets_are_unchanged(target: str) -> None:
    assert checked_target(target) == target


def test_default_target_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Client("somewhere").target == "somewhere:50051"
    assert Client("grpc://somewhere:1").target == "somewhere:1"
    monkeypatch.setenv("LINECLEAR_TARGET", "somewhere:7")
    assert Client().target == AsyncClient().target == "somewhere:7"
    assert Client("elsewhere:8").target == "elsewhere:8"
    monkeypatch.delenv("LINECLEAR_TARGET")
    assert Client().target == AsyncClient().target == "127.0.0.1:50051"


def test_installed_grpc_has_every_option() -> None:
    """It ignores a name that it does not know."""
    sources = [path for folder in ("client", "bench") for path in (REPOSITORY / folder).rglob("*.py")]
    option = re.compile(r'"(grpc\.(?!(?:health|reflection|channelz)\.)[a-z0-9_.]+)"')
    named = {name for path in sources for name in option.findall(path.read_text("utf-8"))}
    library = Path(cygrpc.__file__).read_bytes()
    assert len(named) > 10
    assert {name for name in named if name.encode() + b"\0" not in library} == set()
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms\0" not in library


def test_keepalive_detects_a_dead_connection(server: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a ping is waited for as long as documented, and not for gRPC's 60 s."""
    monkeypatch.setattr(grpc_channel, "KEEPALIVE_TIME_SECONDS", 1.0)
    monkeypatch.setattr(grpc_channel, "KEEPALIVE_TIMEOUT_SECONDS", 1.0)
    noticed = threading.Event()

    def ask() -> None:
        with pytest.raises(ConnectionLost):
            client.generate("x", timeout_seconds=PATIENCE_SECONDS)
        noticed.set()

    with BlackHole(server.target) as network:
        client.target = network.target
        server.play([started(), lambda _: network.vanish(), server.wait_for_end])
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        assert noticed.wait(SOON_SECONDS / 2)
        asking.join(PATIENCE_SECONDS)
