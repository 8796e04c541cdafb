"""Sends one request at a time until standard input ends, then prints the seconds of each refusal as a JSON list.

    python -m bench.prober TARGET

Runs in its own process: in the load generator's process, a refusal would wait for the generator.
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
    """Run a prober during the block; afterwards the list holds its seconds."""
    command = (sys.executable, "-m", "bench.prober", target)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    seconds: list[float] = []
    try:
        yield seconds
    finally:
        output, _ = await process.communicate(b"")  # also closes its standard input
    seconds += json.loads(output)


def main() -> int:
    """Send requests until standard input ends."""
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
