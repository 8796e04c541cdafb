"""Targets, channel options and keepalive."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from client.conftest import network
from grpc._cython import cygrpc
from support.sources import REPOSITORY
from support.time_limits import PATIENCE_SECONDS, SOON_SECONDS

from lineclear.client import AsyncClient, Client, grpc_channel
from lineclear.errors import ConnectionLost
from lineclear.v1 import inference_pb2 as pb


@pytest.mark.parametrize(
    "target",
    ["127.0.0.1:99999", "localhost:0", "[::1]:70000", "dns:///somewhere:65536", "ipv4:10.0.0.1:1,10.0.0.2:99999"],
)
def test_port_out_of_range_is_a_value_error(target: str) -> None:
    """gRPC takes 99999 for 34463."""
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="ports are from 1 to 65535"):
            kind(target)


@pytest.mark.parametrize("target", ["127.0.0.1:65535", "[::1]:1", "dns:///somewhere", "dns:///a:1", "ipv6:[::1]:5"])
def test_valid_targets_are_unchanged(target: str) -> None:
    assert grpc_channel.checked_target(target) == target


def options() -> dict[str, str]:
    """Every channel option that the client or the benchmarks name, and where."""
    option = re.compile(r"grpc\.(?!(health|reflection|channelz)\.)[a-z0-9_.]+")
    paths = [path for folder in ("client", "bench") for path in (REPOSITORY / folder).rglob("*.py")]
    return {
        node.value: f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and option.fullmatch(node.value)
    }


def test_installed_grpc_has_every_option() -> None:
    """It ignores a name that it does not know."""
    library = Path(cygrpc.__file__).read_bytes()
    named = options()
    assert len(named) > 10
    assert {name: place for name, place in named.items() if name.encode() + b"\0" not in library} == {}
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms\0" not in library


def test_keepalive_detects_a_dead_connection(server: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a ping is waited for as long as documented, and not for gRPC's 60 s."""

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield server.started()
        gone.set()
        server.wait_for_end(context)

    server.script = script
    monkeypatch.setattr(grpc_channel, "KEEPALIVE_TIME_SECONDS", 1.0)
    monkeypatch.setattr(grpc_channel, "KEEPALIVE_TIMEOUT_SECONDS", 1.0)
    noticed = threading.Event()

    def ask() -> None:
        with pytest.raises(ConnectionLost):
            client.generate("x", timeout_seconds=PATIENCE_SECONDS)
        noticed.set()

    with network(server.target) as (client.target, gone):
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        assert noticed.wait(SOON_SECONDS / 2)
        asking.join(PATIENCE_SECONDS)


def test_keepalive_is_as_documented() -> None:
    chosen = dict(grpc_channel.channel_options())
    assert chosen["grpc.keepalive_time_ms"] == 30_000
    assert chosen["grpc.keepalive_timeout_ms"] == chosen["grpc.http2.ping_timeout_ms"] == 10_000
