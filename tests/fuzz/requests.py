"""Damaged requests against the whole service: each call gets its own status, and canaries get exact answers.

cd tests && python -m fuzz.requests --count 100000 --seed 1
    cd tests && python -m fuzz.requests --cancels 20000

A real scheduler process with a toy worker. `calls` makes the calls: cut, flipped and spliced bytes of each method, and
valid messages with unusual values, metadata and deadlines. A hang is a failure, and so is a deadline or cancellation
that the call does not explain. One call in a hundred is a canary with a known answer.

With --cancels, calls are opened and cancelled at once, beside a canary process. Its p99 gap may be at most three times
that of a quiet time, few tokens may be computed for cancelled calls, and nothing may be held or leaked afterwards.
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
from campaigns.growth import look
from campaigns.pauses import quantiles
from fuzz.calls import Call, Calls
from fuzz.canary import TOKENS, Canary
from support.time_limits import SOON_SECONDS
from support.toy_service import ToyService, answer, toy_service

from lineclear.client import AsyncClient
from lineclear.errors import LineclearError
from lineclear.status_codec import from_status
from lineclear.v1 import inference_pb2 as pb

SERVICE = "/lineclear.v1.InferenceService/"
_CONCURRENCY = 32
_CANARY_EVERY = 100
HANG_SECONDS = SOON_SECONDS
"""A call without a message or status for this long hangs."""
_CANARY_TOKENS = 12
_MAX_TIMES_QUIET = 3.0
_MAX_GROWTH_BYTES = 8 * 2**20
_MAX_GROWTH = {"private_mib": 64, "threads": 8, "descriptors": 50}
_MAX_TOKENS_PER_CANCEL = 60
"""Mean tokens of a cancelled call. A third of them started; an uncancelled one gets 400."""
_SETTLE_SECONDS = 10.0
_BAD_CODES = {grpc.StatusCode.INTERNAL.value[0], grpc.StatusCode.UNKNOWN.value[0], grpc.StatusCode.DATA_LOSS.value[0]}


@dataclass
class Outcome:
    """Result of a run. `wrong` names the failures."""

    statuses: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    grown: dict[str, float] = field(default_factory=dict)
    """Growth of the scheduler during the last three quarters of the calls."""
    canaries: int = 0
    wrong: list[str] = field(default_factory=list)


async def damaged(service: ToyService, count: int, seed: int) -> Outcome:
    """Make `count` calls and check their statuses, the canaries and the growth of the scheduler."""
    outcome, calls = Outcome(), Calls(seed)
    numbers = iter(range(count))
    before = look(service.pid, 0)
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

        await asyncio.gather(*(work() for _ in range(_CONCURRENCY)))
    after = look(service.pid, count)
    outcome.grown = {name: getattr(after, name) - getattr(before, name) for name in _MAX_GROWTH}
    for name, most in _MAX_GROWTH.items():
        if outcome.grown[name] > most:
            outcome.wrong.append(f"{name} grew by {outcome.grown[name]} in {after.requests - before.requests} calls")
    return outcome


def incidents(log: Path) -> list[str]:
    """Return the log lines about bugs of the server. Odd requests and lost clients are none."""
    return [
        line for line in log.read_text().splitlines() if '"event": "internal_error"' in line or "loop_error" in line
    ]


async def _send(channel: grpc.aio.Channel, call: Call) -> str:
    """Return the status of the call: OK once `call.reads` messages arrived, HANG if nothing arrives.

    An error inside a session that only a bug explains counts as the status of the call.
    """
    # As an iterator, so that gRPC handles writes to a call that has ended.
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
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not made.cancelled() or (task is not None and task.cancelling()):
            raise
        return "OK"  # the call ended under a write, and gRPC's own task for the messages cancelled it
    finally:
        made.cancel()
    is_refused_write = code is grpc.StatusCode.INTERNAL and "from Core" in (await made.details() or "")
    # gRPC's status for a write to a call that was refused in the meantime.
    return "OK" if is_refused_write else code.name


def _bug_in(data: bytes) -> str:
    """Return the reason of a session error that no request can cause, or an empty string."""
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
class CancelledCalls:
    """Effects of opened and cancelled calls on the server and a canary."""

    count: int
    seconds: float
    quiet: float
    """p99 of the canary's gaps before."""
    during: float
    """p99 of the canary's gaps during the calls."""
    grown_bytes: int
    """Growth of the scheduler's private memory, after the first tenth of the calls."""
    held: int
    """Requests that the scheduler held at the end."""
    tokens: int
    """Tokens computed for all cancelled calls. An uncancelled one gets 400."""

    @property
    def is_harmless(self) -> bool:
        """Whether nothing is held, little was computed, and the canary was not delayed."""
        small = self.grown_bytes <= _MAX_GROWTH_BYTES
        return small and self.held == 0 and self.is_cancelled and self.during <= _MAX_TIMES_QUIET * self.quiet

    @property
    def is_cancelled(self) -> bool:
        """Whether the server stopped computing for cancelled calls."""
        return self.tokens <= _MAX_TOKENS_PER_CANCEL * self.count


