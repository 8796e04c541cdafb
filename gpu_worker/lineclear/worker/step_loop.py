"""The worker's loop: plans in, results out, in order. Decides what a message means and when to leave; computes nothing.

Three threads. The calling one launches plans; a collector waits for their results and sends them; a third one sends
heartbeats. Between the first two stands one bounded queue, so that a step can be launched while the one before it is
still on the device. Where the device is the processor itself, a result is there as soon as its plan has been launched,
and is sent at once.

A worker takes part for an *epoch*: a random number of its own choosing that it says in its Hello and carries in every
message. Whatever goes wrong between the two processes ends the epoch; in the next one the worker remembers nothing.

SIGTERM starts a drain where the worker is joined: it sends Stopping and runs plans until the scheduler answers with
Goodbye, because nothing is left to run, or until the drain timeout. So both processes may be told to stop in any order.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import FrameType

import structlog
import zmq

from lineclear.exit_codes import ExitCode
from lineclear.process import logging_setup
from lineclear.process.socket_dir import SocketDir, private_socket_dir
from lineclear.wire.codec import ProtocolMismatch
from lineclear.wire.messages import Goodbye, Rejoin, SetLogLevel, StepErrorKind, StepPlan, StepResult, Stopping
from lineclear.worker.heartbeat import HeartbeatThread, StepProgress
from lineclear.worker.result_collector import FlightsStuck, ResultCollector
from lineclear.worker.runner_interface import InflightStep, Runner, StepFailed
from lineclear.worker.scheduler_link import PlanSocket, ResultSocket, Waker

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """The loop's bounds."""

    heartbeat_seconds: float = 0.5
    max_plans_in_flight: int = 8
    max_plan_bytes: int = 256 * 2**20
    farewell_seconds: float = 1.0
    """How long the last message may take to leave."""
    idle_seconds: float = 0.05
    """How long no order must have come before the runner prepares for later ones."""
    standby_seconds: float = 10.0
    """How long a worker that was refused waits before it asks again by itself. The scheduler sends it Rejoin as soon as
    the joined worker is gone."""
    drain_timeout_seconds: float = 30.0
    """How long a joined worker that was told to stop runs plans for its scheduler."""


def run(runner: Runner, directory: Path, *, supervised: bool = False, limits: LoopLimits | None = None) -> ExitCode:
    """Serve the scheduler that binds its sockets in `directory` until SIGTERM or SIGINT; return the exit code.

    A joined worker drains first (`LoopLimits.drain_timeout_seconds`), and a second signal ends the process. Worker and
    scheduler start in any order, and the scheduler may restart. A refused worker exits if it is `supervised` (see
    lineclear.process.parent_death). Otherwise it stays connected and takes over when the joined worker is gone. Call it
    on the main thread. Raises SocketError for a directory that cannot be trusted.
    """
    loop = _Loop(runner, private_socket_dir(directory), limits or LoopLimits())
    with loop.stop_signals():
        try:
            return loop.run(supervised)
        finally:
            loop.close()


class _EpochEnd(Enum):
    """How an epoch ended."""

    STOPPED = 1
    REJOIN = 2
    REFUSED = 3
    BROKEN = 4
    MISMATCH = 5


_EXIT_AFTER = {
    _EpochEnd.STOPPED: ExitCode.OK,
    _EpochEnd.REFUSED: ExitCode.ALREADY_JOINED,
    _EpochEnd.BROKEN: ExitCode.INTERNAL,
    _EpochEnd.MISMATCH: ExitCode.CONFIGURATION,
}


