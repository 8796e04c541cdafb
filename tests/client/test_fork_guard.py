"""A process that is forked from one that used a client: a sentence instead of a wait for threads that are not there.

`python -m client.test_fork_guard TARGET` uses clients before and after forks. It prints for each use its name and the
error of the child, or "answered". A hang ends the child with exit code 1. The parent then makes a call.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import sys
from collections.abc import Callable
from typing import Any

from client.command import run
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


USES = (first_call, same_closed, same_client, same_stats, same_stream, same_batch, asyncio_again)
"""In this order: after the first, the parent has used gRPC, and after the last gRPC for asyncio."""


def use_in_child(use: Callable[[Client], Callable[[], Any]], target: str) -> None:
    client = Client(target, timeout_seconds=SOON_SECONDS / 2)
    act = use(client)
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(SOON_SECONDS, exit=True)
        try:
            act()
            print(use.__name__, "answered")
        except RuntimeError as error:
            print(use.__name__, f"RuntimeError: {error}")
        sys.exit()
    assert os.waitpid(pid, 0)[1] == 0
    if use is not first_call:
        client.generate("one")
    client.close()


def test_used_client_raises_in_the_child_and_an_unused_one_works(server: Any) -> None:
    done = run([sys.executable, "-m", "client.test_fork_guard", server.target])
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert (said.pop("first_call"), said.pop("same_closed")) == ("answered", "answered")
    assert said.keys() == {"same_client", "same_stats", "same_stream", "same_batch", "asyncio_again"}
    assert all("used before this process was forked" in sentence for sentence in said.values()), said


if __name__ == "__main__":
    for each in USES:
        use_in_child(each, sys.argv[1])
