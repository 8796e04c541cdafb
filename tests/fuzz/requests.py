"""Damaged requests against the whole service: nothing but their own status comes of them, and canaries answer exactly.

    cd tests && python -m fuzz.requests --count 100000 --seed 1
    cd tests && python -m fuzz.requests --cancels 20000

A real scheduler process with a toy worker. Calls are those of `calls`: bytes of every method, cut, flipped, spliced
and grown, and well-formed messages that say odd things, with odd metadata and deadlines. A call that hangs is a
failure, and so is a deadline or a cancellation that the call itself does not explain. One in a hundred is a canary, a
good request whose answer is known. With --cancels calls are opened and given up at once instead, while a canary in a
process of its own times its tokens against a quiet time before: p99 at most three times that, few tokens made for
nobody, nothing held afterwards, and the memory that of before.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from campaigns.growth import Sample, look
from fuzz.calls import Call, Calls
from fuzz.canary import TOKENS, singing
from support.time_limits import SOON_SECONDS
from support.toy_service import ToyService, answer, toy_service

from lineclear.client import AsyncClient
from lineclear.errors import LineclearError
from lineclear.grpc_status import from_status
from lineclear.v1 import inference_pb2 as pb

SERVICE = "/lineclear.v1.InferenceService/"
_AT_ONCE = 32
_CANARY_EVERY = 100
HANG_SECONDS = SOON_SECONDS
"""A call that has neither a message nor a status after so long hangs."""
_CANARY_TOKENS = 12
_TIMES_QUIET = 3.0
_MOST_GROWN_BYTES = 8 * 2**20
_MOST_GROWN_MEANWHILE = Sample(0, private_bytes=64 * 2**20, threads=8, descriptors=50)
_MOST_TOKENS_GIVEN_UP = 60
"""Tokens made for a call that was given up, on average. A third have begun; one that nobody cancels gets 400."""
_SETTLE_SECONDS = 10.0
_BAD_CODES = {grpc.StatusCode.INTERNAL.value[0], grpc.StatusCode.UNKNOWN.value[0], grpc.StatusCode.DATA_LOSS.value[0]}


@dataclass
class Outcome:
    """What became of a campaign. `wrong` names what must not happen."""

    statuses: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    grown: Sample = field(default_factory=lambda: Sample(0, 0, 0, 0))
    """What the last three quarters of the calls added to the scheduler."""
    canaries: int = 0
    wrong: list[str] = field(default_factory=list)


async def damaged(service: ToyService, count: int, seed: int) -> Outcome:
    """Make so many calls, and look what becomes of them, of the canaries and of the process."""
    outcome, calls = Outcome(), Calls(seed)
    numbers = iter(range(count))
    before: Sample | None = None
    async with grpc.aio.insecure_channel(service.target) as channel, AsyncClient(service.target) as client:

        async def work() -> None:
            nonlocal before
            for number in numbers:
                if number == count // 4:
                    before = look(service.pid, number)
                if number % _CANARY_EVERY == 0:
                    await _canary(client, number, outcome)
                call = calls.next()
                status = await _send(channel, call)
                outcome.statuses[status] += 1
                outcome.methods[call.method] += 1
                if not call.may_end_with(status):
                    hexed = [message.hex() for message in call.messages]
                    outcome.wrong.append(f"{status} of {call.method}, seed {seed}, number {number}: {hexed}, {call}")

        await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    assert before is not None
    outcome.grown = _grown(before, look(service.pid, count))
    for name in ("private_bytes", "threads", "descriptors"):
        if getattr(outcome.grown, name) > getattr(_MOST_GROWN_MEANWHILE, name):
            outcome.wrong.append(f"{name} grew by {getattr(outcome.grown, name)} in {outcome.grown.requests} calls")
    return outcome


def incidents(log: Path) -> list[str]:
    """Return the lines about bugs of the server. A request, however odd, and a caller who is gone are none."""
    return [line for line in log.read_text().splitlines() if '"event": "incident"' in line or "loop_error" in line]


def _grown(before: Sample, after: Sample) -> Sample:
    return Sample(
        after.requests - before.requests,
        after.private_bytes - before.private_bytes,
        after.threads - before.threads,
        after.descriptors - before.descriptors,
    )


async def _send(channel: grpc.aio.Channel, call: Call) -> str:
    """The status of the call; OK once what was to be read has come; HANG if nothing comes at all.

    A Failure inside a session that only a bug of the server explains counts as the status of the call.
    """
    # As an iterator: what gRPC raises at a write to a call that is over already is then its own business.
    made = channel.stream_stream(SERVICE + call.method)(
        list(call.messages), metadata=call.metadata, timeout=call.deadline_seconds
    )
    try:
        for _ in range(call.reads):
            async with asyncio.timeout(HANG_SECONDS):
                data = await made.read()
            if data is grpc.aio.EOF:
                break
            if call.method == "Session" and (failure := _bug_in(data)):
                return failure
        else:
            return "OK"
        async with asyncio.timeout(HANG_SECONDS):
            code: grpc.StatusCode = await made.code()
    except TimeoutError:
        return "HANG"
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        code = await made.code()
    finally:
        made.cancel()
    is_refused_write = code is grpc.StatusCode.INTERNAL and "from Core" in (await made.details() or "")
    # A write to a call that was refused meanwhile: gRPC's own word for it.
    return "OK" if is_refused_write else code.name


def _bug_in(data: bytes) -> str:
    """The reason of a Failure that no request can be the cause of; empty if there is none."""
    errors = [event.error for event in pb.SessionResponse.FromString(data).events if event.HasField("error")]
    return next((from_status(error).reason for error in errors if error.code in _BAD_CODES), "")


async def _canary(client: AsyncClient, number: int, outcome: Outcome) -> None:
    prompt = [5 + number % 400, 6, 7]
    try:
        result = await client.generate(
            prompt, seed=number, max_tokens=_CANARY_TOKENS, ignore_eos=True, timeout_seconds=HANG_SECONDS
        )
    except LineclearError as error:
        outcome.wrong.append(f"canary {number} got {error.reason}")
        return
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
    tokens: int
    """Made for them, all together. A call that is given up and not cancelled gets 400."""

    @property
    def is_harmless(self) -> bool:
        """Nothing stays, little was computed, and an answer beside them goes on about as it did."""
        small = self.grown_bytes <= _MOST_GROWN_BYTES
        return small and self.held == 0 and self.is_cancelled and self.meanwhile <= _TIMES_QUIET * self.quiet

    @property
    def is_cancelled(self) -> bool:
        """The server stopped computing for callers that had gone."""
        return self.tokens <= _MOST_TOKENS_GIVEN_UP * self.count


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
                if number % 3 == 0:
                    await call.read()  # it has a place in the batch
                elif number % 3 == 1:
                    await asyncio.sleep(0)
                call.cancel()
                if number % 50 == 0:
                    await asyncio.sleep(0.001)

        async def all_of(numbers: Iterator[int]) -> None:
            await asyncio.gather(*(give_up(numbers) for _ in range(_AT_ONCE)))
            await _settled(client, most=1)  # the canary's

        made = (await client.stats()).totals.output_tokens
        async with singing(service.target) as meanwhile:
            begin = time.monotonic()
            await all_of(iter(range(count // 10)))
            before = look(service.pid, 0).private_bytes
            await all_of(iter(range(count // 10, count)))
            seconds = time.monotonic() - begin
        held = await _settled(client, most=0)
        grown = look(service.pid, 0).private_bytes - before
        sung = len(meanwhile) * TOKENS // (TOKENS - 1)  # a gap less than tokens in each of the canary's answers
        made = (await client.stats()).totals.output_tokens - made - sung
        return GivenUp(count, seconds, _p99(quiet), _p99(meanwhile), grown, held, made)


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
    with (
        tempfile.TemporaryDirectory() as folder,
        toy_service(Path(folder), log=Path(folder, "log"), **steps) as service,
    ):
        if options.cancels:
            found = asyncio.run(opened_and_given_up(service, options.cancels))
            print(
                f"{found.count} calls given up in {found.seconds:.1f} s; p99 of a gap {found.quiet:.4f} s before and "
                f"{found.meanwhile:.4f} s meanwhile; {found.grown_bytes / 2**20:.1f} MiB grown, {found.held} held, "
                f"{found.tokens} tokens for nobody"
            )
            return 0 if found.is_harmless and service.leave() == 0 else 1
        outcome = asyncio.run(damaged(service, options.count, options.seed))
        alive = service.leave() == 0
        outcome.wrong += incidents(Path(folder, "log"))
    for line in outcome.wrong[:20]:
        print(line)
    print(
        f"{outcome.grown.private_bytes / 2**20:.1f} MiB, {outcome.grown.threads} threads and "
        f"{outcome.grown.descriptors} descriptors more; {options.count} requests, {outcome.canaries} canaries, "
        f"{len(outcome.wrong)} wrong, {dict(outcome.statuses)}"
    )
    return 1 if outcome.wrong or not alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