class _Loop:
    """The launch thread's view of everything."""

    def __init__(self, runner: Runner, sockets: SocketDir, limits: LoopLimits) -> None:
        self._runner = runner
        self._sockets = sockets
        self._limits = limits
        self._stopping = False
        self._stop_requested_at = 0.0  # when it was told to stop
        self._is_refused = False  # in the last epoch
        self._drain_ends_at: float | None = None
        self._instance = secrets.randbits(63)
        self._waker = Waker()
        self._progress = StepProgress()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._collector = ResultCollector(
            ResultSocket(self._context, sockets),
            self._progress,
            self._waker,
            max_flights=limits.max_plans_in_flight,
            farewell_seconds=limits.farewell_seconds,
            is_overdue=self._is_overdue,
        )
        # Heartbeats are worth nothing later: they are not kept for a scheduler that is away.
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
        # A handler runs between two bytecodes of the main thread; this makes sure that there is a next one.
        signal.set_wakeup_fd(self._waker.fileno_to_ring, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def run(self, supervised: bool) -> ExitCode:
        """One epoch after the other."""
        log.info("waiting_for_a_scheduler", directory=str(self._sockets.directory), supervised=supervised)
        while not self._stopping or self._drain_ends_at is not None:
            try:
                ending = self._serve_epoch(supervised)
            except FlightsStuck:
                log.error("device_stuck", hint="it was told to stop and a step on the device does not end")
                return ExitCode.INTERNAL
            self._is_refused = ending is _EpochEnd.REFUSED
            if ending is not _EpochEnd.REJOIN and (supervised or not self._is_refused):
                return _EXIT_AFTER[ending]
        return ExitCode.OK

    def close(self) -> None:
        """End the threads; the last message gets `farewell_seconds` to leave."""
        if self._heartbeat.stop() and self._collector.close():
            self._context.term()
        # Else a flight never landed. The process is about to exit; waiting for the device would keep it from that.

    def _is_overdue(self) -> bool:
        """Return whether the worker was told to stop longer ago than its drain and its farewell may take."""
        patience = self._limits.drain_timeout_seconds + self._limits.farewell_seconds
        return self._stopping and time.monotonic() > self._stop_requested_at + patience

    def _serve_epoch(self, supervised: bool) -> _EpochEnd:
        """Join with a new epoch and run its plans until it ends. Nothing is in flight when this returns.

        A worker that is refused, and not supervised, waits here for its place.
        """
        # Odd, because an identity whose first byte is zero belongs to ZeroMQ.
        epoch = secrets.randbits(62) << 1 | 1
        self._runner.reset()
        plans = PlanSocket(self._context, self._sockets, epoch, self._waker, self._limits.max_plan_bytes)
        try:
            hello = self._runner.hello(epoch)
            self._collector.begin(replace(hello, epoch=epoch, pid=os.getpid(), instance=self._instance))
            ending = self._run_plans(plans)
            failure = self._collector.wait_idle()
            if failure is StepErrorKind.OUT_OF_MEMORY and ending is not _EpochEnd.STOPPED:
                ending = _EpochEnd.REJOIN
            elif failure is not None:
                ending = _EpochEnd.BROKEN
            if ending is _EpochEnd.STOPPED:
                self._collector.send(Goodbye(epoch, "the worker was told to stop"))
            elif ending is _EpochEnd.REFUSED and not supervised:
                ending = self._wait_for_place(plans)
        finally:
            plans.close()
        log.info("epoch_ended", epoch=epoch, ending=ending.name.lower(), num_bad_frames=plans.num_bad_frames)
        return ending

    def _run_plans(self, plans: PlanSocket) -> _EpochEnd:
        last_step = 0
        patience_seconds: float | None = self._limits.idle_seconds
        is_stopping_sent = False
        while True:
            try:
                order = plans.receive(self._within_drain(patience_seconds))
            except ProtocolMismatch as error:
                log.error("protocol_mismatch", problem=str(error), hint="both must be of one release")
                return _EpochEnd.MISMATCH
            if self._stopping:
                if isinstance(order, Goodbye | Rejoin) or not self._may_drain(plans):
                    return _EpochEnd.STOPPED
                if not is_stopping_sent:
                    self._collector.send(Stopping(plans.epoch))
                    is_stopping_sent = True
            if self._collector.failure is not None or isinstance(order, Rejoin):
                self._collector.discard()
                return _EpochEnd.REJOIN
            if isinstance(order, Goodbye):
                if not self._is_refused:
                    log.warning("refused", reason=order.reason)
                self._collector.discard()
                return _EpochEnd.REFUSED
            if isinstance(order, SetLogLevel):
                logging_setup.set_level(order.level.name.lower())
            elif order is not None:
                self._launch(order, last_step)
                last_step, patience_seconds = order.step, self._limits.idle_seconds
            else:  # in small pieces, so that an order that comes meanwhile hardly waits
                patience_seconds = 0.0 if self._runner.idle_work() else None

    def _wait_for_place(self, plans: PlanSocket) -> _EpochEnd:
        """Stay connected until the scheduler sends Rejoin or is gone, or `standby_seconds` are over."""
        ends_at = time.monotonic() + self._limits.standby_seconds
        while not self._stopping and plans.is_connected() and (remaining := ends_at - time.monotonic()) > 0:
            try:
                order = plans.receive(remaining)
            except ProtocolMismatch as error:
                log.error("protocol_mismatch", problem=str(error), hint="both must be of one release")
                return _EpochEnd.MISMATCH
            if isinstance(order, Rejoin):
                return _EpochEnd.REJOIN
        return _EpochEnd.REFUSED

    def _may_drain(self, plans: PlanSocket) -> bool:
        """Whether a worker that was told to stop runs further plans. The first call starts the drain timeout."""
        now = time.monotonic()
        is_joined = plans.is_connected()
        if self._drain_ends_at is None and is_joined:
            self._drain_ends_at = now + self._limits.drain_timeout_seconds
            log.info("stopping", drain_timeout_seconds=self._limits.drain_timeout_seconds)
        return is_joined and self._drain_ends_at is not None and now < self._drain_ends_at

    def _within_drain(self, patience_seconds: float | None) -> float | None:
        if self._drain_ends_at is None:
            return patience_seconds
        remaining = max(0.0, self._drain_ends_at - time.monotonic())
        return remaining if patience_seconds is None else min(patience_seconds, remaining)

    def _launch(self, plan: StepPlan, last_step: int) -> None:
        self._progress.launching(plan.step)
        flight: InflightStep
        if plan.step != last_step + 1:
            # Its rows build on steps that never ran here. Nothing may be computed from it.
            flight = _FailedStep(StepFailed(StepErrorKind.PROTOCOL, f"plan {plan.step} came after plan {last_step}"))
        else:
            try:
                flight = self._runner.launch(plan)
            except Exception as error:  # reported by the collector, behind the steps before it
                flight = _FailedStep(error)
        self._collector.collect(plan.step, flight)


class _FailedStep:
    """The flight of a plan that was never launched."""

    is_over = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepResult:
        """Raises why."""
        raise self._error
