"""A stand-in for the functions of torch that only a card has: the tensors stay on the CPU, and nothing is captured.

Events are moments of the host's clock, memory is counted down, and the profiler has one kernel in half of its time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType

from lineclear.worker.device.staging import Staging
from lineclear.worker.runner import input_batch

NAME = "A card"
GIB = 1 << 30


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: object = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class Stream:
    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        """Return at once."""


class Profile:
    """A profiler that has seen a kernel in the first and in the last quarter of its time."""

    def __init__(self, activities: list[object]) -> None:
        self.activities = activities

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def events(self) -> list[Any]:
        """Return the two kernels, and work of the host."""
        spans = ((DeviceType.CUDA, 0.0, 25.0), (DeviceType.CPU, 0.0, 100.0), (DeviceType.CUDA, 75.0, 100.0))
        return [SimpleNamespace(device_type=kind, time_range=SimpleNamespace(start=a, end=b)) for kind, a, b in spans]


@contextlib.contextmanager
def _captured(graph: object, **_: object) -> Iterator[None]:
    yield


def pretend(monkeypatch: pytest.MonkeyPatch, free_bytes: int = 2 * GIB) -> list[str]:
    """Replace torch's functions of a card; return the names of those that are called, as they are called."""
    called: list[str] = []

    def noting(name: str, value: Any = None) -> Any:
        def call(*arguments: object, **_: object) -> Any:
            called.append(name)
            return value() if callable(value) else value

        return call

    properties = SimpleNamespace(name=NAME, total_memory=80 * GIB, multi_processor_count=132, major=9, minor=0)
    free = [free_bytes]

    def mem_get_info(device: object = None) -> tuple[int, int]:
        called.append("mem_get_info")
        free[0] //= 2
        return free[0], 80 * GIB

    functions = {
        "set_device": noting("set_device"),
        "get_device_properties": noting("get_device_properties", lambda: properties),
        "mem_get_info": mem_get_info,
        "synchronize": noting("synchronize"),
        "max_memory_allocated": noting("max_memory_allocated", 3 * GIB),
        "empty_cache": noting("empty_cache"),
        "current_stream": noting("current_stream", Stream),
        "graph_pool_handle": noting("graph_pool_handle", (0, 1)),
        "stream": noting("stream", contextlib.nullcontext),
        "CUDAGraph": lambda: SimpleNamespace(replay=noting("replay")),
        "graph": _captured,
        "Event": Event,
        "Stream": Stream,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)

    def indirect(device: torch.device, num_bytes: int) -> Staging:
        return Staging(device, num_bytes, is_direct=False)

    monkeypatch.setattr(input_batch, "Staging", indirect)
    return called
