"""Damaged requests against the whole service: nothing but their own status comes of them, and canaries answer exactly.

    cd tests && python -m fuzz.requests --count 100000 --seed 1
    cd tests && python -m fuzz.requests --cancels 20000

A real scheduler process with a toy worker. Requests are bytes: good and bad ones of every method, cut, flipped, spliced
and grown. One in a hundred is a canary, a good request whose answer is known. With --cancels calls are opened and given
up at once instead, while a canary in a process of its own times its tokens against a quiet time before: p99 at most
three times that, nothing held afterwards, and the memory that of before.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from campaigns.growth import look
from fuzz.canary import singing
from google.protobuf.message import Message
from service.bad_requests import CASES
from support.mutation import mutate
from support.toy_service import ToyService, answer, toy_service

from lineclear.client import AsyncClient
from lineclear.fingerprint import prompt_digest
from lineclear.v1 import inference_pb2 as pb

SERVICE = "/lineclear.v1.InferenceService/"
ALLOWED = {
    "OK",
    "INVALID_ARGUMENT",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ALREADY_EXISTS",
    "NOT_FOUND",
    "ABORTED",  # a fingerprint or a digest that was damaged
    "DEADLINE_EXCEEDED",
    "CANCELLED",
}
_AT_ONCE = 32
_CANARY_EVERY = 100
_CALL_SECONDS = 5.0
_CANARY_TOKENS = 12
_TIMES_QUIET = 3.0
_MOST_GROWN_BYTES = 8 * 2**20
_SETTLE_SECONDS = 10.0


@dataclass
class Outcome:
    """What became of a campaign. `wrong` names what must not happen."""

    statuses: Counter[str] = field(default_factory=Counter)
    canaries: int = 0
    wrong: list[str] = field(default_factory=list)


def seeds() -> list[tuple[str, bytes]]:
    """(method, bytes) to begin with."""
    good = pb.GenerateRequest(
        request_id="fuzz",
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        sampling={"temperature": 0.5, "seed": 3, "max_tokens": 4, "top_k": 9, "logit_bias": [{"token_id": 5}]},
        stop={"strings": ["a", "bc"], "token_ids": [9]},
        output={"logprobs": True, "top_logprobs": 2},
        resume={"token_ids": [5], "model_fingerprint": "toy", "prompt_digest": prompt_digest([5, 6, 7])},
    )
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    generate: list[pb.GenerateRequest] = [good, pb.GenerateRequest(text="quick"), pb.GenerateRequest(chat=chat)]
    generate += [case.request for case in CASES if len(case.request.SerializeToString()) < 4096]
    found: list[tuple[str, Message]] = [("Generate", request) for request in generate]
    found += [
        ("Session", pb.SessionRequest(submit=pb.SessionSubmit(handle=1, request=request))) for request in generate
    ]
    found += [("Submit", pb.SubmitRequest(request=request)) for request in generate[:3]]
    found += [
        ("Session", pb.SessionRequest(cancel=pb.SessionCancel(handle=1))),
        ("Session", pb.SessionRequest(submits=[pb.SessionSubmit(handle=n) for n in (1, 2)])),
        ("Session", pb.SessionRequest(cancels=[pb.SessionCancel(handle=n) for n in (1, 2)])),
        ("Tokenize", pb.TokenizeRequest(text="some text")),
        ("Tokenize", pb.TokenizeRequest(chat=chat)),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[5, 6, 7])),
        ("Attach", pb.AttachRequest(request_id="fuzz", from_index=1)),
        ("GetResult", pb.GetResultRequest(request_id="fuzz")),
        ("Cancel", pb.CancelRequest(request_id="fuzz")),
    ]
    return [(method, message.SerializeToString()) for method, message in found]


async def damaged(service: ToyService, count: int, seed: int) -> Outcome:
    """Send so many, and look what becomes of them, of the canaries and of the process."""
    outcome, corpus, dice = Outcome(), seeds(), random.Random(seed)
    others = [data for _, data in corpus]
    numbers = iter(range(count))
    async with grpc.aio.insecure_channel(service.target) as channel, AsyncClient(service.target) as client:

        async def work() -> None:
            for number in numbers:
                if number % _CANARY_EVERY == 0:
                    await _canary(client, number, outcome)
                method, data = dice.choice(corpus)
                data = mutate(data, dice, others)
                status = await _send(channel, method, data)
                outcome.statuses[status] += 1
                if status not in ALLOWED:
                    outcome.wrong.append(f"{status} of {method}, seed {seed}, number {number}: {data.hex()}")

        await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    return outcome


async def _send(channel: grpc.aio.Channel, method: str, data: bytes) -> str:
    """The status of the call, or OK once something good came; the rest is not waited for."""
    # As an iterator: what gRPC raises at a write to a call that is over already is then its own business.
    call = channel.stream_stream(SERVICE + method)([data], timeout=_CALL_SECONDS)
    try:
        if await call.read() is not grpc.aio.EOF:
            return "OK"
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    finally:
        call.cancel()
    code: grpc.StatusCode = await call.code()
    # A write to a call that was refused meanwhile: gRPC's own word for it.
    return (
        "CANCELLED" if code is grpc.StatusCode.INTERNAL and "from Core" in (await call.details() or "") else code.name
    )


async def _canary(client: AsyncClient, number: int, outcome: Outcome) -> None:
    prompt = [5 + number % 400, 6, 7]
    result = await client.generate(prompt, seed=number, max_tokens=_CANARY_TOKENS, ignore_eos=True)
    outcome.canaries += 1
    if list(result.token_ids) != answer(prompt, _CANARY_TOKENS, seed=number):
        outcome.wrong.append(f"canary {number} answered something else")


@dataclass(frozen=True)
class GivenUp:
    """What calls that were opened and given up did to everybody else."""

    count: int
    seconds: float
    quiet: float
    """p99 of the gaps of an answer before."""
    meanwhile: float
    """The same while it happened."""
    grown_bytes: int
    """Private memory of the scheduler, from after a tenth of them to after all."""
    held: int
    """Requests the scheduler still had when they were over."""

    @property
    def is_harmless(self) -> bool:
        """Nothing stays, and an answer beside them goes on about as it did."""
        small = self.grown_bytes <= _MOST_GROWN_BYTES
        return small and self.held == 0 and self.meanwhile <= _TIMES_QUIET * self.quiet


async def opened_and_given_up(service: ToyService, count: int, quiet_seconds: float = 4.0) -> GivenUp:
    """Open so many calls and give each up at once, or a moment later."""
    async with grpc.aio.insecure_channel(service.target) as channel, AsyncClient(service.target) as client:
        async with singing(service.target) as quiet:
            await asyncio.sleep(quiet_seconds)
        generate = channel.unary_stream(SERVICE + "Generate")
        data = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling={"max_tokens": 400}).SerializeToString()

        async def give_up(numbers: Iterator[int]) -> None:
            for number in numbers:
                call = generate(data)
                if number % 2:
                    await asyncio.sleep(0)
                call.cancel()
                if number % 50 == 0:
                    await asyncio.sleep(0.001)

        async def all_of(numbers: Iterator[int]) -> None:
            await asyncio.gather(*(give_up(numbers) for _ in range(_AT_ONCE)))
            await _settled(client, most=1)  # the canary's

        async with singing(service.target) as meanwhile:
            begin = time.monotonic()
            await all_of(iter(range(count // 10)))
            before = look(service.pid, 0).private_bytes
            await all_of(iter(range(count // 10, count)))
            seconds = time.monotonic() - begin
        held = await _settled(client, most=0)
        grown = look(service.pid, 0).private_bytes - before
        return GivenUp(count, seconds, _p99(quiet), _p99(meanwhile), grown, held)


async def _settled(client: AsyncClient, most: int) -> int:
    """How many requests there are, once there are at most so many, or after a while."""
    end = time.monotonic() + _SETTLE_SECONDS
    while True:
        gauges = (await client.stats()).gauges
        held = gauges.requests_running + gauges.requests_waiting
        if held <= most or time.monotonic() > end:
            return held
        await asyncio.sleep(0.01)


def _p99(gaps: Sequence[float]) -> float:
    return sorted(gaps)[int(len(gaps) * 0.99)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 when something happened that must not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cancels", type=int, default=0, help="open and give up so many calls instead")
    options = parser.parse_args(arguments)
    steps = {"min_step_seconds": 0.005, "max_step_seconds": 0.005} if options.cancels else {}
    with tempfile.TemporaryDirectory() as folder, toy_service(Path(folder), **steps) as service:
        if options.cancels:
            found = asyncio.run(opened_and_given_up(service, options.cancels))
            print(
                f"{found.count} calls given up in {found.seconds:.1f} s; p99 of a gap {found.quiet:.4f} s before and "
                f"{found.meanwhile:.4f} s meanwhile; {found.grown_bytes / 2**20:.1f} MiB grown, {found.held} held"
            )
            return 0 if found.is_harmless and service.leave() == 0 else 1
        outcome = asyncio.run(damaged(service, options.count, options.seed))
        alive = service.leave() == 0
    for line in outcome.wrong[:20]:
        print(line)
    print(
        f"{options.count} requests, {outcome.canaries} canaries, {len(outcome.wrong)} wrong, {dict(outcome.statuses)}"
    )
    return 1 if outcome.wrong or not alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
