"""What hostile callers of all kinds share: the table of kinds, the server, threads, and counts of status codes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
    outcome = "OK"
    try:
        yield
    except grpc.RpcError as error:
        outcome = error.code().name
    outcomes[outcome] += 1


@dataclass(frozen=True)
class Target:
    data: int
    health: int
    metrics: int
    status: int
    end: float

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.end

    def channel(self, aio: bool = False) -> Any:
        make = grpc.aio.insecure_channel if aio else grpc.insecure_channel
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        return make(f"127.0.0.1:{self.data}", options=options)


Kind = Callable[[Target], int]
KINDS: dict[str, Kind] = {}
"""Functions that call the server until the end and return the number of attempts, by name."""
SERVED: set[str] = set()
"""Kinds that prove nothing unless some of their calls succeed."""


def kind(function: Callable[[Target], Any]) -> Callable[[Target], Any]:
    """Enter a kind, which may be a coroutine function."""
    is_async = asyncio.iscoroutinefunction(function)
    KINDS[function.__name__] = (lambda target: asyncio.run(function(target))) if is_async else function
    return function


def served(function: Kind) -> Kind:
    """Enter a kind of which some calls must succeed."""
    SERVED.add(function.__name__)
    return kind(function)


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
