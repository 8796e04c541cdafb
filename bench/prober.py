"""A caller with no load of its own: asks one thing at a time, and writes down how long each refusal took.

    python -m bench.prober TARGET

Until its standard input ends; then prints the seconds as a JSON list. A process of its own, because in that of a load
generator a refusal waits for the generator.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator

from lineclear.client import Client
from lineclear.errors import LineclearError

_PAUSE_SECONDS = 0.005


@contextlib.asynccontextmanager
async def probing(target: str) -> AsyncIterator[list[float]]:
    """One beside the block; the list has its seconds after the block."""
    command = (sys.executable, "-m", "bench.prober", target)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    seconds: list[float] = []
    try:
        yield seconds
    finally:
        said, _ = await process.communicate(b"")  # which also ends its standard input
    seconds += json.loads(said)


def main() -> int:
    """Ask until told to stop."""
    ended, seconds = threading.Event(), list[float]()

    def listen() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    with Client(sys.argv[1], max_attempts=1, sessions=False) as client:
        while not ended.wait(_PAUSE_SECONDS):
            begin = time.perf_counter()
            try:
                client.generate((5, 6), max_tokens=1, ignore_eos=True, temperature=0.0)
            except LineclearError as error:
                if error.reason == "QUEUE_FULL":
                    seconds.append(time.perf_counter() - begin)
    print(json.dumps(seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
