"""The worker's step loop: receives plans, launches them in order, and handles the scheduler's control messages.

Three threads. The calling thread launches plans, a collector waits for their results and sends them, a third one sends
heartbeats. One bounded queue lies between the first two, so a step can be launched while the previous one is still on
the device. On a CPU a result is complete when its launch returns, and is sent at once.

A worker joins for an *epoch*: a random number that it chooses, sends in its Hello and repeats in every message. Every
fault between the two processes ends the epoch, and the next one starts with empty slots.

After SIGTERM a joined worker drains: it sends Stopping and runs plans until the scheduler sends Goodbye, because no
request is left, or until the drain timeout. So both processes may be stopped in any order.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import FrameType

import structlog
import zmq

from lineclear.exit_codes import ExitCode
from lineclear.model_files.adapter_files import AdapterFilesRefused
from lineclear.process import logging_setup
from lineclear.process.exception_location import exception_fields
from lineclear.process.private_dir import SocketDir, private_socket_dir
from lineclear.wire.codec import ProtocolMismatch
from lineclear.wire.messages import (
    AdapterLoaded,
    Goodbye,
    LoadAdapter,
    PrepareGrammar,
    Rejoin,
    SetLogLevel,
    StepErrorKind,
    StepPlan,
    StepResult,
    Stopping,
    UnloadAdapter,
)
from lineclear.worker.loop.heartbeat import HeartbeatThread, StepProgress
from lineclear.worker.loop.result_collector import DeviceStuck, ResultCollector
from lineclear.worker.loop.runner_interface import InflightStep, Runner, StepFailed, StepRecorder
from lineclear.worker.loop.scheduler_link import PlanSocket, ResultSocket, Waker
from lineclear.worker.loop.step_profiler import StepProfiler

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoopLimits:
    heartbeat_seconds: float = 0.5
    max_inflight_steps: int = 8
    max_plan_bytes: int = 256 * 2**20
    linger_seconds: float = 1.0
    """How long the last message may take to be sent."""
    idle_seconds: float = 0.05
    """Time without a message after which the runner does idle work."""
    standby_seconds: float = 10.0
    """How long a refused worker waits before it tries again. The scheduler may send Rejoin earlier."""
    drain_timeout_seconds: float = 30.0
    """How long a joined worker runs plans after a stop signal."""


def run(
    runner: Runner,
    directory: Path,
    *,
    supervised: bool = False,
    limits: LoopLimits | None = None,
    make_recorder: Callable[[Runner], StepRecorder] | None = None,
) -> ExitCode:
    """Serve the scheduler that binds its sockets in `directory` until SIGTERM or SIGINT; return the exit code.

    A joined worker drains first (`LoopLimits.drain_timeout_seconds`); a second signal ends the process. Worker and
    scheduler start in any order, and the scheduler may restart. A refused worker stays connected and joins when the
    workers that leave no place for it are gone. One that may never join again exits if it is `supervised` (see
    lineclear.process.parent_death). `make_recorder` starts a recording of steps; without it, the worker refuses to
    profile. Call this on the main thread. Raises PathError for a directory that other users can
    access.
    """
    loop = _Loop(runner, private_socket_dir(directory), limits or LoopLimits(), make_recorder)
    with loop.stop_signals():
        try:
            return loop.run(supervised)
        finally:
            loop.close()


class _EpochEnd(Enum):
    STOPPED = 1
    REJOIN = 2
    REFUSED = 3
    DROPPED = 4
    BROKEN = 5
    MISMATCH = 6


_EXIT_CODES = {
    _EpochEnd.STOPPED: ExitCode.OK,
    _EpochEnd.DROPPED: ExitCode.DROPPED,
    _EpochEnd.BROKEN: ExitCode.INTERNAL,
    _EpochEnd.MISMATCH: ExitCode.CONFIGURATION,
}


class _Loop:
    """State of the launch thread."""

    def __init__(
        self,
        runner: Runner,
        sockets: SocketDir,
        limits: LoopLimits,
        make_recorder: Callable[[Runner], StepRecorder] | None = None,
    ) -> None:
        self._runner, self._sockets, self._limits = runner, sockets, limits
        self._stopping = False
        self._stop_requested_at = 0.0
        self._was_refused = False  # in the last epoch
        self._drain_ends_at: float | None = None
        self._instance = secrets.randbits(63)
        self._waker = Waker()
        self._progress = StepProgress()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._collector = ResultCollector(
            ResultSocket(self._context, sockets),
            self._progress,
            self._waker,
            max_inflight_steps=limits.max_inflight_steps,
            linger_seconds=limits.linger_seconds,
            is_overdue=self._is_overdue,
        )
        self._profiler = StepProfiler(runner, make_recorder, self._collector.send)
        # Heartbeats are not queued for a disconnected scheduler: old ones are useless.
        self._heartbeat = HeartbeatThread(
            ResultSocket(self._context, sockets, only_while_connected=True), self._progress, limits.heartbeat_seconds
        )

    @contextmanager
    def stop_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT: the first stops the loop, the second ends the process as usual."""

        def stop(number: int, frame: FrameType | None) -> None:
            self._stopping, self._stop_requested_at = True, time.monotonic()
            signal.signal(number, signal.SIG_DFL)

        previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        # Python runs a signal handler between two bytecodes of the main thread; the wake-up lets a blocked one
        # continue.
        signal.set_wakeup_fd(self._waker.wake_fileno, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def run(self, supervised: bool) -> ExitCode:
        """Serve one epoch after the other."""
        log.info("waiting_for_scheduler", directory=str(self._sockets.directory), supervised=supervised)
        while not self._stopping or self._drain_ends_at is not None:
            try:
                end = self._serve_epoch(supervised)
            except DeviceStuck:
                log.error("device_stuck", hint="the worker must stop and a step on the device does not finish")
                return ExitCode.INTERNAL
            self._was_refused = end is _EpochEnd.REFUSED
            if end in _EXIT_CODES:
                return _EXIT_CODES[end]
        return ExitCode.OK

    def close(self) -> None:
        """Stop the threads. The last message gets `linger_seconds` to be sent."""
        if self._heartbeat.stop() and self._collector.close():
            self._context.term()
        # Otherwise a step is stuck on the device, and the process exits without waiting for it.

    def _is_overdue(self) -> bool:
        """Return whether the drain and the last message exceed their timeouts."""
        timeout = self._limits.drain_timeout_seconds + self._limits.linger_seconds
        return self._stopping and time.monotonic() > self._stop_requested_at + timeout

    def _serve_epoch(self, supervised: bool) -> _EpochEnd:
        """Join with a new epoch and run its plans until it and its steps end. If refused, wait for Rejoin."""
        # Odd: ZeroMQ reserves identities whose first byte is zero.
        epoch = secrets.randbits(62) << 1 | 1
        self._profiler.abandon()
        self._runner.reset()
        plans = PlanSocket(self._context, self._sockets, epoch, self._waker, self._limits.max_plan_bytes)
        try:
            hello = self._runner.hello(epoch)
            self._collector.start_epoch(replace(hello, epoch=epoch, pid=os.getpid(), instance=self._instance))
            end = self._run_plans(plans)
            failure = self._collector.wait_idle()
            if failure is StepErrorKind.OUT_OF_MEMORY and end is not _EpochEnd.STOPPED:
                end = _EpochEnd.REJOIN
            elif failure is not None:
                end = _EpochEnd.BROKEN
            if end is _EpochEnd.STOPPED:
                self._collector.send(Goodbye(epoch, "the worker was stopped"))
            elif end is _EpochEnd.DROPPED and not supervised:
                end = _EpochEnd.REFUSED
            if end is _EpochEnd.REFUSED:
                end = self._wait_for_rejoin(plans)
        finally:
            plans.close()
        log.info("epoch_ended", epoch=epoch, reason=end.name.lower(), num_bad_frames=plans.num_bad_frames)
        return end

    def _run_plans(self, plans: PlanSocket) -> _EpochEnd:
        last_step = 0
        timeout_seconds: float | None = self._limits.idle_seconds
        is_stopping_sent = False
        while True:
            try:
                message = plans.receive(self._within_drain(timeout_seconds))
            except ProtocolMismatch as error:
                log.error("protocol_mismatch", problem=str(error), hint="both must be of one release")
                return _EpochEnd.MISMATCH
            if self._stopping:
                if isinstance(message, Goodbye | Rejoin) or not self._may_drain(plans):
                    return _EpochEnd.STOPPED
                if not is_stopping_sent:
                    self._collector.send(Stopping(plans.epoch))
                    is_stopping_sent = True
            if self._collector.failure is not None or isinstance(message, Rejoin):
                self._collector.discard()
                return _EpochEnd.REJOIN
            if isinstance(message, Goodbye):
                if not self._was_refused:
                    log.warning("join_refused", reason=message.reason)
                self._collector.discard()
                return _EpochEnd.DROPPED if message.is_final else _EpochEnd.REFUSED
            if isinstance(message, StepPlan):
                last_step, timeout_seconds = self._launch(message, last_step), self._limits.idle_seconds
            elif message is None:  # idle work runs in slices of milliseconds, so that the next message hardly waits
                timeout_seconds = 0.0 if self._runner.idle_work() else None
            elif isinstance(message, SetLogLevel):
                logging_setup.set_level(message.level.name.lower())
            elif isinstance(message, LoadAdapter):
                if not self._load_adapter(message):
                    return _EpochEnd.BROKEN
            elif isinstance(message, UnloadAdapter):
                self._runner.unload_adapter(message.index)
            elif isinstance(message, PrepareGrammar):
                done = partial(self._progress.on_prepared, message.epoch, message.number)
                self._runner.prepare(message.grammar, done)
            else:
                self._profiler.follow(message)

    def _load_adapter(self, message: LoadAdapter) -> bool:
        """Load an adapter between two steps, and answer. Return False if the device has failed: the worker must end."""
        problem = ""
        try:
            self._runner.load_adapter(message.index, message.key, message.path)
        except AdapterFilesRefused as error:
            problem = str(error)
        except StepFailed as failed:
            log.error("step_failed", kind=failed.kind.name.lower(), summary=failed.summary, **exception_fields(failed))
            return False
        except Exception as error:
            log.error("adapter_failed", **exception_fields(error))
            problem = f"the worker cannot load it: {type(error).__name__}"
        log.info("adapter_loaded", index=message.index, key=message.key.hex()[:16], problem=problem)
        self._collector.send(AdapterLoaded(message.epoch, message.index, message.key, problem))
        return True

    def _wait_for_rejoin(self, plans: PlanSocket) -> _EpochEnd:
        """Stay connected until Rejoin, until the scheduler disconnects, or for `standby_seconds`."""
        ends_at = time.monotonic() + self._limits.standby_seconds
        while not self._stopping and plans.is_connected() and (remaining := ends_at - time.monotonic()) > 0:
            try:
                message = plans.receive(remaining)
            except ProtocolMismatch as error:
                log.error("protocol_mismatch", problem=str(error), hint="both must be of one release")
                return _EpochEnd.MISMATCH
            if isinstance(message, Rejoin):
                return _EpochEnd.REJOIN
        return _EpochEnd.REFUSED

    def _may_drain(self, plans: PlanSocket) -> bool:
        """Return whether a stopping worker runs further plans. The first call starts the drain timeout."""
        now = time.monotonic()
        is_joined = plans.is_connected()
        if self._drain_ends_at is None and is_joined:
            self._drain_ends_at = now + self._limits.drain_timeout_seconds
            log.info("stopping", drain_timeout_seconds=self._limits.drain_timeout_seconds)
        return is_joined and self._drain_ends_at is not None and now < self._drain_ends_at

    def _within_drain(self, timeout_seconds: float | None) -> float | None:
        if self._drain_ends_at is None:
            return timeout_seconds
        remaining = max(0.0, self._drain_ends_at - time.monotonic())
        return remaining if timeout_seconds is None else min(timeout_seconds, remaining)

    def _launch(self, plan: StepPlan, last_step: int) -> int:
        """Launch a plan; return the last step that was launched. No plan behind one that failed can be."""
        self._progress.on_launch(plan.step)
        inflight: InflightStep
        if plan.step != last_step + 1:
            # The plan depends on steps that never ran here, so it must not run.
            inflight = _FailedStep(StepFailed(StepErrorKind.PROTOCOL, f"plan {plan.step} came after plan {last_step}"))
        else:
            try:
                inflight, last_step = self._profiler.launch(plan), plan.step
            except Exception as error:  # the collector reports it behind the previous steps
                inflight = _FailedStep(error)
        self._collector.collect(plan.step, inflight)
        return last_step


class _FailedStep:
    """An in-flight step of a plan that failed to launch."""

    is_complete = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepResult:
        raise self._error
