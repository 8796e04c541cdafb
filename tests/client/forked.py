"""Use clients before and after a fork: `python -m client.forked TARGET WHAT`.

Prints the error of the child, or "answered". A hang ends the child with exit code 1. The parent then makes a call.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import sys
from collections.abc import Callable
from typing import Any

from support.time_limits import SOON_SECONDS

from lineclear.client import AsyncClient, Client


def same_client(client: Client) -> Callable[[], Any]:
    client.generate("one")
    return lambda: client.generate("one")


def same_stats(client: Client) -> Callable[[], Any]:
    client.stats()
    return client.stats


def same_stream(client: Client) -> Callable[[], Any]:
    stream = client.stream("one two three").__enter__()
    next(stream)
    return lambda: next(stream)


def same_batch(client: Client) -> Callable[[], Any]:
    outcomes = client.iter_batch(["one"] * 3, concurrency=2, window=2)
    next(outcomes)
    return lambda: list(outcomes)


def same_closed(client: Client) -> Callable[[], Any]:
    client.generate("one")
    return client.close


def first_call(client: Client) -> Callable[[], Any]:
    return lambda: client.generate("one")


def asyncio_again(client: Client) -> Callable[[], Any]:
    async def ask() -> None:
        async with AsyncClient(client.target) as own:
            await own.generate("one")

    def again() -> None:
        gc.collect()  # collects the parent's loop and channel
        asyncio.run(ask())

    gc.disable()
    asyncio.run(ask())
    return again


ERRORS = (same_client, same_stats, same_stream, same_batch, asyncio_again)
ANSWERS = (same_closed, first_call)
OPERATIONS = {function.__name__: function for function in ERRORS + ANSWERS}


def main(target: str, what: str) -> None:
    client = Client(target, timeout_seconds=SOON_SECONDS / 2)
    act = OPERATIONS[what](client)
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(SOON_SECONDS, exit=True)
        try:
            act()
            print("answered")
        except RuntimeError as error:
            print(f"RuntimeError: {error}")
        return
    assert os.waitpid(pid, 0)[1] == 0
    if what != "first_call":
        client.generate("one")
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
