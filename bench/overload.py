"""Measures overload: goodput, refusal times and memory above capacity, and the cost of unread streams.

    python -m bench.overload --model demo/model [--seconds 60] [--times 10] [--reading-seconds 30]

The real scheduler process with a worker of fixed step time, so that the capacity is known. Open loop: requests arrive
at their own times, without retries. First at capacity, then at `--times` as much, beside a prober process whose
refusals do not wait for the load generator. Memory is sampled throughout. Then streams that are never read run beside
streams that are. The unread ones are read at the end and must be complete.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import grpc.aio

from bench.figures import Figure, arguments, main
from bench.instant import TOKEN
from bench.lineclear_serve import Service, serving
from bench.measure import percentile
from bench.prober import probing
from lineclear.client import AsyncClient
from lineclear.errors import LineclearError
from lineclear.v1 import inference_pb2 as pb

_SLOTS, _TOKENS, _STEP_SECONDS = 32, 32, 0.05  # so slow that one process can offer many times the capacity
_QUEUE = 64
_CAPACITY = _SLOTS / (_TOKENS * _STEP_SECONDS)  # requests a second, by step time alone
_REJECT_GOAL_SECONDS = 0.02
_GOODPUT_GOAL = 0.9
_OFFERED_GOAL = 0.95  # offered share of the planned load; below, the load generator is the bottleneck
_GROWN_GOAL_MIB = 4.0
_SLOW_READERS, _FAST_READERS = 200, 8
_SLOW_TOKENS = 4000
_SLOW_GOAL_KIB = 64.0
_CADENCE_GOAL = 1.1
_READING_SECONDS = 30.0  # 600 steps: of fewer, the 99th percentile is one or two unlucky ones
_LOOK_SECONDS = 0.25
_UNREAD_SECONDS = 300.0  # until all their tokens are generated

_Generate: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateResponse]"
_Answer: TypeAlias = "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"


@dataclass
class Seen:
    """Outcomes of the requests of one load."""

    answered: int = 0
    offered_per_second: float = 0.0
    seconds: float = 0.0
    """Seconds until the last request ended."""
    refused_seconds: list[float] = field(default_factory=list)
    other: list[str] = field(default_factory=list)


def rss_bytes(pid: int) -> int:
    """Return the private memory of a process: anonymous resident pages and swap."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return sum(int(fields.get(name, "0 kB").split()[0]) for name in ("RssAnon", "VmSwap")) * 1024


