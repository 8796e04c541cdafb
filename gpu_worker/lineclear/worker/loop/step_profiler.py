"""Launches plans, and records what they do while the scheduler asks for it."""

from __future__ import annotations

from collections.abc import Callable

from lineclear.process.exception_location import exception_summary
from lineclear.wire.messages import Profile, Profiled, StepPlan
from lineclear.worker.loop.runner_interface import InflightStep, Runner, StepRecorder

MAX_TRACE_BYTES = 4_000_000
"""A response of the admin API has at most 4 MiB."""

_FULL_TRACE_BYTES = 3 * MAX_TRACE_BYTES // 4
"""Ends a recording early: the part that is not written yet has room."""


class StepProfiler:
    """Owned by the launch thread. `send` takes the answers; `make_recorder` starts a recording, where that can be."""

    def __init__(
        self,
        runner: Runner,
        make_recorder: Callable[[Runner], StepRecorder] | None,
        send: Callable[[Profiled], None],
    ) -> None:
        self._runner, self._make_recorder, self._send = runner, make_recorder, send
        self.launch: Callable[[StepPlan], InflightStep] = runner.launch
        """Launches a plan (`Runner.launch`)."""
        self._recorder: StepRecorder | None = None
        self._epoch = self._num_wanted = self._num_steps = 0

    def follow(self, message: Profile) -> None:
        """Start to record the next steps, or end that early."""
        if not message.num_steps:
            self._finish()
            return
        self.abandon()
        self._epoch, self._num_wanted, self._num_steps = message.epoch, message.num_steps, 0
        try:
            self._recorder = None if self._make_recorder is None else self._make_recorder(self._runner)
            problem = "this worker cannot record steps" if self._recorder is None else ""
        except Exception as error:
            problem = f"the worker cannot record steps: {exception_summary(error)}"
        if problem:
            self._send(Profiled(self._epoch, problem=problem))
        else:
            self.launch = self._launch_recorded

    def abandon(self) -> None:
        """End a recording, if one is running, without an answer."""
        recorder, self._recorder = self._recorder, None
        self.launch = self._runner.launch
        if recorder is not None:
            _stopped(recorder)

    def _launch_recorded(self, plan: StepPlan) -> InflightStep:
        assert self._recorder is not None
        inflight = self._recorder.launch(plan)
        self._num_steps += 1
        try:
            if self._num_steps == self._num_wanted or self._recorder.write() > _FULL_TRACE_BYTES:
                self._finish()
        except Exception as error:
            self.abandon()
            self._send(Profiled(self._epoch, problem=_cannot_write(error)))
        return inflight

    def _finish(self) -> None:
        recorder, self._recorder = self._recorder, None
        self.launch = self._runner.launch
        if recorder is None:
            return
        trace, problem = _stopped(recorder)
        if not self._num_steps:
            problem = "no step ran meanwhile: send requests while it records"
        elif len(trace) > MAX_TRACE_BYTES:
            problem = f"{self._num_steps} steps are {len(trace)} bytes, the limit is {MAX_TRACE_BYTES}; record fewer"
        self._send(Profiled(self._epoch, self._num_steps, b"" if problem else trace, problem))


def _stopped(recorder: StepRecorder) -> tuple[bytes, str]:
    """Return the trace, or the problem."""
    try:
        return recorder.stop(), ""
    except Exception as error:
        return b"", _cannot_write(error)


def _cannot_write(error: Exception) -> str:
    return f"the worker cannot write the trace: {exception_summary(error)}"
