"""Damaged frames against the decoder, and against a live link that is serving: `python -m fuzz.frames --count 100000`.

The decoder must refuse or read each of them and nothing else, with a bounded number of calls. The live link hears them
from a peer that has got into the socket directory, between the frames of a real worker: it must drop them all, and the
answers of the canaries must be exact. Prints what it did as JSON; exits 1 at the first thing that must not be, naming
the seed.
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
from support.engine_harness import World, request
from support.examples import EXAMPLES
from support.sockets import bare_context
from support.toy_worker import ToyOptions
from support.work import count_calls

from lineclear.wire.codec import DecodeError, decode, encode

_MAX_CALLS = 500
_CANARIES_EVERY = 5000


class Wrong(Exception):
    """Something happened that must not."""


def decoder(count: int, seed: int) -> dict[str, int]:
    """Decode `count` damaged frames; half of them have a right checksum, or none would reach the payload."""
    dice = random.Random(seed)
    frames = [encode(message) for message in EXAMPLES]
    refused = 0

    def attempt(frame: bytes) -> None:
        nonlocal refused
        try:
            encode(decode(frame))
        except DecodeError:
            refused += 1

    for number in range(count):
        frame = dice.choice(frames)
        damaged = mutate(frame, dice) if dice.random() < 0.5 else damaged_payload(frame, dice)
        try:
            calls = count_calls(partial(attempt, damaged))
        except Exception as error:
            raise Wrong(f"seed {seed}, frame {number}: {type(error).__name__} from {damaged.hex()}") from error
        if calls > _MAX_CALLS:
            raise Wrong(f"seed {seed}, frame {number}: takes more than {_MAX_CALLS} calls: {damaged.hex()}")
    return {"frames": count, "refused": refused, "read": count - refused}


def live(count: int, seed: int) -> dict[str, int]:
    """Send `count` damaged frames into a link that serves; canaries all the while."""
    dice = random.Random(seed)
    frames = [encode(message) for message in EXAMPLES]
    num_canaries = 0
    with World(options=ToyOptions()) as world:
        world.start_worker()
        world.wait_joined()
        context = bare_context()
        rogue = context.socket(zmq.PUSH)
        try:
            rogue.connect(f"ipc://{world.directory}/result.sock")
            for begin in range(0, count, _CANARIES_EVERY):
                streams = [world.submit(request(begin + i)) for i in range(4)]
                for _ in range(min(_CANARIES_EVERY, count - begin)):
                    rogue.send(_unsealed(dice.choice(frames), dice))
                world.wait_ended(streams)
                for stream in streams:
                    stream.check(world.options.vocab_size)
                num_canaries += len(streams)
            world.wait(lambda: world.engine.snapshot().link.bad_frames >= count or _nudge(world), what="the last frame")
        finally:
            context.destroy()
        counters = world.engine.snapshot().link
        if len(world.joins) != 1 or world.losses or world.fatal:
            raise Wrong(f"seed {seed}: the worker was lost ({len(world.losses)}), or the engine died ({world.fatal})")
    return {"frames": count, "bad_frames": counters.bad_frames, "canaries_exact": num_canaries}


def _unsealed(frame: bytes, dice: random.Random) -> bytes:
    """Damaged so that it is no frame any more, whatever the damage was."""
    while True:
        damaged = mutate(frame, dice)
        try:
            decode(damaged)
        except DecodeError:
            return damaged


def _nudge(world: World) -> bool:
    """Have the engine take a snapshot: a request more, that is exact as well."""
    number = 1_000_000 + len(world.streams)
    world.submit(request(number, max_tokens=1))
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run both; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(argv)
    try:
        found = {"decoder": decoder(chosen.count, chosen.seed), "live": live(chosen.count, chosen.seed)}
    except (Wrong, AssertionError) as error:
        print(f"python -m fuzz.frames --count {chosen.count} --seed {chosen.seed}: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"seed": chosen.seed, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
