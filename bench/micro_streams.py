"""Measures token output through engine, streams and gRPC to clients, with a worker that computes nothing.

    python -m bench.micro_streams --model demo/model

The real scheduler process and one client process. CPU time is reported for each, because they compete on a small
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.figures import Figure, arguments, main
from bench.lineclear_serve import Service, serving
from bench.measure import process_seconds, tree

STREAMS = (1, 64, 256)
_TOKENS = 64 * 512
_MOST_TOKENS = 512
_GOAL_TOKENS_PER_CORE = 100_000.0


async def stream_all(model: str, count: int, tokens: int) -> list[Figure]:
    """Run `count` concurrent streams with `tokens` in total, at most 512 each."""
    python = [f"--worker-command={sys.executable} -m bench.instant"]
    flags = [*python, "--max-batch-size", str(count), "--target-batch-tokens", "4096"]
    length = min(_MOST_TOKENS, max(1, tokens // count))
    messages = 0

    async def one(service: Service, wanted: int) -> None:
        nonlocal messages
        async with service.client.stream(
            (5, 6, 7), max_tokens=wanted, temperature=0.0, ignore_eos=True, omit_text=True
        ) as stream:
            async for _ in stream:
                messages += 1
        assert stream.result.usage.completion_tokens == wanted

    async with serving(model, flags) as service:
        await asyncio.gather(*(one(service, 8) for _ in range(count)))
        scheduler = service.pid
        others = set(tree(scheduler)) - {scheduler}
        messages = 0
        before = [process_seconds([scheduler]), process_seconds(others), time.process_time()]
        begin = time.perf_counter()
        await asyncio.gather(*(one(service, length) for _ in range(count)))
        seconds = time.perf_counter() - begin
        after = [process_seconds([scheduler]), process_seconds(others), time.process_time()]
    total = count * length
    cpu = [b - a for a, b in zip(before, after, strict=True)]
    case = f"{count} streams"
    per_core = total / max(cpu[0], 1e-9)
    return [
        Figure("streams: rate", case, total / seconds, "tokens/s"),
        Figure("streams: messages", case, messages / seconds, "messages/s"),
        Figure("streams: scheduler's CPU time", case, cpu[0] / total * 1e6, "us a token"),
        Figure("streams: worker's CPU time", case, cpu[1] / total * 1e6, "us a token"),
        Figure("streams: client's CPU time", case, cpu[2] / total * 1e6, "us a token"),
        Figure(
            "streams: tokens a core", case, per_core, "tokens/s", _GOAL_TOKENS_PER_CORE if count > 1 else None, True
        ),
    ]


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure every number of streams."""
    for count in options.streams:
        yield from asyncio.run(stream_all(str(options.model), count, options.tokens))


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, required=True, help="whose tokenizer the service loads")
    found.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    found.add_argument("--tokens", type=int, default=_TOKENS)
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
