"""A caller with no load of its own: reads one answer after another, and writes down the gaps between its messages.

    cd tests && python -m fuzz.canary TARGET

Until its standard input ends; then prints the gaps in seconds as a JSON list. A process of its own, because in that of
whoever makes the trouble an answer waits for the trouble.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

from lineclear.client import Client

_TOKENS = 100


@contextlib.asynccontextmanager
async def singing(target: str) -> AsyncIterator[list[float]]:
    """One beside the block; the list has its gaps after the block."""
    command = (sys.executable, "-m", "fuzz.canary", target)
    pipe, folder = asyncio.subprocess.PIPE, Path(__file__).parents[1]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=folder)
    gaps: list[float] = []
    try:
        assert process.stdout is not None
        await process.stdout.readline()  # it has had an answer
        yield gaps
    finally:
        said, _ = await process.communicate(b"")  # which also ends its standard input
    gaps += json.loads(said)


def main() -> int:
    """Read until told to stop, and a last answer to its end."""
    ended, gaps = threading.Event(), list[float]()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    with Client(sys.argv[1], max_attempts=1, sessions=False) as client:
        client.generate([5, 6], max_tokens=1, seed=1)
        print(flush=True)
        while not gaps or not ended.is_set():
            times = []
            with client.stream([5, 6], max_tokens=_TOKENS, ignore_eos=True, seed=1) as stream:
                for delta in stream:
                    if delta.token_ids:
                        times.append(time.perf_counter())
            gaps += [b - a for a, b in pairwise(times)]
    print(json.dumps(gaps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