async def open_and_cancel(service: ToyService, count: int, quiet_seconds: float = 4.0) -> CancelledCalls:
    """Open `count` calls and cancel each at once or a moment later."""
    async with grpc.aio.insecure_channel(service.target) as channel, AsyncClient(service.target) as client:
        with Canary(service.target) as canary:
            await asyncio.sleep(quiet_seconds)
            quiet, _ = canary.end()
        generate = channel.unary_stream(SERVICE + "Generate")
        data = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling={"max_tokens": 400}).SerializeToString()

        async def cancel(numbers: Iterator[int]) -> None:
            for number in numbers:
                call = generate(data)
                if number % 3 == 0:
                    await call.read()  # it runs
                elif number % 3 == 1:
                    await asyncio.sleep(0)
                call.cancel()
                if number % 50 == 0:
                    await asyncio.sleep(0.001)

        async def cancel_all(numbers: Iterator[int]) -> None:
            await asyncio.gather(*(cancel(numbers) for _ in range(_CONCURRENCY)))
            await _settled(client, most=1)  # the canary's request

        made = (await client.stats()).counters.generation_tokens
        with Canary(service.target) as canary:
            begin = time.monotonic()
            await cancel_all(iter(range(count // 10)))
            before = look(service.pid, 0).private_mib
            await cancel_all(iter(range(count // 10, count)))
            seconds = time.monotonic() - begin
            during, _ = canary.end()
        held = await _settled(client, most=0)
        grown = round((look(service.pid, 0).private_mib - before) * 2**20)
        canary_tokens = len(during) * TOKENS // (TOKENS - 1)  # each answer of the canary has one gap less than tokens
        made = (await client.stats()).counters.generation_tokens - made - canary_tokens
        return CancelledCalls(count, seconds, quantiles(quiet)["p99"], quantiles(during)["p99"], grown, held, made)


async def _settled(client: AsyncClient, most: int) -> int:
    """Return the number of requests once it is at most `most`, or after _SETTLE_SECONDS."""
    end = time.monotonic() + _SETTLE_SECONDS
    while True:
        gauges = (await client.stats()).gauges
        held = gauges.num_requests_running + gauges.num_requests_waiting
        if held <= most or time.monotonic() > end:
            return held
        await asyncio.sleep(0.01)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cancels", type=int, default=0, help="open and cancel so many calls instead")
    options = parser.parse_args(arguments)
    steps = {"min_step_seconds": 0.005, "max_step_seconds": 0.005} if options.cancels else {}
    with (
        tempfile.TemporaryDirectory() as folder,
        toy_service(Path(folder), log=Path(folder, "log"), **steps) as service,
    ):
        if options.cancels:
            found = asyncio.run(open_and_cancel(service, options.cancels))
            print(
                f"{found.count} calls cancelled in {found.seconds:.1f} s; p99 of a gap {found.quiet:.4f} s before and "
                f"{found.during:.4f} s during them; {found.grown_bytes / 2**20:.1f} MiB grown, {found.held} held, "
                f"{found.tokens} tokens for cancelled calls"
            )
            return 0 if found.is_harmless and service.stop() == 0 else 1
        outcome = asyncio.run(damaged(service, options.count, options.seed))
        alive = service.stop() == 0
        outcome.wrong += incidents(Path(folder, "log"))
    for line in outcome.wrong[:20]:
        print(line)
    print(
        "{private_mib:.1f} MiB, {threads} threads and {descriptors} descriptors grown; ".format(**outcome.grown)
        + f"{options.count} requests, {outcome.canaries} canaries, {len(outcome.wrong)} wrong, {dict(outcome.statuses)}"
    )
    return 1 if outcome.wrong or not alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
