"""Records steps with the profiler of PyTorch, which sees its own operations, and CUDA kernels also in graphs.

The calls of a captured graph of CPU kernels are added, as events inside those of their step.
"""

from __future__ import annotations

import gzip
import json
import os
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

_SILENT = "6"  # otherwise the profiler writes to standard error, which has one line of JSON for each event


class TorchStepRecorder:
    """A StepRecorder (lineclear.worker.loop.runner_interface) of this process and its device."""

    def __init__(self, runner: Runner) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
        self._runner = runner
        self._steps: list[tuple[int, int, StepPlan]] = []  # start by the monotonic clock, and nanoseconds
        self._open = ExitStack()
        self._profile = self._open.enter_context(torch.profiler.profile())
        self._replays = self._open.enter_context(timed_replays())

    def launch(self, plan: StepPlan) -> InflightStep:
        """See Runner.launch."""
        started_at = time.monotonic_ns()
        inflight = self._runner.launch(plan)
        self._steps.append((started_at, time.monotonic_ns() - started_at, plan))
        return inflight

    def stop(self) -> bytes:
        """Wait for the device and return the trace."""
        with self._open:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
        with tempfile.TemporaryDirectory(prefix="lineclear-") as folder:
            file = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(file))
            recorded = json.loads(file.read_bytes())
        events = recorded["traceEvents"]
        events += self._host_events(recorded.get("baseTimeNanoseconds", 0))
        trace = {"displayTimeUnit": "ms", "traceEvents": events}
        return gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), 6)

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
