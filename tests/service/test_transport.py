"""What the transport refuses before a handler hears of it, and that the server goes on. Real sockets."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from service.serving import BOUND_SECONDS, error_of, read_all, run, serving, text_request

from lineclear.client.channels import channel_options
from lineclear.limits import MAX_MESSAGE_BYTES
from lineclear.scheduler.settings import SchedulerSettings


async def answered(channel: grpc.aio.Channel) -> None:
    """A round trip: the server answers."""
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=BOUND_SECONDS)


def test_both_ends_have_the_same_limit_for_a_message() -> None:
    client = dict(channel_options())
    assert client["grpc.max_receive_message_length"] == client["grpc.max_send_message_length"] == MAX_MESSAGE_BYTES
    assert SchedulerSettings().max_message_bytes == MAX_MESSAGE_BYTES


def test_too_much_metadata_is_refused_by_the_transport(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.engine.answer = lambda request: [5]
            error = await error_of(s.generate(metadata=(("x-large", "x" * 40_000),)))
            assert error.code in ("RESOURCE_EXHAUSTED", "INTERNAL", "UNAVAILABLE")
            assert s.engine.submitted == []
            await read_all(s.generate(metadata=(("x-small", "x" * 1000),)))

    run(scenario())


def test_no_more_calls_at_once_on_one_connection_than_allowed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_streams_per_connection=4) as s:
            calls = [s.generate(text_request(request_id=f"r{n}")) for n in range(8)]
            await s.engine.next_request(4)
            async with grpc.aio.insecure_channel(
                s.server.address, options=[("grpc.use_local_subchannel_pool", 1)]
            ) as other:
                await answered(other)  # a round trip, in which a fifth would have come
            assert len(s.engine.submitted) == 4
            for call in calls:
                call.cancel()

    run(scenario())


def _frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + bytes(4) + payload


def test_who_only_pings_is_told_to_leave(tmp_path: Path) -> None:
    """A connection without calls and a thousand pings: GOAWAY with ENHANCE_YOUR_CALM, and the connection ends."""

    def flood(path: Path) -> bytes:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(BOUND_SECONDS)
            raw.connect(str(path))
            raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4) + _frame(6, bytes(8)) * 1000)
            heard = b""
            try:
                while data := raw.recv(65536):
                    heard += data
            except ConnectionResetError:
                pass
            return heard

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            heard = await asyncio.to_thread(flood, tmp_path / "s")
            assert b"too_many_pings" in heard
            await answered(s.channel)

    run(scenario())


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\x00" * 4096])
def test_what_speaks_something_else_is_hung_up_on(tmp_path: Path, noise: bytes) -> None:
    def speak(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(BOUND_SECONDS)
            raw.connect(str(path))
            raw.sendall(noise)
            raw.shutdown(socket.SHUT_WR)
            try:
                while raw.recv(65536):
                    pass
            except ConnectionResetError:
                pass

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.engine.answer = lambda request: [5]
            await asyncio.to_thread(speak, tmp_path / "s")
            await read_all(s.generate())

    run(scenario())
