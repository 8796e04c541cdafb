"""Records steps with the profiler of PyTorch, which sees its own operations, and CUDA kernels also in graphs.

The calls of a captured graph of CPU kernels are added, as events inside those of their step.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from lineclear.wire.messages import StepPlan
from lineclear.worker.kernels.call_graph import timed_replays
from lineclear.worker.loop.runner_interface import InflightStep, Runner

_ENVIRONMENT = {
    "KINETO_LOG_LEVEL": "6",  # otherwise the profiler writes to standard error, where each line is an event in JSON
    "TEARDOWN_CUPTI": "0",  # after that, a captured CUDA graph can crash in the next part
}
_PART_BYTES = 2_000_000
"""Of JSON, about 6,000 events. PyTorch holds Python's lock for about 60 ms while it writes them."""


class TorchStepRecorder:
    """A StepRecorder (lineclear.worker.loop.runner_interface) of this process and its device.

    It writes in parts of a few steps, because the profiler holds up the whole process for each event that it writes.
    """

    def __init__(self, runner: Runner) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._runner = runner
        self._steps: list[tuple[int, int, StepPlan]] = []  # of this part: start by the monotonic clock, and nanoseconds
        self._steps_wanted = 1  # in this part
        self._trace = io.BytesIO()
        self._file = gzip.GzipFile(fileobj=self._trace, mode="wb", compresslevel=6, mtime=0)
        self._file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        self._open = ExitStack()
        self._start_part()

    def launch(self, plan: StepPlan) -> InflightStep:
        """See Runner.launch."""
        started_at = time.monotonic_ns()
        inflight = self._runner.launch(plan)
        self._steps.append((started_at, time.monotonic_ns() - started_at, plan))
        return inflight

    def write(self) -> int:
        """See StepRecorder.write."""
        if len(self._steps) < self._steps_wanted:
            return self._trace.tell()
        num_steps, num_bytes = len(self._steps), self._write_part()
        self._file.write(b",")
        self._steps_wanted = max(1, min(4 * num_steps, num_steps * _PART_BYTES // num_bytes))
        self._start_part()
        return self._trace.tell()

    def stop(self) -> bytes:
        """Wait for the device and return the trace."""
        self._write_part()
        self._file.write(b"]}")
        self._file.close()
        return self._trace.getvalue()

    def _start_part(self) -> None:
        device = "cuda" if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        # torch.profiler.profile would import the compiler first
        profile = torch.autograd.profiler.profile(use_device=device, use_kineto=True)
        self._profile = self._open.enter_context(profile)
        self._replays = self._open.enter_context(timed_replays())

    def _write_part(self) -> int:
        """Wait for the device, and append what the profiler saw and the events of the host. Return their bytes."""
        self._open.close()
        with tempfile.TemporaryDirectory(prefix="lineclear-") as folder:
            file = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(file))
            text = file.read_bytes()
        head, _, rest = text.partition(b'"traceEvents": [')
        base = re.search(rb'"baseTimeNanoseconds": (\d+)', head)
        assert base is not None, "a trace of the profiler"
        parts = [rest[: rest.rindex(b"]")]]
        parts += [json.dumps(event, separators=(",", ":")).encode() for event in self._host_events(int(base[1]))]
        events = b",".join(part for part in parts if not part.isspace())
        self._file.write(events)
        self._steps.clear()
        return len(events)

    def _host_events(self, base: int) -> Iterator[dict[str, Any]]:
        """Yield steps and CPU kernels as complete events. `base`: time 0 of the trace, in nanoseconds since 1970."""
        base -= time.time_ns() - time.monotonic_ns()  # noqa: TID251  the clock of the profiler
        thread = {"ph": "X", "pid": os.getpid(), "tid": threading.get_native_id()}

        def event(category: str, name: str, start: int, nanoseconds: int) -> dict[str, Any]:
            times = {"ts": (start - base) / 1000, "dur": nanoseconds / 1000}
            return {**thread, "cat": category, "name": name, **times}

        for start, nanoseconds, plan in self._steps:
            rows = {"step": plan.step, "rows": len(plan.rows), "tokens": plan.num_tokens}
            yield {**event("step", "step", start, nanoseconds), "args": rows}
        for start, calls in self._replays:
            for name, nanoseconds in calls:
                yield event("kernel", name, start, nanoseconds)
                start += nanoseconds
