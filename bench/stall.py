"""Measures the gaps of decoding streams while a long prompt is computed, against their gaps before it.

    python -m bench.stall --model DIR [--streams 8] [--prompt-tokens 2000] [--preallocate]

Runs through the whole service, after an idle time in which the worker prefaults memory. One long prompt arrives while
all streams decode and no other request waits for its first token. A step may then take `max_prefill_slowdown` times as
long as its decodes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from bench.figures import Figure, arguments, main, scaled
from bench.lineclear_serve import Service, serving
from bench.measure import median, percentile

_REST_SECONDS = 3.0
_ALONE_SECONDS = 3.0
_PROMPT_LEN, _LEAST = 32, 20  # prompt length of the decoding streams; tokens before their gaps count
_ENOUGH_TOKENS = 1200  # enough for the whole measurement
_NUM_BLOCKS = 1024  # enough for both prompts and all streams, and quickly prefaulted
_GOAL = 2.0


async def gaps(
    service: Service, streams: int, prompt_tokens: int, first_id: int
) -> tuple[list[float], list[float], float]:
    """Return the gaps between messages alone and during the prompt, and the seconds of the prompt.

    `first_id` makes the prompt one that nothing of is cached.
    """
    times: list[list[float]] = [[] for _ in range(streams)]
    settled, stop = asyncio.Event(), asyncio.Event()

    async def decode(number: int) -> None:
        prompt = tuple(range(10 + number, 10 + number + _PROMPT_LEN))
        async with service.client.stream(prompt, max_tokens=_ENOUGH_TOKENS, ignore_eos=True, temperature=0.0) as stream:
            async for _ in stream:
                times[number].append(time.perf_counter())
                if all(len(seen) >= _LEAST for seen in times):
                    settled.set()
                if stop.is_set():
                    return

    tasks = [asyncio.ensure_future(decode(number)) for number in range(streams)]
    await settled.wait()
    begin = time.perf_counter()
    await asyncio.sleep(_ALONE_SECONDS)
    arrival = time.perf_counter()
    prompt = (first_id, *(5 + number * 7 % 3000 for number in range(prompt_tokens - 1)))
    await service.client.generate(prompt, max_tokens=1, ignore_eos=True, temperature=0.0)
    end = time.perf_counter()
    stop.set()
    await asyncio.gather(*tasks)
    alone = [b - a for seen in times for a, b in pairwise(seen) if a >= begin and b <= arrival]
    beside = [b - a for seen in times for a, b in pairwise(seen) if b > arrival and a < end]
    return alone, beside, end - arrival


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure gaps alone and beside a prompt, and their ratios."""

    worker_flags = ("--preallocate-kv-cache", "--num-blocks", str(_NUM_BLOCKS)) if options.preallocate else ()

    async def measured() -> tuple[list[float], list[float], float]:
        async with serving(str(options.model), worker_flags=worker_flags) as service:
            await asyncio.sleep(_REST_SECONDS)
            await gaps(service, options.streams, options.prompt_tokens, 3001)  # the scheduler fits its step time model
            return await gaps(service, options.streams, options.prompt_tokens, 3002)

    alone, beside, seconds = asyncio.run(measured())
    case = f"{options.model.resolve().name}, {options.streams} streams, a prompt of {options.prompt_tokens}"
    case += ", all memory given before" if options.preallocate else ""
    step = median(alone)  # all streams have decoded for seconds
    yield Figure("stall: decode step alone, p50", case, step * 1e3, "ms")
    yield Figure("stall: gap alone, p99", case, scaled(percentile(alone, 0.99), 1e3), "ms")
    for name, part in (("p50", 0.5), ("p99", 0.99), ("longest", 1.0)):
        gap = percentile(beside, part)
        yield Figure(f"stall: gap beside the prompt, {name}", case, scaled(gap, 1e3), "ms")
        yield Figure(f"stall: of the decode step, {name}", case, scaled(gap, 1 / step), "times", _GOAL)
    yield Figure("stall: first token of the prompt", case, seconds * 1e3, "ms")


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, required=True)
    found.add_argument("--streams", type=int, default=8)
    found.add_argument("--prompt-tokens", type=int, default=2000)
    found.add_argument("--preallocate", action="store_true", help="the KV cache's memory is given before the start")
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
