"""Measures the CPU time of the scheduler for a short answer, over one Session and over Generate calls.

    python -m bench.micro_short --model demo/model

The prompt has three tokens and the answer one, so nearly all time is that of admission, queue, end and log line. By
default the worker computes nothing; `--worker real` loads the model. Messages are read without the client library.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc.aio

from bench.figures import Figure, arguments, main
from bench.lineclear_serve import serving
from bench.measure import median, process_seconds
from lineclear.v1 import inference_pb2 as pb

_SERVICE = "/lineclear.v1.InferenceService/"
IN_FLIGHT = (4, 64)
_REQUESTS, _ROUNDS = 2000, 3
_SESSION_GOAL_MICROSECONDS = 800.0
_numbers = itertools.count()


def request() -> pb.GenerateRequest:
    """Return a request whose prompt no other has."""
    number = next(_numbers)
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5 + number % 200, 5 + number // 200 % 200, 7]))
    message.sampling.max_tokens, message.sampling.ignore_eos, message.output.omit_text = 1, True, True
    return message


async def by_session(channel: grpc.aio.Channel, count: int, in_flight: int) -> None:
    """Run `count` requests over one Session, at most `in_flight` at the same time."""
    make = channel.stream_stream(
        f"{_SERVICE}Session", pb.SessionRequest.SerializeToString, pb.SessionResponse.FromString
    )
    call, sent, ended = make(), 0, 0
    while ended < count:
        if sent < count and sent - ended <= in_flight // 2:
            batch = min(in_flight // 2, count - sent)
            submits = [pb.SubmitCommand(handle=sent + index, request=request()) for index in range(batch)]
            await call.write(pb.SessionRequest(submits=submits))
            sent += batch
            continue
        message = await call.read()
        assert isinstance(message, pb.SessionResponse), "the session has ended"
        ended += sum(event.response.HasField("finished") for event in message.events)
        assert not any(event.HasField("error") for event in message.events)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def by_generate(channel: grpc.aio.Channel, count: int, in_flight: int) -> None:
    """Run `count` calls, `in_flight` at the same time."""
    make: grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, bytes] = channel.unary_stream(
        f"{_SERVICE}Generate", pb.GenerateRequest.SerializeToString, None
    )

    async def some() -> None:
        for _ in range(count // in_flight):
            call = make(request())
            while await call.read() is not grpc.aio.EOF:
                pass

    await asyncio.gather(*(some() for _ in range(in_flight)))


async def measure(model: str, way: str, worker: str, in_flight: int, count: int, rounds: int) -> list[Figure]:
    """Run `rounds` times `count` requests against a new service that logs a line for each."""
    flags = ["--max-batch-size", "64", "--log-level", "info"]
    if worker == "instant":
        flags.append(f"--worker-command={sys.executable} -m bench.instant")
    run = by_session if way == "session" else by_generate
    walls, cpus = [], []
    with _discarded_log():
        async with serving(model, flags) as service, grpc.aio.insecure_channel(service.client.target) as channel:
            await run(channel, count // 4, in_flight)
            for _ in range(rounds):
                cpu, begin = process_seconds([service.pid]), time.perf_counter()
                await run(channel, count, in_flight)
                walls.append(time.perf_counter() - begin)
                cpus.append(process_seconds([service.pid]) - cpu)
    case = f"{way}, {in_flight} at once, {worker} worker"
    goal = _SESSION_GOAL_MICROSECONDS if way == "session" else None
    return [
        Figure("short: CPU", case, median(cpus) / count * 1e6, "us an answer", goal),
        Figure("short: time", f"{case}, {count} answers", median(walls), "s"),
    ]


@contextlib.contextmanager
def _discarded_log() -> Iterator[None]:
    """Send the standard error of new processes to /dev/null."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure each way."""
    for way in options.ways:
        for in_flight in options.in_flight:
            size = in_flight, options.answers, options.rounds
            yield from asyncio.run(measure(str(options.model), way, options.worker, *size))


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, required=True, help="whose tokenizer the service loads")
    found.add_argument("--ways", nargs="+", choices=("generate", "session"), default=["session", "generate"])
    found.add_argument("--worker", choices=("instant", "real"), default="instant")
    found.add_argument("--in-flight", type=int, nargs="+", default=list(IN_FLIGHT))
    found.add_argument("--answers", type=int, default=_REQUESTS)
    found.add_argument("--rounds", type=int, default=_ROUNDS)
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
