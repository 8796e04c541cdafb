"""A recording of what steps of a worker spend their time on."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from typing import Any, NamedTuple

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ROUNDING = 0.01  # of microseconds since 1970
_HOST = ("step", "cpu_op", "cuda_runtime", "cuda_driver")


class Operation(NamedTuple):
    """The calls of one kernel or function."""

    name: str
    """`step`: the Python code of a step."""
    is_kernel: bool
    """A kernel, of a GPU or a CPU, or a copy on a GPU; otherwise code on the host."""
    calls: int
    seconds: float
    """Of all calls together, without the operations that they call."""


class StepProfile(NamedTuple):
    """What `AdminClient.profile` returns."""

    trace: bytes
    """A Chrome trace for ui.perfetto.dev: JSON that gzip has compressed. Write it to a file that ends with .json.gz."""
    num_steps: int

    def step_seconds(self) -> float:
        """Return the time of all steps together. On a GPU it is that of their launches."""
        return sum(float(event["dur"]) for event in self._events() if event["cat"] == "step") / 1e6

    def operations(self) -> list[Operation]:
        """Return what the time went to, the longest first."""
        threads = defaultdict[Any, list[dict[str, Any]]](list)
        for event in self._events():
            if event.get("cat") in _DEVICE + _HOST:
                threads[event["pid"], event["tid"]].append(event)
        calls, microseconds = defaultdict[tuple[str, bool], int](int), defaultdict[tuple[str, bool], float](float)
        for events in threads.values():
            around: list[tuple[tuple[str, bool], float]] = []  # and when each ends, not after the one around it
            for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
                start, end = event["ts"], event["ts"] + event["dur"]
                while around and around[-1][1] <= start + _ROUNDING:
                    around.pop()
                if around:
                    end = min(end, around[-1][1])
                    microseconds[around[-1][0]] -= end - start
                around.append((_key(event), end))
                calls[_key(event)] += 1
                microseconds[_key(event)] += end - start
        found = (Operation(*key, calls[key], max(time, 0.0) / 1e6) for key, time in microseconds.items())
        return sorted(found, key=lambda operation: -operation.seconds)

    def _events(self) -> list[dict[str, Any]]:
        return [event for event in json.loads(gzip.decompress(self.trace))["traceEvents"] if event["ph"] == "X"]


def _key(event: dict[str, Any]) -> tuple[str, bool]:
    return event["name"], event["cat"] in _DEVICE
