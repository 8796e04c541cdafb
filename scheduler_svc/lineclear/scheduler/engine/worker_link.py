"""The scheduler's end of the plan protocol: the ZeroMQ sockets.

Two sockets, one direction each. Plans: ROUTER -> DEALER, addressed by epoch, so a plan reaches only its own worker.
Messages: PUSH -> PULL, in the order the worker sent them. `WorkerRegistry` handles them.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from lineclear.process.logging_setup import should_log
from lineclear.process.private_dir import PathError, SocketDir, private_socket_dir, remove_stale_socket
from lineclear.scheduler.engine.engine_stats import LinkCounters
from lineclear.scheduler.engine.worker_registry import WorkerRegistry
from lineclear.scheduler.engine.worker_session import Fact, Output, Send
from lineclear.wire.codec import DecodeError, ProtocolMismatch, decode, encode
from lineclear.wire.messages import PROTOCOL, ControlMessage, EpochMessage, Heartbeat, Hello, StepPlan

log = structlog.get_logger()

_MAX_FRAMES_PER_RECEIVE = 256
_PROBE_DELAYS_SECONDS = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
"""When to probe connections after a change: the sockets learn of it a little later."""
_MAX_WAIT_SECONDS = 3600.0
"""Longest single wait. poll() takes milliseconds in a C int, and callers choose deadlines that are years ahead."""


class WorkerGone(Exception):
    """The worker of a plan has no connection, or does not read."""


class WorkerLink:
    """Owned by one thread at a time; only wake() may be called from others.

    Raises PathError when the directory or the sockets in it cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_plans_in_flight: int = 8,
        max_message_bytes: int = 16 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = LinkCounters()
        self._clock = clock
        self._probes: deque[float] = deque()
        held = contextlib.ExitStack()
        # Runs also for a link that is never closed. The garbage collector would end the context before the sockets, and
        # block forever.
        self._released = weakref.finalize(self, held.close)
        self._released.atexit = False
        self._is_abandoned = False
        self._wake_lock = threading.Lock()
        try:
            sockets = _own(directory, held)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            held.callback(context.term)
            self._plans = held.enter_context(context.socket(zmq.ROUTER))
            self._results = held.enter_context(context.socket(zmq.PULL))
            events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            self._monitor = held.enter_context(self._plans.get_monitor_socket(events))
            _configure(self._plans, self._results, max_plans_in_flight, max_message_bytes)
            for socket, path in ((self._plans, sockets.plan), (self._results, sockets.result)):
                _bind(socket, path)
                held.callback(_remove, path)
            self._wake_fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            held.callback(os.close, self._wake_fd)
        except BaseException:
            self._released()
            raise
        self._poller = zmq.Poller()
        for source in (self._plans, self._results, self._monitor, self._wake_fd):
            self._poller.register(source, zmq.POLLIN)

    def close(self) -> None:
        """Close and remove the sockets. Idempotent."""
        if self._is_abandoned:
            return
        with self._wake_lock:
            self._wake_fd = None
        self._released()

    def abandon(self) -> None:
        """Leave the sockets open until the process ends: a thread that does not end may still use them."""
        self._is_abandoned = True

    # --- waiting ----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make wait() return, now or the next time. Any thread; never blocks."""
        with self._wake_lock:
            if self._wake_fd is not None:
                with contextlib.suppress(BlockingIOError):  # written 2**64 - 2 times already: the thread is awake
                    os.eventfd_write(self._wake_fd, 1)

    def wait(self, until: float | None = None) -> None:
        """Block until something can be received, wake() is called, or the clock reads `until`; an hour at most."""
        until = math.inf if until is None else until
        if self._probes:
            until = min(self._probes[0], until)
        timeout_ms = math.ceil(min(_MAX_WAIT_SECONDS, max(0.0, until - self._clock())) * 1000)
        for source, _ in self._poller.poll(timeout_ms):
            if source == self._wake_fd:
                os.eventfd_read(source)

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(self, plan: StepPlan) -> None:
        """Send a plan to the worker of its epoch. Raises WorkerGone if that is not possible."""
        begin = time.perf_counter()
        frame = encode(plan)
        self.counters.encode_seconds += time.perf_counter() - begin
        if problem := self._post(plan.epoch, frame):
            raise WorkerGone(zmq.strerror(problem))
        self.counters.plans += 1
        self.counters.bytes_sent += len(frame)

    def send_control(self, message: ControlMessage) -> bool:
        """Send a message to the worker of its epoch; return False if that is not possible now."""
        return not self._post(message.epoch, encode(message))

    def perform(self, outputs: Iterable[Output]) -> list[Fact]:
        """Send the messages among the outputs of a WorkerRegistry and return the others."""
        facts: list[Fact] = []
        for output in outputs:
            if isinstance(output, Send):
                self.send_control(output.message)
            else:
                facts.append(output)
        return facts

    def is_reachable(self, epoch: int) -> bool:
        """Whether the worker of that epoch has a connection, joined or not, alive or hung."""
        # A ROUTER reports whether a peer is connected only when it sends. Workers ignore a heartbeat.
        return self._post(epoch, encode(Heartbeat(epoch, 0))) != zmq.EHOSTUNREACH

    def _post(self, epoch: int, frame: bytes) -> int:
        """Send to the worker of that epoch. Returns 0, or an error number.

        EHOSTUNREACH: it has no connection. EAGAIN: it has more messages to read than can be in flight.
        """
        try:
            self._plans.send_multipart((_identity(epoch), frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return int(error.errno)
        return 0

    # --- receiving --------------------------------------------------------------------------------------------------

    def receive(self, workers: WorkerRegistry, now: float) -> Iterator[Fact]:
        """Pass messages and connection changes to `workers` one by one and yield the resulting facts. Never blocks.

        A message is passed on after the caller has handled the facts of the message before. Bad frames are counted and
        dropped. Raises ProtocolMismatch if a frame of another release arrives while no worker is joined.
        """
        for _ in range(_MAX_FRAMES_PER_RECEIVE):
            if not _is_readable(self._results):
                break
            message = self._decode(self._results.recv_multipart(zmq.NOBLOCK), is_fatal=not workers.joined)
            if isinstance(message, Hello):
                self._schedule_probes(now)  # a plan may not reach it yet: its other socket may be a moment behind
            if message is not None:
                yield from self.perform(workers.on_message(message, now))
        if _is_readable(self._plans):
            self._discard_unexpected()
        if _is_readable(self._monitor):
            self._read_monitor(now)
        is_due = bool(self._probes) and now >= self._probes[0]
        while self._probes and self._probes[0] <= now:
            self._probes.popleft()
        if is_due or workers.has_hung:
            for session in workers.to_probe(have_connections_changed=is_due):
                yield from self.perform(workers.on_probe(session, self.is_reachable(session.epoch), now))
        if workers.is_connecting and not self._probes:
            self._probes.append(now + _PROBE_DELAYS_SECONDS[-1])

    def _decode(self, parts: list[bytes], *, is_fatal: bool) -> Hello | EpochMessage | None:
        begin = time.perf_counter()
        try:
            if len(parts) != 1:
                raise DecodeError("a frame in several parts")
            message = decode(parts[0])
        except DecodeError as error:
            self.counters.bad_frames += 1
            count = self.counters.bad_frames
            if isinstance(error, ProtocolMismatch) and is_fatal:
                log.error("protocol_mismatch", theirs=error.theirs, ours=PROTOCOL, hint="both must be of one release")
                raise
            if should_log(count):
                log.warning("bad_frame", problem=str(error), num_bad_frames=count)
            return None
        finally:
            self.counters.decode_seconds += time.perf_counter() - begin
            self.counters.bytes_received += sum(map(len, parts))
        self.counters.messages += 1
        return message if isinstance(message, Hello | EpochMessage) else None

    def _discard_unexpected(self) -> None:
        for _ in range(_MAX_FRAMES_PER_RECEIVE):
            if not _is_readable(self._plans):
                return
            self._plans.recv_multipart(zmq.NOBLOCK)
            self.counters.bad_frames += 1

    def _read_monitor(self, now: float) -> None:
        while _is_readable(self._monitor):
            recv_monitor_message(self._monitor)
        self._schedule_probes(now)

    def _schedule_probes(self, now: float) -> None:
        self._probes = deque(now + delay for delay in _PROBE_DELAYS_SECONDS)


def _own(directory: Path, held: contextlib.ExitStack) -> SocketDir:
    """Check and lock the directory for this process until `held` closes; remove the sockets of a dead scheduler."""
    sockets = private_socket_dir(directory)
    lock_fd = os.open(sockets.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    held.callback(os.close, lock_fd)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PathError(
            f"another scheduler uses the socket directory {sockets.directory}; give each one its own"
        ) from None
    remove_stale_socket(sockets.plan)
    remove_stale_socket(sockets.result)
    return sockets


def _configure(
    plans: zmq.Socket[bytes], results: zmq.Socket[bytes], max_plans_in_flight: int, max_message_bytes: int
) -> None:
    plans.set(zmq.ROUTER_MANDATORY, 1)
    plans.set(zmq.SNDHWM, max_plans_in_flight + 8)  # with space for Rejoin and probes
    plans.set(zmq.MAXMSGSIZE, 1024)  # workers send nothing on this socket
    results.set(zmq.RCVHWM, 256)
    results.set(zmq.MAXMSGSIZE, max_message_bytes)
    for socket in (plans, results):
        socket.set(zmq.LINGER, 0)


def _bind(socket: zmq.Socket[bytes], path: Path) -> None:
    try:
        socket.bind(f"ipc://{path}")
    except zmq.ZMQError as error:
        raise PathError(f"cannot bind {path}: {error.strerror}; is the directory writable?") from error


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # already removed by ZeroMQ, or with the directory
        path.unlink()


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(cast(int, socket.get(zmq.EVENTS)) & zmq.POLLIN)


def _identity(epoch: int) -> bytes:
    return epoch.to_bytes(8, "little")
