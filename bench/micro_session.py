"""Compares many Generate calls with one Session of as many requests, with a worker that computes nothing.

    python -m bench.micro_session --model demo/model

CPU time of the real scheduler process alone. Answers include text and are read as raw messages, without the client
library.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc.aio

from bench.figures import Figure, arguments, main
from bench.lineclear_serve import Service, serving
from bench.measure import process_seconds, threads_seconds
from lineclear.v1 import inference_pb2 as pb

REQUESTS = (64, 256)
_TOKENS = 64 * 1024
_MOST_TOKENS = 1024
_GOAL_TOKENS_PER_CORE = 100_000.0


def request(tokens: int) -> pb.GenerateRequest:
    """Return a request for `tokens` tokens and their text."""
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]))
    message.sampling.temperature, message.sampling.max_tokens, message.sampling.ignore_eos = 0.0, tokens, True
    return message


async def by_generate(channel: grpc.aio.Channel, count: int, length: int) -> int:
    """Run `count` calls; return the number of messages."""

    async def one() -> int:
        generate: grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, bytes] = channel.unary_stream(
            "/lineclear.v1.InferenceService/Generate", pb.GenerateRequest.SerializeToString, None
        )
        call = generate(request(length))
        messages = 0
        while (await call.read()) is not grpc.aio.EOF:
            messages += 1
        return messages

    return sum(await asyncio.gather(*(one() for _ in range(count))))


async def by_session(channel: grpc.aio.Channel, count: int, length: int) -> int:
    """Run `count` requests of one session; return the number of messages. Every answer must complete."""
    call = channel.stream_stream(
        "/lineclear.v1.InferenceService/Session",
        pb.SessionRequest.SerializeToString,
        pb.SessionResponse.FromString,
    )()
    for handle in range(count):
        await call.write(pb.SessionRequest(submits=[pb.SubmitCommand(handle=handle, request=request(length))]))
    await call.done_writing()
    messages = finished = 0
    while isinstance(message := await call.read(), pb.SessionResponse):
        messages += 1
        finished += sum(event.response.HasField("finished") for event in message.events)
    assert finished == count
    return messages


async def measure(model: str, way: str, count: int, tokens: int) -> list[Figure]:
    """Run `count` concurrent requests with `tokens` in total, at most 1024 each."""
    python = [f"--worker-command={sys.executable} -m bench.instant"]
    flags = [*python, "--max-batch-size", str(count), "--target-batch-tokens", "4096"]
    length = min(_MOST_TOKENS, max(1, tokens // count))
    run = by_session if way == "session" else by_generate
    async with serving(model, flags) as service, grpc.aio.insecure_channel(service.client.target) as channel:
        await run(channel, count, 8)
        before, begin = _cpu(service), time.perf_counter()
        messages = await run(channel, count, length)
        seconds, after = time.perf_counter() - begin, _cpu(service)
    total, cpu = count * length, {name: after[name] - before[name] for name in after}
    case = f"{way}, {count} requests"
    goal = _GOAL_TOKENS_PER_CORE if way == "session" else None
    process = max(cpu.pop("process"), 1e-9)
    threads = [Figure(f"session: CPU of {name}", case, s / total * 1e6, "us a token") for name, s in cpu.items()]
    return [
        Figure("session: rate", case, total / seconds, "tokens/s"),
        Figure("session: tokens a message", case, total / messages, "tokens"),
        *threads,
        Figure("session: CPU", case, process / total * 1e6, "us a token"),
        Figure("session: tokens a core", case, total / process, "tokens/s", goal, True),
    ]


def _cpu(service: Service) -> dict[str, float]:
    """Return the CPU seconds of the process, of the engine thread and of the event loop thread (the first)."""
    threads = threads_seconds(service.pid)
    loop, engine = threads.get(service.pid, 0.0), max((s for t, s in threads.items() if t != service.pid), default=0.0)
    return {"process": process_seconds([service.pid]), "the event loop": loop, "the engine": engine}


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure both for every number of requests."""
    for count in options.requests:
        for way in options.ways:
            yield from asyncio.run(measure(str(options.model), way, count, options.tokens))


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, required=True, help="whose tokenizer the service loads")
    found.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS))
    found.add_argument("--ways", nargs="+", choices=("generate", "session"), default=["generate", "session"])
    found.add_argument("--tokens", type=int, default=_TOKENS)
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