async def load(client: AsyncClient, rate: float, seconds: float, seed: int) -> Seen:
    """Send requests with Poisson arrivals at `rate` per second."""
    seen, dice, tasks = Seen(), random.Random(seed), set[asyncio.Task[None]]()

    async def one(number: int) -> None:
        begin = time.monotonic()
        try:
            result = await client.generate((5 + number % 90, 6), max_tokens=_TOKENS, ignore_eos=True, temperature=0.0)
            if result.token_ids == (TOKEN,) * _TOKENS:
                seen.answered += 1
            else:
                seen.other.append("ALTERED")
        except LineclearError as error:
            if error.reason == "QUEUE_FULL":
                seen.refused_seconds.append(time.monotonic() - begin)
            else:
                seen.other.append(error.reason)

    begin, due, number = time.monotonic(), 0.0, 0
    while due < seconds:
        await asyncio.sleep(max(0.0, begin + due - time.monotonic()))
        task = asyncio.ensure_future(one(number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        due, number = due + dice.expovariate(rate), number + 1
    seen.offered_per_second = number / (time.monotonic() - begin)
    await asyncio.gather(*tasks)
    seen.seconds = time.monotonic() - begin
    return seen


@contextlib.asynccontextmanager
async def watched(pid: int) -> AsyncIterator[list[int]]:
    """Sample the memory of a process during the block."""
    found: list[int] = []

    async def look() -> None:
        while True:
            found.append(rss_bytes(pid))
            await asyncio.sleep(_LOOK_SECONDS)

    looking = asyncio.ensure_future(look())
    try:
        yield found
    finally:
        looking.cancel()


async def overload(model: str, seconds: float, times: float) -> list[Figure]:
    """Measure at capacity and at `times` the capacity."""
    async with _service(model) as service:
        base = await load(service.client, _CAPACITY, seconds, seed=1)
        async with probing(service.client.target) as rejects, watched(service.pid) as memory:
            over = await load(service.client, times * _CAPACITY, seconds, seed=2)
    goodput = (over.answered / over.seconds) / (max(1, base.answered) / base.seconds)
    half = len(memory) // 2
    grown = max(memory[half:]) - max(memory[:half])
    case = f"{times:g}x for {seconds:g} s"
    return [
        Figure("overload: answered at capacity", "1x", base.answered / base.seconds, "requests/s"),
        Figure(
            "overload: offered against what was to be",
            case,
            over.offered_per_second / (times * _CAPACITY),
            "",
            _OFFERED_GOAL,
            True,
        ),
        Figure("overload: answered", case, over.answered / over.seconds, "requests/s"),
        Figure("overload: goodput against 1x", case, goodput, "", _GOODPUT_GOAL, True),
        Figure("overload: refused", case, float(len(over.refused_seconds)), "requests"),
        *refusal_figures(case, rejects),
        Figure("overload: ended otherwise", case, float(len(over.other) + len(base.other)), "requests", 0.0),
        Figure("overload: peak of the second half over that of the first", case, grown / 2**20, "MiB", _GROWN_GOAL_MIB),
    ]


def refusal_figures(case: str, seconds: Sequence[float]) -> list[Figure]:
    """Return the figures of the prober's refusals; None for times without a refusal."""
    return [
        Figure("overload: refusals the prober saw", case, float(len(seconds)), "requests"),
        Figure("overload: p50 of a refusal", case, percentile(seconds, 0.50), "s"),
        Figure("overload: p99 of a refusal", case, percentile(seconds, 0.99), "s", _REJECT_GOAL_SECONDS),
    ]


async def slow_readers(model: str, seconds: float) -> list[Figure]:
    """Measure unread streams beside streams that are read."""
    tokens = min(_SLOW_TOKENS, round(4 * seconds / _STEP_SECONDS))
    places = str(_SLOW_READERS + _FAST_READERS)
    async with _service(model, "--max-batch-size", places, "--max-queue-size", places) as service:
        quiet = await _cadence(service, seconds)
        before = rss_bytes(service.pid)
        async with grpc.aio.insecure_channel(
            service.client.target, options=[("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            generate: _Generate = channel.unary_stream(
                "/lineclear.v1.InferenceService/Generate",
                pb.GenerateRequest.SerializeToString,
                pb.GenerateResponse.FromString,
            )
            message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]))
            message.sampling.max_tokens, message.sampling.ignore_eos = tokens, True
            calls = [generate(message) for _ in range(_SLOW_READERS)]
            begun = await asyncio.gather(*(_begin(call) for call in calls))
            beside = await _cadence(service, seconds)
            async with asyncio.timeout(_UNREAD_SECONDS):
                while (await service.client.stats()).gauges.num_requests_running:  # noqa: ASYNC110  # asked of a process
                    await asyncio.sleep(_LOOK_SECONDS)
            held = rss_bytes(service.pid) - before
            late = [first + await _rest(call) for first, call in zip(begun, calls, strict=True)]
    case = f"{_SLOW_READERS} unread of {tokens} tokens, {_FAST_READERS} read for {seconds:g} s"
    return [
        Figure("slow readers: memory of each", case, held / _SLOW_READERS / 1024, "KiB", _SLOW_GOAL_KIB),
        Figure("slow readers: not whole when read at last", case, float(sum(n != tokens for n in late)), "", 0.0),
        *cadence_figures(case, quiet, beside),
    ]


def cadence_figures(case: str, alone: Sequence[float], beside: Sequence[float]) -> list[Figure]:
    """Return count, p99 and ratio of the gaps between messages, without and with slow readers."""
    first, second = percentile(alone, 0.99), percentile(beside, 0.99)
    ratio = second / first if first and second is not None else None
    return [
        Figure("slow readers: gaps of those who read, alone", case, float(len(alone)), "gaps"),
        Figure("slow readers: p99 between tokens of those who read, alone", case, first, "s"),
        Figure("slow readers: gaps of those who read, beside them", case, float(len(beside)), "gaps"),
        Figure("slow readers: p99 between tokens of those who read, beside them", case, second, "s"),
        Figure("slow readers: the second p99 against the first", case, ratio, "", _CADENCE_GOAL),
    ]


async def _begin(call: _Answer) -> int:
    """Return the tokens of the first message."""
    response = await call.read()
    assert isinstance(response, pb.GenerateResponse), "an answer that ended before it began"
    return len(response.token_ids)


async def _rest(call: _Answer) -> int:
    """Read the rest of a stream; return its tokens, or none if the server dropped it."""
    count = 0
    with contextlib.suppress(grpc.aio.AioRpcError):
        while isinstance(response := await call.read(), pb.GenerateResponse):
            count += len(response.token_ids)
    return count


async def _cadence(service: Service, seconds: float) -> list[float]:
    """Return the seconds between messages of the streams that are read."""
    gaps: list[float] = []
    tokens = math.ceil(seconds / _STEP_SECONDS) + 2

    async def read() -> None:
        times = []
        async with service.client.stream((7, 8), max_tokens=tokens, ignore_eos=True) as stream:
            async for _ in stream:
                times.append(time.monotonic())
                if times[-1] - times[0] > seconds:
                    break
        gaps.extend(b - a for a, b in pairwise(times))

    await asyncio.gather(*(read() for _ in range(_FAST_READERS)))
    return gaps


def _service(model: str, *flags: str) -> contextlib.AbstractAsyncContextManager[Service]:
    worker = [f"--worker-command={sys.executable} -m bench.instant"]
    common = ["--max-batch-size", str(_SLOTS), "--max-queue-size", str(_QUEUE), "--target-batch-tokens", "4096"]
    return serving(model, [*worker, *common, *flags], ["--step-seconds", str(_STEP_SECONDS)])


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure overload and unread streams."""
    yield from asyncio.run(overload(str(options.model), options.seconds, options.times))
    yield from asyncio.run(slow_readers(str(options.model), options.reading_seconds))


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, required=True, help="whose tokenizer the service loads")
    found.add_argument("--seconds", type=float, default=60.0)
    found.add_argument("--reading-seconds", type=float, default=_READING_SECONDS, help="of the streams that are read")
    found.add_argument("--times", type=float, default=10.0)
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
