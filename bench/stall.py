"""Measures the gaps of decoding streams beside other work, against their gaps before it.

    python -m bench.stall --model DIR [--streams 8] [--beside prompt embeddings scores drafts] [--turns 1]

Runs through the whole service, after an idle time in which the worker prefaults memory. The work arrives while all
streams decode and no other request waits for its first token. A step may then take `max_prefill_slowdown` times as long
as its decodes alone. The first turn of each kind is not counted: the scheduler fits its step-time model in it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path

from bench.figures import Figure, arguments, main, scaled
from bench.lineclear_serve import Service, serving
from bench.measure import median, percentile
from lineclear.client import AsyncClient

_REST_SECONDS = 3.0
_PROMPT_LEN, _LEAST, _ALONE = 32, 20, 300  # prompt length of the streams; tokens before their gaps count, and alone
_NUM_BLOCKS = 2048  # enough for all streams and the work beside them, and quickly prefaulted
_IDS = 3000
"""Token ids are below it, in any vocabulary."""
_GOAL = 2.0
_EMBEDDINGS, _EMBEDDING_LEN = 64, 128
_CONTINUATIONS, _CONTINUATION_LEN = 128, 90
_DRAFTS, _DRAFTED_TOKENS = 8, 256


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(5, _IDS) for _ in range(count)]


async def prompt(client: AsyncClient, rng: random.Random, length: int) -> None:
    """Compute one long prompt, at most the context."""
    length = min(length, (await client.model()).context_length - 1)
    await client.generate(_ids(rng, length), max_tokens=1, ignore_eos=True, temperature=0.0)


async def embeddings(client: AsyncClient, rng: random.Random, _: int) -> None:
    """Compute the vectors of many texts."""
    await client.embed([_ids(rng, _EMBEDDING_LEN) for _ in range(_EMBEDDINGS)])


async def scores(client: AsyncClient, rng: random.Random, _: int) -> None:
    """Score many continuations, with the most likely tokens at each position."""
    continuations = [_ids(rng, _CONTINUATION_LEN) for _ in range(_CONTINUATIONS)]
    await client.score(_ids(rng, 16), continuations, top_logprobs=20)


async def drafts(client: AsyncClient, rng: random.Random, length: int) -> None:
    """Continue a long chat that repeats itself, with drafts."""
    phrase = _ids(rng, 40)
    length = min(length, (await client.model()).context_length) - _DRAFTED_TOKENS
    text = (phrase * (length // len(phrase) + 1))[:length]
    await client.generate(
        text, max_tokens=_DRAFTED_TOKENS, ignore_eos=True, temperature=0.0, num_speculative_tokens=_DRAFTS
    )


WORK: dict[str, Callable[[AsyncClient, random.Random, int], Awaitable[None]]] = {
    each.__name__: each for each in (prompt, embeddings, scores, drafts)
}


async def gaps(
    service: Service, streams: int, work: Callable[[], Awaitable[None]]
) -> tuple[list[float], list[float], float]:
    """Return the gaps between messages alone and beside the work, and the seconds of the work."""
    client = service.client
    max_tokens = (await client.model()).context_length - _PROMPT_LEN
    times: list[list[float]] = [[] for _ in range(streams)]
    settled, stop = asyncio.Event(), asyncio.Event()

    async def decode(number: int) -> None:
        text = tuple(range(10 + number, 10 + number + _PROMPT_LEN))
        async with client.stream(text, max_tokens=max_tokens, ignore_eos=True, temperature=0.0) as stream:
            async for delta in stream:
                if delta.token_ids:
                    times[number].append(time.perf_counter())
                if all(len(seen) >= _LEAST + _ALONE for seen in times):
                    settled.set()
                if stop.is_set():
                    return

    tasks = [asyncio.ensure_future(decode(number)) for number in range(streams)]
    await settled.wait()
    begin = max(seen[_LEAST] for seen in times)
    arrival = time.perf_counter()
    await work()
    end = time.perf_counter()
    if any(task.done() for task in tasks):
        end = min(seen[-1] for seen in times)  # the context of a stream is full
    stop.set()
    await asyncio.gather(*tasks)
    alone = [b - a for seen in times for a, b in pairwise(seen) if a >= begin and b <= arrival]
    beside = [b - a for seen in times for a, b in pairwise(seen) if b > arrival and a < end]
    return alone, beside, time.perf_counter() - arrival if end < arrival else end - arrival


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure gaps alone and beside each kind of work, and their ratios."""
    worker_flags = ("--preallocate-kv-cache", "--num-blocks", str(_NUM_BLOCKS)) if options.preallocate else ()
    rng = random.Random(options.seed)

    async def measured() -> dict[str, list[tuple[list[float], list[float], float]]]:
        async with serving(str(options.model), worker_flags=worker_flags) as service:
            await asyncio.sleep(_REST_SECONDS)
            found: dict[str, list[tuple[list[float], list[float], float]]] = {}
            for kind in options.beside:
                for turn in range(options.turns + 1):
                    work = functools.partial(WORK[kind], service.client, rng, options.prompt_tokens)
                    one = await gaps(service, options.streams, work)
                    if turn:
                        found.setdefault(kind, []).append(one)
            return found

    for kind, turns in asyncio.run(measured()).items():
        case = f"{options.model.resolve().name}, {options.streams} streams, {kind}"
        case += ", all memory given before" if options.preallocate else ""
        step = median([median(alone) for alone, _, _ in turns])  # all streams have decoded for a while
        yield Figure("stall: decode step alone, p50", case, step * 1e3, "ms")
        all_alone = [gap for alone, _, _ in turns for gap in alone]
        yield Figure("stall: gap alone, p99", case, scaled(percentile(all_alone, 0.99), 1e3), "ms")
        all_beside = [gap for _, beside, _ in turns for gap in beside]
        for name, part in (("p50", 0.5), ("p99", 0.99), ("longest", 1.0)):
            gap = percentile(all_beside, part)
            yield Figure(f"stall: gap beside, {name}", case, scaled(gap, 1e3), "ms")
            yield Figure(f"stall: of the decode step, {name}", case, scaled(gap, 1 / step), "times", _GOAL)
        yield Figure("stall: time of the work", case, scaled(median([seconds for *_, seconds in turns]), 1e3), "ms")


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, default=Path(__file__).parents[1] / "demo" / "model")
    found.add_argument("--streams", type=int, default=8)
    found.add_argument("--beside", nargs="+", choices=sorted(WORK), default=list(WORK))
    found.add_argument("--prompt-tokens", type=int, default=2000)
    found.add_argument("--turns", type=int, default=1)
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--preallocate", action="store_true", help="the KV cache's memory is given before the start")
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
