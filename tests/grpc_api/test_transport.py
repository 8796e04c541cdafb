"""Limits that the transport enforces before a handler runs, on real sockets; the server keeps serving."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from security.test_token_file import ALICE, BOB, token_file
from support.http2 import Connection, message
from support.serving import BOUND_SECONDS, Serving, error_of, read_all, serving, text_request, until
from support.session_driver import Caller, submit
from support.sockets import gate

from lineclear.api_limits import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES
from lineclear.client.grpc_channel import channel_options
from lineclear.scheduler import settings as settings_module
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.grpc_api import request_reader
from lineclear.scheduler.grpc_api.request_reader import LONG
from lineclear.scheduler.grpc_api.server import Options, data_options, probe_options
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import inference_pb2 as pb

KEEPALIVE_BOUND_SECONDS = 30.0
"""Far longer than keepalive takes here, and half of gRPC's wait if it ignored the configured timeout."""


async def answered(channel: grpc.aio.Channel) -> None:
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=BOUND_SECONDS)


def test_client_accepts_the_largest_server_message() -> None:
    client, server = dict(channel_options()), dict(data_options(SchedulerSettings()))
    assert client["grpc.max_receive_message_length"] == server["grpc.max_send_message_length"] == MAX_MESSAGE_BYTES
    assert SchedulerSettings().max_request_bytes == MAX_REQUEST_BYTES


LIBRARY = Path(cygrpc.__file__).read_bytes()
"""The installed gRPC, which silently ignores unknown options."""


def is_known(option: str) -> bool:
    return option.encode() + b"\0" in LIBRARY


@pytest.mark.parametrize("options", [data_options, probe_options, lambda settings: channel_options()])
def test_installed_grpc_knows_every_server_option(options: Callable[[SchedulerSettings], Options]) -> None:
    """And each that the client sets."""
    assert [name for name, _ in options(SchedulerSettings()) if not is_known(name)] == []
    assert not is_known("grpc.http2.min_recv_ping_interval_without_data_ms")
    assert not is_known("grpc.http2.ping_timeout")


async def test_too_much_metadata_is_rejected_by_the_transport(s: Serving) -> None:
    s.engine.answer = lambda request: [5]
    error = await error_of(s.generate(metadata=(("x-large", "x" * 40_000),)))
    assert error.code == "RESOURCE_EXHAUSTED"
    assert "metadata size exceeds" in str(error)
    assert s.engine.submitted == []
    await read_all(s.generate(metadata=(("x-small", "x" * 1000),)))


