"""A launched step: its outputs on their way to the host, how long it takes, and the result that is sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lineclear.process.exception_location import exception_summary
from lineclear.wire.messages import Logprobs, StepErrorKind, StepPlan, StepResult
from lineclear.worker.device.memory_budget import is_out_of_memory
from lineclear.worker.device.staging import to_host
from lineclear.worker.drafts.verification import Drafts, verified
from lineclear.worker.loop.runner_interface import StepFailed
from lineclear.worker.sampling.sampler import Sampled
from lineclear.worker.sampling.sampling_metadata import SamplingMetadata

from .scores_and_vectors import ReportedRows, to_result


class StepTimer:
    """Measures the duration of a step: with CUDA events on CUDA, with the host's clock elsewhere."""

    def __init__(self, device: torch.device, device_type: str) -> None:
        """`device_type` is that of `device`, which torch takes 10 µs or more to return."""
        self._device, self._device_type = device, device_type
        self._start_event = self._event()
        self._end_event: torch.cuda.Event | None = None
        self._started_at = time.perf_counter()
        self._stopped_at = self._started_at

    def stop(self) -> bool:
        """Record that all work of the step is queued. Returns whether it is also complete."""
        self._end_event = self._event()
        self._stopped_at = time.perf_counter()
        return self._device_type == "cpu"

    def is_over(self) -> bool:
        """Return whether the step is complete, so that `wait` returns at once."""
        return self._end_event is None or bool(self._end_event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> float:
        """Wait until the step is complete and return its seconds."""
        if self._start_event is None or self._end_event is None:
            return self._stopped_at - self._started_at
        self._end_event.synchronize()
        return float(self._start_event.elapsed_time(self._end_event)) / 1000

    def _event(self) -> torch.cuda.Event | None:
        if self._device_type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class StepOutputs(NamedTuple):
    """What a step has queued on its device. None marks rows of a kind that the step has not."""

    metadata: SamplingMetadata
    sampled: Sampled | None
    reported: ReportedRows | None
    drafts: Drafts
    """That the step verified."""
    learn: Callable[[Sequence[int]], None] | None = None
    """Takes the sampled tokens on the host."""


class LaunchedStep:
    """A launched step, whose outputs are being copied to the host."""

    is_complete: bool
    """True on a CPU, which computes during launch."""

    def __init__(self, plan: StepPlan, outputs: StepOutputs, draft_seconds: float, timer: StepTimer) -> None:
        """`draft_seconds`: time to make the drafts. Stops `timer`."""
        sampled = outputs.sampled
        self._plan, self._drafts, self._draft_seconds = plan, outputs.drafts, draft_seconds
        self._metadata, self._learn = outputs.metadata, outputs.learn
        self._reported: ReportedRows | None = to_host(outputs.reported)
        is_on_host = sampled is None or sampled.host_tokens is not None
        self._outputs: Sampled | None = sampled if is_on_host else to_host(sampled)
        self._timer = timer
        self.is_complete = timer.stop()
        # On a CPU the next step overwrites the memory of the outputs.
        self._result = self._finish() if self.is_complete else None

    def is_over(self) -> bool:
        """Return whether `result` waits for nothing."""
        return self.is_complete or self._timer.is_over()

    def result(self) -> StepResult:
        return self._result or self._finish()

    def _finish(self) -> StepResult:
        try:
            seconds = self._timer.wait()
        except Exception as error:  # CUDA errors are raised by the wait
            raise step_failed(error) from error
        result = self._sampled_result(seconds)
        return result if self._reported is None else _with_reported(result, self._plan, self._reported)

    def _sampled_result(self, seconds: float) -> StepResult:
        epoch, step = self._plan.epoch, self._plan.step
        if self._outputs is None:
            return StepResult(epoch, step, (), step_seconds=seconds)
        outputs = self._outputs
        result = StepResult(
            epoch=epoch,
            step=step,
            tokens=tuple(outputs.tokens.tolist() if outputs.host_tokens is None else outputs.host_tokens),
            logprobs=self._logprobs(outputs),
            bad_rows=rows_where(outputs.bad).difference(outputs.void),
            step_seconds=seconds,
            stuck_rows=rows_where(outputs.stuck).difference(outputs.deferred),
            deferred_rows=frozenset(outputs.deferred),
            draft_seconds=min(self._draft_seconds, seconds),
        )
        if self._learn is not None:
            self._learn(result.tokens)
        return verified(result, self._plan, self._drafts) if self._drafts else result

    def _logprobs(self, outputs: Sampled) -> tuple[Logprobs | None, ...]:
        reporting = self._metadata.logprobs
        if reporting is None or outputs.logprobs is None or outputs.top_ids is None or outputs.top_logprobs is None:
            return ()
        entries: list[Logprobs | None] = [None] * self._metadata.num_rows
        columns = (outputs.logprobs.tolist(), outputs.top_ids.tolist(), outputs.top_logprobs.tolist())
        rows = reporting.host_rows
        for row, count, chosen, ids, values in zip(rows, reporting.num_top, *columns, strict=True):
            entries[row] = Logprobs(chosen, tuple(zip(ids[:count], values[:count], strict=True)))
        if outputs.id_logprobs is not None:
            found = iter(outputs.id_logprobs.tolist())
            for row, own_ids in zip(rows, reporting.host_ids, strict=True):
                entry = entries[row]
                assert entry is not None
                entries[row] = entry._replace(top=entry.top + tuple((i, next(found)) for i in own_ids))
        return tuple(entries)


def _with_reported(result: StepResult, plan: StepPlan, reported: ReportedRows) -> StepResult:
    """Return the result with scores and vectors, and its bad rows counted among all rows with an output."""
    scores, vectors, bad = to_result(reported)
    outputs = [row.sample for row in plan.chunks if row.output]
    sampling = [*range(len(plan.decodes.slots)), *(i for i, x in enumerate(outputs, len(plan.decodes.slots)) if x)]
    others = [i for i, x in enumerate(outputs, len(plan.decodes.slots)) if not x]
    parts = result.bad_rows, result.stuck_rows, result.deferred_rows
    bad_rows, stuck, deferred = (frozenset(sampling[i] for i in rows) for rows in parts)
    bad_rows = bad_rows.union(others[i] for i in bad)
    result = replace(result, bad_rows=bad_rows, stuck_rows=stuck, deferred_rows=deferred)
    return replace(result, scores=scores, vectors=vectors)


def rows_where(bad: Tensor | None) -> frozenset[int]:
    """Return the rows for which `bad` [num_rows] is true. Waits for the device."""
    return frozenset() if bad is None else frozenset(row for row, is_bad in enumerate(bad.tolist()) if is_bad)


def step_failed(error: Exception) -> StepFailed:
    """Return the error with kind, type and source location, without its message."""
    if isinstance(error, StepFailed):
        return error
    kind = StepErrorKind.OUT_OF_MEMORY if is_out_of_memory(error) else StepErrorKind.EXCEPTION
    return StepFailed(kind, exception_summary(error))
