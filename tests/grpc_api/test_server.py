"""Listeners: health, addresses, limits and drain."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.serving import (
    BOUND_SECONDS,
    TOKENIZER,
    Serving,
    error_of,
    read_all,
    serving,
    text_request,
    tokens_of,
    until,
)

from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.grpc_api import health_service
from lineclear.scheduler.grpc_api.health_service import LIVE, READY
from lineclear.v1 import inference_pb2 as pb

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
SERVICE = "lineclear.v1.InferenceService"


def health_of(channel: Any) -> Any:
    return health_pb2_grpc.HealthStub(channel)


async def check(s: Serving, name: str) -> int:
    return int((await health_of(s.channel).Check(health_pb2.HealthCheckRequest(service=name))).status)


async def test_serving_only_while_a_worker_is_joined(tmp_path: Path) -> None:
    assert set(READY) == {"readiness", SERVICE}

    async with serving(tmp_path, joined=False) as s:
        assert [await check(s, name) for name in READY] == [NOT_SERVING] * 2
        assert [await check(s, name) for name in LIVE] == [SERVING] * 2
        s.engine.join()
        await until(lambda: s.server.health.is_serving("readiness"))
        assert await check(s, "worker") == SERVING
        assert [await check(s, name) for name in READY] == [SERVING] * 2
        s.engine.worker_status = replace(s.engine.worker_status, is_unhealthy=True)
        s.engine.lose()
        await until(lambda: not s.server.health.is_serving("readiness"))
        assert await check(s, "worker") == NOT_SERVING
        assert [await check(s, name) for name in READY] == [NOT_SERVING] * 2
        assert [await check(s, name) for name in LIVE] == [SERVING] * 2


async def test_probe_without_service_name_checks_liveness(tmp_path: Path) -> None:
    """The default of a kubelet's gRPC probe and of grpc_health_probe: a missing worker must not fail it."""

    async with serving(tmp_path, joined=False) as s:
        answer = await health_of(s.channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == SERVING
        s.server.health.set_live(False)
        answer = await health_of(s.channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == NOT_SERVING


async def test_an_unknown_name(s: Serving) -> None:
    error = await error_of(health_of(s.channel).Check(health_pb2.HealthCheckRequest(service="nobody")))
    assert error.code == "NOT_FOUND"
    watch = health_of(s.channel).Watch(health_pb2.HealthCheckRequest(service="nobody"))
    assert (await watch.read()).status == UNKNOWN


async def test_watchers_get_changes_after_others_hang_up(tmp_path: Path) -> None:
    """The servicer of grpcio-health-checking drops the other watchers when a watcher hangs up."""

    async with serving(tmp_path, joined=False) as s:
        watchers = [health_of(s.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE)) for _ in range(3)]
        for watch in watchers:
            assert (await watch.read()).status == NOT_SERVING
        watchers[0].cancel()
        s.engine.join()
        for watch in watchers[1:]:
            assert (await watch.read()).status == SERVING
        s.server.health.close()
        s.server.set_worker(s.engine.worker_status)  # a worker that joins now changes nothing
        for watch in watchers[1:]:
            assert (await watch.read()).status == NOT_SERVING
            assert await watch.read() is grpc.aio.EOF
            assert await watch.code() is grpc.StatusCode.OK


async def test_watchers_of_one_connection_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When one connection uses all its watches, another connection of the same address still gets some."""
    monkeypatch.setattr(health_service, "MAX_WATCHERS_PER_CONNECTION", 2)
    monkeypatch.setattr(health_service, "MAX_WATCHERS", 3)

    async with serving(tmp_path, listen="127.0.0.1:0", health_listen="127.0.0.1:0") as s:
        own = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(s.server.address, options=own) for _ in range(2)]
        probe = grpc.aio.insecure_channel(s.server.health_address)

        async def watch(channel: Any) -> Any:
            call = health_of(channel).Watch(health_pb2.HealthCheckRequest())
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert (await call.read()).status == SERVING
                return call
            return (await call.code()).name

        calls = [await watch(channels[0]) for _ in range(2)]
        assert await watch(channels[0]) == "RESOURCE_EXHAUSTED", "of one connection"
        calls.append(await watch(channels[1]))
        assert await watch(channels[1]) == "RESOURCE_EXHAUSTED", "of the address"
        calls.append(await watch(probe))
        assert not any(isinstance(call, str) for call in calls)
        calls[0].cancel()
        async with asyncio.timeout(BOUND_SECONDS):
            while isinstance(await watch(channels[1]), str):
                pass
        for channel in (*channels, probe):
            await channel.close()


async def test_clients_of_a_unix_socket_have_the_limit_of_the_address(
    s: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them have one peer name."""
    monkeypatch.setattr(health_service, "MAX_WATCHERS_PER_CONNECTION", 1)
    watches = [health_of(s.channel).Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
    assert [(await watch.read()).status for watch in watches] == [SERVING] * 2


async def test_health_listener_offers_health_only(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, health_listen="0.0.0.0:0") as s,
        grpc.aio.insecure_channel(s.server.health_address.replace("0.0.0.0", "127.0.0.1")) as probes,
    ):
        answer = await health_of(probes).Check(health_pb2.HealthCheckRequest())
        assert answer.status == SERVING
        stats = probes.unary_unary(f"/{SERVICE}/GetStats", request_serializer=bytes, response_deserializer=bytes)
        assert (await error_of(stats(b""))).code == "UNIMPLEMENTED"


async def test_a_port_in_use_is_not_shared(tmp_path: Path) -> None:
    async with serving(tmp_path, listen="127.0.0.1:0") as s:
        assert not s.server.address.endswith(":0")
        with pytest.raises(ConfigurationError, match="in use"):
            async with serving(tmp_path, listen=s.server.address):
                pass


async def test_stale_socket_is_replaced_but_not_a_used_socket(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        with pytest.raises(ConfigurationError, match="another server"):
            async with serving(tmp_path):
                pass
        s.engine.answer = lambda request: []
        await read_all(s.generate())
    (tmp_path / "s").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "s"))
    async with serving(tmp_path) as s:
        s.engine.answer = lambda request: []
        await read_all(s.generate())


