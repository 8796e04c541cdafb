"""Measures the codec: microseconds and bytes of a plan and of its result, with all rows decoding.

python -m bench.micro_wire
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from bench.figures import Figure, arguments, main, seconds_per_call
from bench.instant import BLOCK_SIZE
from lineclear.wire.codec import decode, encode
from lineclear.wire.messages import Decodes, Message, Row, RowOutput, Sampling, SlotInit, StepPlan, StepResult

ROWS = (1, 32, 256)
PROMPT_LEN = 512
_GOAL_MICROSECONDS = 250.0
_GOAL_BYTES = 4096.0


def decodes(count: int) -> tuple[StepPlan, StepResult]:
    """Return a plan of `count` decodes, every 16th with a new block."""
    slots = tuple(range(count))
    grown = tuple((slot, 12345 + slot) for slot in slots[::BLOCK_SIZE])
    plan = StepPlan(1 << 62, 123456, decodes=Decodes(slots, tuple(500 + 7 * slot for slot in slots), grown))
    tokens = tuple((31 * slot + 1009) % 150_000 for slot in range(count))
    return plan, StepResult(plan.epoch, plan.step, tokens, step_seconds=0.0123)


def joining() -> StepPlan:
    """Return a plan that starts a request with a prompt of 512 tokens."""
    blocks = tuple(range(1000, 1000 + PROMPT_LEN // BLOCK_SIZE))
    init = SlotInit(3, tuple(range(1000, 1000 + PROMPT_LEN)), PROMPT_LEN, (), Sampling(temperature=0.7, top_p=0.9))
    return StepPlan(1 << 62, 123456, (Row(3, 0, PROMPT_LEN, RowOutput.SAMPLE, blocks),), (init,))


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure plan and result for every number of rows, and a plan with a new request."""
    for count in options.rows:
        case, microseconds, size = f"{count} decodes", 0.0, 0
        messages: tuple[Message, ...] = decodes(count)
        for name, message in zip(("plan", "result"), messages, strict=True):
            frame = encode(message)
            assert decode(frame) == message
            size += len(frame)
            for way, seconds in (
                ("encode", seconds_per_call(partial(encode, message), calls=200)),
                ("decode", seconds_per_call(partial(decode, frame), calls=200)),
            ):
                microseconds += seconds * 1e6
                yield Figure(f"wire: {way} {name}", case, seconds * 1e6, "us")
            yield Figure(f"wire: size of {name}", case, len(frame), "bytes")
        at_goal = count == 256
        yield Figure("wire: all four", case, microseconds, "us", _GOAL_MICROSECONDS if at_goal else None)
        yield Figure("wire: plan and result", case, size, "bytes", _GOAL_BYTES if at_goal else None)
    plan, case = joining(), f"a prompt of {PROMPT_LEN} joins"
    frame = encode(plan)
    yield Figure("wire: encode plan", case, seconds_per_call(partial(encode, plan), calls=200) * 1e6, "us")
    yield Figure("wire: decode plan", case, seconds_per_call(partial(decode, frame), calls=200) * 1e6, "us")
    yield Figure("wire: size of plan", case, len(frame), "bytes")


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