async def test_concurrent_calls_of_a_connection_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "_MAX_STREAMS", 4)
    async with serving(tmp_path) as s:
        calls = [s.generate(text_request(request_id=f"r{n}")) for n in range(8)]
        await s.engine.next_request(4)
        async with grpc.aio.insecure_channel(
            s.server.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as other:
            await answered(other)  # a round trip, in which a fifth call would have arrived
        assert len(s.engine.submitted) == 4
        for call in calls:
            call.cancel()


async def test_cancel_and_stats_work_above_the_stream_limit(tmp_path: Path) -> None:
    """Queued and running requests have a stream each; further streams are rejected at once."""
    room, excess = 128, 500
    async with serving(tmp_path, max_queue_size=room) as s:
        calls = [s.generate(text_request(request_id=f"r{n}")) for n in range(room + excess)]
        codes = [asyncio.ensure_future(call.code()) for call in calls]
        await s.engine.next_request(room)
        await answered(s.channel)
        await until(lambda: sum(code.done() for code in codes) == excess)
        assert {code.result() for code in codes if code.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        stats = await s.stub.GetStats(pb.GetStatsRequest(), timeout=BOUND_SECONDS)
        assert stats.gauges.open_streams == room
        waiting = next(number for number, code in enumerate(codes) if not code.done())
        cancel = pb.CancelRequest(request_id=f"r{waiting}")
        assert (await s.stub.Cancel(cancel, timeout=BOUND_SECONDS)).found
        assert await codes[waiting] is grpc.StatusCode.CANCELLED
        for call in calls:
            call.cancel()


async def test_calls_waiting_for_a_stream_are_answered_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC queues the calls, as for lineclear's clients without a Session."""
    monkeypatch.setattr(settings_module, "_MAX_STREAMS", 32)
    async with serving(tmp_path) as s:
        s.engine.answer = lambda request: [5]
        answers = await asyncio.gather(*(read_all(s.generate()) for _ in range(150)))
        assert all(answer[-1].HasField("finished") for answer in answers)


def pings(path: Path, count: int, seconds_between: float) -> Connection:
    """Return a connection that has sent `count` pings, or as many as the server accepted."""
    with Connection(path) as connection:
        connection.receive()
        for _ in range(count):
            connection.ping()
            while not connection.is_closed and connection.receive(seconds_between):
                pass
            if connection.is_closed:
                break
        return connection


async def test_client_that_only_pings_gets_goaway(tmp_path: Path) -> None:
    """A connection without calls sends a thousand pings: GOAWAY with ENHANCE_YOUR_CALM, and the connection ends."""

    async with serving(tmp_path) as s:
        connection = await asyncio.to_thread(pings, tmp_path / "s", 1000, 0.0001)
        assert b"too_many_pings" in connection.goaway
        await answered(s.channel)


async def test_client_pinging_at_the_allowed_rate_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many pings as the server allows strikes, in a thousandth of the time. The default is one per 300 s."""
    monkeypatch.setattr("lineclear.scheduler.grpc_api.server.MIN_PING_INTERVAL_MS", 5)

    async with serving(tmp_path):
        connection = await asyncio.to_thread(pings, tmp_path / "s", 60, 0.01)
        assert connection.goaway == b""
        assert not connection.is_closed


@pytest.mark.parametrize("phase", ["waiting", "streaming"])
async def test_lost_connection_cancels_its_requests(tmp_path: Path, phase: str) -> None:
    """No byte arrives and no connection closes, as after a power failure of the machine."""

    async with (
        serving(tmp_path, keepalive_time_seconds=1, keepalive_timeout_seconds=0.5, stall_timeout_seconds=3600) as s,
        gate(tmp_path) as (address, is_open),
        grpc.aio.insecure_channel(address) as channel,
    ):
        s.stub_of(channel).Generate(text_request())
        session = s.stub_of(channel).Session()
        await session.write(submit(1))
        await s.engine.next_request(2)
        keys = [r.request_id for r in s.engine.submitted]
        for key in keys:
            s.engine.start(key)
        is_open.clear()
        before = monotonic()
        while len(s.service.streams):
            if phase == "streaming":
                s.engine.step({key: [40] for key in keys if key in s.engine.requests})
            await asyncio.sleep(0.01)
            assert monotonic() < before + KEEPALIVE_BOUND_SECONDS
        assert sorted(s.engine.cancelled) == sorted(keys)
        is_open.set()


@pytest.mark.parametrize("method", ["lineclear.v1.InferenceService/Generate", "grpc.health.v1.Health/Check"])
async def test_incomplete_request_times_out(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reader, "READ_TIMEOUT_SECONDS", 0.2)
    async with serving(tmp_path) as s:
        s.engine.answer = lambda request: [5]

        def exchange() -> Connection:
            with Connection(tmp_path / "s") as connection:
                connection.call(f"/{method}", message(b"x" * 100, declared=200))
                while not connection.ended:
                    assert connection.receive()
                return connection

        connection = await asyncio.to_thread(exchange)
        assert b"request was not complete after 0.2 s" in connection.ended[1]
        await read_all(s.generate())


@pytest.mark.parametrize("network", [False, True])
async def test_incomplete_requests_of_a_connection_are_bounded(
    tmp_path: Path, network: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream sends only as much as the server reads: almost nothing, while others are read before.

    On a Unix socket some incomplete requests are ended, so that others are read.
    """
    size, unfinished, streams = 256 * 1024, 4, 48

    monkeypatch.setattr(request_reader, "MAX_INCOMPLETE", unfinished)
    monkeypatch.setattr(settings_module, "_MAX_STREAMS", 64)
    listen = {"listen": "127.0.0.1:0"} if network else {}
    async with serving(tmp_path, max_message_bytes=size, **listen) as s:
        s.engine.answer = lambda request: [5]

        def exchange(method: str, count: int) -> tuple[int, Connection]:
            connection = Connection(int(s.server.address.rpartition(":")[2]) if network else tmp_path / "s")
            most = 0
            connection.receive()
            for _ in range(count):
                connection.call(f"/lineclear.v1.InferenceService/{method}", message(bytes(size), declared=size + 1))
            while connection.receive(0.2):
                most = max(most, connection.num_sent)
            return most, connection

        sent, connection = await asyncio.to_thread(exchange, "Generate", streams)
        assert sent < (1 if network else 2) * unfinished * size + streams * 80 * 1024
        assert sent > unfinished * size / 2, "nothing was sent, so nothing was bounded"
        connection.__exit__()
        async with grpc.aio.insecure_channel(
            s.server.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as other:
            await read_all(s.stub_of(other).Generate(text_request()))


GENERATE = "/lineclear.v1.InferenceService/Generate"
CANCEL = "/lineclear.v1.InferenceService/Cancel"
CHECK = "/grpc.health.v1.Health/Check"
PLACES = request_reader.MAX_INCOMPLETE


def unfinished(connection: Connection, method: str, count: int, *metadata: tuple[str, str]) -> None:
    for _ in range(count):
        connection.call(method, message(b"x" * 100, declared=200), *metadata)


async def wait_for_calls(s: Serving, count: int) -> None:
    await until(lambda: sum(guard.num_calls for guard in s.server._errors) >= count)


@pytest.fixture
def no_read_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have requests end only because other requests wait."""
    monkeypatch.setattr(request_reader, "READ_TIMEOUT_SECONDS", 3600.0)


@pytest.mark.usefixtures("no_read_timeout")
@pytest.mark.parametrize(("flood", "excess"), [(GENERATE, 0), (GENERATE, 100), (CANCEL, 100), (CHECK, 0)])
async def test_incomplete_requests_yield_on_a_unix_socket(tmp_path: Path, flood: str, excess: int) -> None:
    """One caller takes every read slot and keeps it. gRPC gives both callers the same peer name."""

    async with serving(tmp_path) as s:
        s.engine.answer = lambda request: [5]
        with Connection(tmp_path / "s") as hostile:
            hostile.receive()
            unfinished(hostile, flood, PLACES + excess)
            await wait_for_calls(s, PLACES + excess)
            await answered(s.channel)
            cancel = pb.CancelRequest(request_id="nobody")
            assert not (await s.stub.Cancel(cancel, timeout=BOUND_SECONDS)).found
            await read_all(s.generate(timeout=BOUND_SECONDS))
            await asyncio.gather(*(read_all(s.generate(timeout=BOUND_SECONDS)) for _ in range(2 * PLACES)))


@pytest.mark.usefixtures("no_read_timeout")
async def test_incomplete_request_gets_the_reason_for_yielding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reader, "MAX_INCOMPLETE", 1)
    async with serving(tmp_path) as s:
        s.engine.answer = lambda request: [5]
        with Connection(tmp_path / "s") as hostile:
            hostile.receive()
            unfinished(hostile, GENERATE, 1)
            await wait_for_calls(s, 1)
            await read_all(s.generate(timeout=BOUND_SECONDS))
            while not hostile.ended:
                assert await asyncio.to_thread(hostile.receive)
            assert b"incomplete while others waited" in hostile.ended[1]


@pytest.mark.usefixtures("no_read_timeout")
async def test_short_requests_do_not_wait_for_long_ones(tmp_path: Path) -> None:
    """Short requests do not end long ones: a client may send a long request slowly and check health in parallel."""

    async with serving(tmp_path) as s:
        with Connection(tmp_path / "s") as slow:
            slow.receive()
            unfinished(slow, GENERATE, PLACES)
            await wait_for_calls(s, PLACES)
            for _ in range(3 * PLACES):
                await answered(s.channel)
            while await asyncio.to_thread(slow.receive, 0.5):
                pass
            assert slow.ended == {}


@pytest.mark.usefixtures("no_read_timeout")
async def test_tenants_on_one_connection_have_separate_read_slots(tmp_path: Path) -> None:
    """As with a proxy."""

    file = token_file(tmp_path, f"alice {ALICE}", f"bob {BOB}")
    async with serving(tmp_path, listen="127.0.0.1:0", token_file=str(file)) as s:
        s.engine.answer = lambda request: [5]
        with Connection(int(s.server.address.rpartition(":")[2])) as proxy:
            proxy.receive()
            unfinished(proxy, GENERATE, PLACES, ("authorization", f"Bearer {ALICE}"))
            await wait_for_calls(s, PLACES)
            request = message(text_request().SerializeToString())
            stream = proxy.call(GENERATE, request, ("authorization", f"Bearer {BOB}"))
            while not proxy.ended:
                assert await asyncio.to_thread(proxy.receive)
            assert list(proxy.ended) == [stream]
            assert len(s.engine.submitted) == 1


@pytest.mark.usefixtures("no_read_timeout")
async def test_long_requests_over_tcp_wait_without_yielding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow network, a client sends many long requests in parallel."""
    monkeypatch.setattr(request_reader, "MAX_INCOMPLETE", 1)
    async with serving(tmp_path, listen="127.0.0.1:0") as s:
        s.engine.answer = lambda request: [5]
        with Connection(int(s.server.address.rpartition(":")[2])) as client:
            client.receive()
            request = message(text_request().SerializeToString())
            first = client.call(GENERATE, request[:10])
            second = client.call(GENERATE, request)
            await wait_for_calls(s, 2)
            while await asyncio.to_thread(client.receive, 1.5):
                pass
            assert s.engine.submitted == []
            client.send_more(first, request[10:])
            while len(client.ended) < 2:
                assert await asyncio.to_thread(client.receive)
            assert sorted(client.ended) == [first, second]
            assert len(s.engine.submitted) == 2


def test_methods_with_prompts_use_long_read_slots() -> None:
    service = pb.DESCRIPTOR.services_by_name["InferenceService"]
    large = {"text", "chat", "token_ids", "prompt", "request", "inputs"}
    unary = [m for m in service.methods if not m.client_streaming]
    assert {m.name for m in unary if large & set(m.input_type.fields_by_name)} == LONG


async def test_sessions_of_a_connection_are_limited(tmp_path: Path) -> None:
    async with serving(tmp_path, listen="127.0.0.1:0", max_sessions_per_connection=2) as s:
        callers = [Caller(s) for _ in range(2)]
        for caller in callers:  # both are open before the next one starts
            await caller.call.initial_metadata()
        error = await error_of(Caller(s).call)
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert error.metadata == {"limit": "2"}
        callers[0].call.cancel()
        await until(lambda: len(s.manager.sessions) == 1)
        callers[0] = Caller(s)
        await callers[0].call.initial_metadata()
        for caller in callers:
            caller.call.cancel()
        await s.stub.GetModel(pb.GetModelRequest())
        readers = [guard._reading for guard in s.server._errors]
        await until(lambda: not any(reader._streams or reader._slots for reader in readers))


async def test_connection_at_maximum_age_takes_no_new_calls(tmp_path: Path) -> None:
    """Its calls in progress complete."""

    async with serving(tmp_path, max_connection_age_seconds=0.2) as s:
        with Connection(tmp_path / "s") as connection:
            request = message(text_request().SerializeToString())
            stream = connection.call("/lineclear.v1.InferenceService/Generate", request)
            key = await s.engine.next_request()
            while not connection.goaway:
                assert await asyncio.to_thread(connection.receive)
            assert b"max_age" in connection.goaway
            assert not connection.ended
            s.engine.start(key)
            s.engine.finish_by(key, FinishReason.LENGTH)
            while stream not in connection.ended:
                assert await asyncio.to_thread(connection.receive)
            while not connection.is_closed:
                await asyncio.to_thread(connection.receive)


async def test_session_at_maximum_age_takes_no_new_requests(tmp_path: Path) -> None:
    async with serving(tmp_path, max_connection_age_seconds=0.2) as s:
        caller = Caller(s)
        await caller.send(submit(1))
        key = await s.engine.next_request()
        session = next(iter(s.manager.sessions))
        await until(lambda: session._drain_error)
        await caller.send(submit(2))
        await caller.until(lambda: caller.failed)
        assert {handle: failure.reason for handle, failure in caller.failed.items()} == {2: "SERVER_DRAINING"}
        s.engine.start(key)
        s.engine.tokens(key, [5])
        s.engine.finish_by(key, FinishReason.LENGTH)
        await caller.until(lambda: caller.finished)
        assert caller.tokens[1] == [5]
        assert len(s.engine.submitted) == 1


async def test_unix_socket_clients_share_no_session_limit(tmp_path: Path) -> None:
    """gRPC gives all of them the same peer name."""

    async with serving(tmp_path, max_sessions_per_connection=1) as s:
        callers = [Caller(s) for _ in range(3)]  # a call without a reference is cancelled
        for caller in callers:
            await caller.call.initial_metadata()
        await until(lambda: len(s.manager.sessions) == 3)  # a client may have the headers before the session counts


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\x00" * 4096])
async def test_other_protocols_are_disconnected(tmp_path: Path, noise: bytes) -> None:
    def exchange(path: Path) -> None:
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

    async with serving(tmp_path) as s:
        s.engine.answer = lambda request: [5]
        await asyncio.to_thread(exchange, tmp_path / "s")
        assert (await read_all(s.generate()))[-1].HasField("finished")