@pytest.mark.parametrize("occupant", ["file", "directory"])
async def test_file_that_is_no_socket_stays(tmp_path: Path, occupant: str) -> None:
    if occupant == "file":
        (tmp_path / "s").write_text("precious")
    else:
        (tmp_path / "s").mkdir()

    with pytest.raises(ConfigurationError, match="is not a socket"):
        async with serving(tmp_path):
            pass
    assert (tmp_path / "s").exists()


async def test_message_over_the_limit_is_rejected_by_grpc(tmp_path: Path) -> None:
    async with serving(tmp_path, max_message_bytes=8192) as s:
        error = await error_of(s.generate(text_request("x" * 20_000)))  # from twice the limit on
        assert error.code == "RESOURCE_EXHAUSTED"
        assert error.reason != "REQUEST_TOO_LARGE"
        assert s.engine.submitted == []


async def test_drain_completes_or_interrupts_requests(s: Serving) -> None:
    """Two requests finish in time, one does not, one is queued; a watcher does not delay the drain."""
    watch = health_of(s.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await watch.read()).status == SERVING
    calls = [s.generate(text_request(request_id=f"r{n}")) for n in range(4)]
    await s.engine.next_request(4)
    keys = {r.request_id.partition("~")[0]: r.request_id for r in s.engine.submitted}
    ids = TOKENIZER.encode_sealed("Hello, how")
    for name in ("r0", "r1", "r2"):
        s.engine.start(keys[name])
        s.engine.tokens(keys[name], ids[:2])
    drain = asyncio.create_task(s.manager.drain(timeout_seconds=2.0))
    s.server.health.close()
    await until(lambda: s.engine.is_draining)
    assert (await error_of(s.generate())).reason == "SERVER_DRAINING"
    assert (await watch.read()).status == NOT_SERVING
    for name in ("r0", "r1"):
        s.engine.tokens(keys[name], ids[2:])
        s.engine.finish_by(keys[name], FinishReason.LENGTH)
    for call in calls[:2]:
        assert tokens_of(await read_all(call)) == ids
    assert not drain.done()
    for call, sent in ((calls[2], "2"), (calls[3], "0")):
        error = await error_of(call)
        assert (error.code, error.reason) == ("UNAVAILABLE", "SHUTDOWN_INTERRUPTED")
        assert error.metadata["next_index"] == sent
        assert 0 <= int(error.metadata["seed"]) < 2**64
    await drain
    await s.idle()
    assert sorted(s.engine.cancelled) == sorted([keys["r2"], keys["r3"]])
    async with asyncio.timeout(BOUND_SECONDS):  # less than the grace period: no call remains
        await s.server.stop(2 * BOUND_SECONDS)


async def test_last_status_arrives_before_an_immediate_stop(s: Serving) -> None:
    call, key = await s.start_call()
    s.engine.finish_by(key, FinishReason.LENGTH)
    await s.manager.drain(timeout_seconds=5.0)
    await s.server.stop(2.0)
    assert (await read_all(call))[-1].finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert await call.code() is grpc.StatusCode.OK
