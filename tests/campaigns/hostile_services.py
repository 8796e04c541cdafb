"""Hostile callers of statistics, health, idle sessions, metrics and the status page, and two kinds to compare with."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import time

import grpc
import grpc.aio
from campaigns.hostile_target import Target, counted, in_threads, kind, served
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc

_STREAMS = 31  # of each of two processes; with the canary, as many as run at a time by default


@kind
def busy_neighbours(target: Target) -> int:
    """Call nothing and keep the processors busy: what any kind costs a server on the same machine."""
    count = 0
    while not target.is_over:
        hashlib.sha256(bytes(1 << 16)).digest()
        count += 1
    return count


@kind
async def ordinary_streams(target: Target) -> int:
    """Read ordinary answers, as many at a time as other kinds have requests in flight."""
    count = 0
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]), sampling={"max_tokens": 100, "ignore_eos": True})
    async with target.channel(aio=True) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def read() -> None:
            nonlocal count
            while not target.is_over:
                with counted():
                    async for _ in stub.Generate(request):
                        pass
                count += 1

        await asyncio.gather(*(read() for _ in range(_STREAMS)))
    return count


@served
def stats_flood(target: Target) -> int:
    return in_threads(target, lambda stub: (stub.GetStats(pb.GetStatsRequest()), stub.GetModel(pb.GetModelRequest())))


@kind
async def watch_flood(target: Target) -> int:
    """Open and hold health watches at both ports."""
    count = 0

    async def watch(port: int) -> None:
        nonlocal count
        while not target.is_over:
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                calls = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(200)]
                count += len(calls)
                for call in calls:
                    with contextlib.suppress(grpc.RpcError, TimeoutError):
                        await asyncio.wait_for(call.read(), 1)
                    if target.is_over:
                        break

    await asyncio.gather(*(watch(port) for port in (target.data, target.health) for _ in range(2)))
    return count


@kind
async def idle_sessions(target: Target) -> int:
    opened = 0
    channels = [target.channel(aio=True) for _ in range(8)]
    calls = []
    for number in range(8 * 100):
        call = inference_pb2_grpc.InferenceServiceStub(channels[number % 8]).Session()
        calls.append(call)
        with contextlib.suppress(grpc.RpcError, TimeoutError):
            await asyncio.wait_for(call.initial_metadata(), 1)
            opened += 1
        if target.is_over:
            break
    await asyncio.sleep(max(0.0, target.end - time.monotonic()))
    for channel in channels:
        await channel.close()
    return opened


@kind
def slow_scrapers(target: Target) -> int:
    """Open many connections to the metrics port that send one byte at a time."""
    held: list[socket.socket] = []
    count = 0
    while not target.is_over:
        with contextlib.suppress(OSError):  # until it refuses
            while len(held) < 100:
                held.append(socket.create_connection(("127.0.0.1", target.metrics), 0.2))
                count += 1
        for connection in list(held):
            try:
                connection.setblocking(False)
                connection.send(b"GET /metrics HTTP/1.1\r\nX-A: a"[count % 20 :][:1])
            except OSError:
                held.remove(connection)
                connection.close()
        time.sleep(0.2)
    return count


@kind
def unread_status_streams(target: Target) -> int:
    """Open streams of the status page and never read them. Count those that the server accepts."""
    held: list[socket.socket] = []
    count = 0
    while not (count and target.is_over):
        with contextlib.suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", target.status), 5)
            connection.sendall(b"GET /status/steps HTTP/1.1\r\nHost: localhost\r\n\r\n")
            held.append(connection)
            count += 1
        time.sleep(0.02)
        if len(held) > 400:
            held.pop(0).close()
    return count
