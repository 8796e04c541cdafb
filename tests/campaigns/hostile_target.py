"""What hostile callers of all kinds share: the server that they call, threads, and counts of status codes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from lineclear.v1 import inference_pb2_grpc

SLOW = "777"
"""First message of a conversation that the campaign's template renders slowly."""
NUM_THREADS = 4
METHODS = b"/lineclear.v1.InferenceService/"
outcomes: Counter[str] = Counter()
"""Number of calls by status code."""


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Count the status code of a call."""
    outcome = "OK"
    try:
        yield
    except grpc.RpcError as error:
        outcome = error.code().name
    outcomes[outcome] += 1


@dataclass(frozen=True)
class Target:
    """The ports of a local server, and the end of the run."""

    data: int
    health: int
    metrics: int
    status: int
    end: float

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.end

    def channel(self, aio: bool = False) -> Any:
        """Open a new connection."""
        make = grpc.aio.insecure_channel if aio else grpc.insecure_channel
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        return make(f"127.0.0.1:{self.data}", options=options)


def in_loop(kind: Callable[[Target], Coroutine[Any, Any, int]]) -> Callable[[Target], int]:
    """Return a kind that runs a coroutine function on an event loop."""

    @functools.wraps(kind)
    def run(target: Target) -> int:
        return asyncio.run(kind(target))

    return run


def in_threads(target: Target, call: Callable[[Any], object], num_threads: int = NUM_THREADS) -> int:
    """Repeat a call in several threads, each with its own connection."""
    counts = [0] * num_threads

    def work(number: int) -> None:
        with target.channel() as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            while not (counts[number] and target.is_over):  # at least once
                with counted():
                    call(stub)
                counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)
