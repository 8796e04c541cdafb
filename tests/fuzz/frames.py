"""Damaged frames for the decoder and for a live link: `python -m fuzz.frames --count 100000`.

The decoder must decode or refuse each frame, with a bounded number of calls. The live link receives frames from a peer
inside the socket directory, between those of a real worker. It must drop them all, and the canaries' answers must be
exact. Prints figures as JSON; exits with 1 at the first failure, with the seed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from functools import partial

import zmq
from support.damage import damaged_payload, mutate
from support.engine_harness import EngineHarness, request
from support.examples import EXAMPLES
from support.sockets import bare_context
from support.toy_worker import ToyOptions
from support.work import count_calls

from lineclear.wire.codec import DecodeError, decode, encode

_MAX_CALLS = 500
_FRAMES_PER_CANARY = 5000


class Failure(Exception):
    """A failure of the decoder or the link."""


def decoder(count: int, seed: int) -> dict[str, int]:
    """Decode `count` damaged frames. Half of them have a valid checksum, so that the payload is read."""
    rng = random.Random(seed)
    frames = [encode(message) for message in EXAMPLES]
    refused = 0

    def attempt(frame: bytes) -> None:
        nonlocal refused
        try:
            encode(decode(frame))
        except DecodeError:
            refused += 1

    for number in range(count):
        frame = rng.choice(frames)
        damaged = mutate(frame, rng) if rng.random() < 0.5 else damaged_payload(frame, rng)
        try:
            calls = count_calls(partial(attempt, damaged))
        except Exception as error:
            raise Failure(f"seed {seed}, frame {number}: {type(error).__name__} from {damaged.hex()}") from error
        if calls > _MAX_CALLS:
            raise Failure(f"seed {seed}, frame {number}: takes more than {_MAX_CALLS} calls: {damaged.hex()}")
    return {"frames": count, "refused": refused, "read": count - refused}


def live(count: int, seed: int) -> dict[str, int]:
    """Send `count` damaged frames into a serving link, with canaries between them."""
    rng = random.Random(seed)
    frames = [encode(message) for message in EXAMPLES]
    num_canaries = 0
    with EngineHarness(options=ToyOptions(), num_workers=1) as harness:
        context = bare_context()
        rogue = context.socket(zmq.PUSH)
        try:
            rogue.connect(f"ipc://{harness.directory}/result.sock")
            for begin in range(0, count, _FRAMES_PER_CANARY):
                streams = [harness.submit(request(begin + i)) for i in range(4)]
                for _ in range(min(_FRAMES_PER_CANARY, count - begin)):
                    rogue.send(_undecodable(rng.choice(frames), rng))
                harness.check(streams)
                num_canaries += len(streams)
            harness.wait(
                lambda: harness.engine.snapshot().link.bad_frames >= count or _nudge(harness), what="the last frame"
            )
        finally:
            context.destroy()
        counters = harness.snapshot().link
        if len(harness.joins) != 1 or harness.losses or harness.fatal:
            raise Failure(
                f"seed {seed}: the worker was lost ({len(harness.losses)}), or the engine died ({harness.fatal})"
            )
    return {"frames": count, "bad_frames": counters.bad_frames, "canaries_exact": num_canaries}


def _undecodable(frame: bytes, rng: random.Random) -> bytes:
    """Damage `frame` until it no longer decodes."""
    while True:
        damaged = mutate(frame, rng)
        try:
            decode(damaged)
        except DecodeError:
            return damaged


def _nudge(harness: EngineHarness) -> bool:
    """Submit one more request, so that the engine publishes a snapshot."""
    number = 1_000_000 + len(harness.streams)
    harness.submit(request(number, max_tokens=1))
    return False


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(argv)
    try:
        found = {"decoder": decoder(chosen.count, chosen.seed), "live": live(chosen.count, chosen.seed)}
    except (Failure, AssertionError) as error:
        print(f"python -m fuzz.frames --count {chosen.count} --seed {chosen.seed}: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"seed": chosen.seed, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
