"""The scheduler's end of the plan protocol: sockets, epochs, and who may speak.

Decides which worker is joined, drops whatever another one says, and notices when the joined one's connection is gone.
Knows nothing of requests or deadlines: the engine decides what a message means, and when silence is too long.

Two sockets, one direction each: plans ROUTER -> DEALER, addressed by epoch, so that a plan can reach no worker but the
one it was made for; messages PUSH -> PULL, in the order the worker sent them.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from lineclear.process.socket_dir import SocketDir, SocketError, private_socket_dir, unlink_stale
from lineclear.wire.codec import DecodeError, ProtocolMismatch, decode, encode
from lineclear.wire.messages import (
    PROTOCOL,
    Goodbye,
    Heartbeat,
    Hello,
    Rejoin,
    SetLogLevel,
    StepError,
    StepPlan,
    StepResult,
    Stopping,
)

log = structlog.get_logger()

CLOSED = "its connection closed"
"""The reason of a Goodbye that the worker did not say: its end of the connection is gone."""
Arrival = Hello | StepResult | StepError | Goodbye | Stopping
"""What receive() returns: a worker joined, a step ended, the joined worker left or was told to stop."""

_MAX_FRAMES_PER_RECEIVE = 256
_PROBE_DELAYS_SECONDS = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
"""When to look whether a peer is there, after the connections changed. Sockets learn of a change a little after it."""
_PENDING_SECONDS = 5.0
"""How long a worker that said Hello may take to connect its other socket. Its heartbeats start over after that."""
_MAX_WAITING_WORKERS = 16
"""How many refused workers are told when the place is free. Further ones find out when they ask again."""
_MAX_WAIT_SECONDS = 3600.0
"""Longest single wait. poll() takes milliseconds in a C int, and callers choose deadlines that are years ahead."""


class WorkerGone(Exception):
    """The joined worker has no connection any more."""


@dataclass(slots=True)
class LinkCounters:
    """Totals since the link was opened. Written by the thread that owns the link."""

    plans: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    messages: int = 0
    bad_frames: int = 0
    stale_messages: int = 0
    refused_workers: int = 0


class WorkerLink:
    """Owned by one thread at a time; only wake() may be called from others.

    Raises SocketError when the directory or the sockets in it cannot be used.
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
        self.last_heard = 0.0
        """When the joined worker last said anything, on `clock`."""
        self._clock = clock
        self._epoch: int | None = None
        self._instance = 0  # the process that joined last
        self._pending: Hello | None = None
        self._pending_since = 0.0
        # Epochs that are over: a Hello of theirs that is still under way must not open them again.
        self._closed: deque[int] = deque(maxlen=64)
        self._plan_socket_closed_epoch: int | None = (
            None  # no plan reaches its worker any more, whose last words may be on their way
        )
        self._blocked_instances: deque[int] = deque(
            maxlen=64
        )  # instances of processes that are dead, or as good as dead
        self._waiting: dict[int, int] = {}  # refused because another is joined: instance to its last epoch
        self._probes: deque[float] = deque()
        held = contextlib.ExitStack()
        # Also of a link that is forgotten. The garbage collector would end the context before the sockets, and wait for
        # them for ever.
        self._released = weakref.finalize(self, held.close)
        self._released.atexit = False
        self._is_abandoned = False
        try:
            sockets = _own(directory, held)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            held.callback(context.term)
            self._plans = held.enter_context(context.socket(zmq.ROUTER))
            self._plans.set(zmq.ROUTER_MANDATORY, 1)
            self._plans.set(zmq.SNDHWM, max_plans_in_flight + 8)  # and some room for Rejoin and probes
            self._plans.set(zmq.MAXMSGSIZE, 1024)  # workers send nothing this way
            self._results = held.enter_context(context.socket(zmq.PULL))
            self._results.set(zmq.RCVHWM, 256)
            self._results.set(zmq.MAXMSGSIZE, max_message_bytes)
            events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            self._monitor = held.enter_context(self._plans.get_monitor_socket(events))
            for socket, path in ((self._plans, sockets.plan), (self._results, sockets.result)):
                socket.set(zmq.LINGER, 0)
                _bind(socket, path)
                held.callback(_remove, path)
            self._wake_lock = threading.Lock()
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
        """Leave the sockets to the end of the process: a thread that does not end may still use them."""
        self._is_abandoned = True

    # --- waiting ----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make wait() return, now or the next time. Any thread; never blocks."""
        with self._wake_lock:
            if self._wake_fd is not None:
                with contextlib.suppress(BlockingIOError):  # rung 2**64 - 2 times already: it is awake
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
        """Send a plan to the joined worker. Raises WorkerGone if that has no connection (any more)."""
        assert plan.epoch == self._epoch, "a plan for a worker that is not joined"
        begin = time.perf_counter()
        frame = encode(plan)
        self.counters.encode_seconds += time.perf_counter() - begin
        if problem := self._post(plan.epoch, frame):
            raise WorkerGone(zmq.strerror(problem))
        self.counters.plans += 1
        self.counters.bytes_sent += len(frame)

    def send_control(self, order: SetLogLevel | Goodbye) -> bool:
        """Send what is no plan to the worker of its epoch; False if that cannot be done now."""
        return not self._post(order.epoch, encode(order))

    def end_epoch(self, epoch: int) -> None:
        """The epoch is over. If its worker still lives it is told to begin a new one."""
        self._plan_socket_closed_epoch = None
        if self._epoch == epoch:
            self._end()
        self._send_message(Rejoin(epoch))

    def block_process(self, worker: Hello) -> None:
        """The process of that worker is dead or being killed: whatever it still says, it joins no more."""
        self._plan_socket_closed_epoch = None
        self._blocked_instances.append(worker.instance)
        if self._pending is not None and self._pending.instance == worker.instance:
            self._pending = None
        if self._epoch is None or self._instance != worker.instance:
            self._send_goodbye(worker.epoch)
        else:  # maybe in an epoch that the engine has not heard of yet
            self._send_goodbye(self._epoch)
            self._end()

    @property
    def epoch(self) -> int | None:
        """Of the joined worker."""
        return self._epoch

    def _send_goodbye(self, epoch: int) -> None:
        self._send_message(Goodbye(epoch, "this process is being killed, or taken for dead; it cannot join again"))

    def _end(self) -> None:
        assert self._epoch is not None
        self._closed.append(self._epoch)
        self._epoch = None
        # The first of them that says Hello joins; the others are refused once more.
        waiting, self._waiting = self._waiting, {}
        for epoch in waiting.values():
            self._send_message(Rejoin(epoch))

    def _send_message(self, message: Rejoin | Goodbye | Heartbeat) -> bool:
        """Send to the worker of `message.epoch` if it is there, and say whether it is."""
        return self._post(message.epoch, encode(message)) != zmq.EHOSTUNREACH

    def _post(self, epoch: int, frame: bytes) -> int:
        """Send to the worker of that epoch. Returns 0, or why not.

        EHOSTUNREACH: it has no connection. EAGAIN: more than can be in flight waits to be read.
        """
        try:
            self._plans.send_multipart((_identity(epoch), frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return int(error.errno)
        return 0

    def is_reachable(self, epoch: int) -> bool:
        """Whether the worker of that epoch has a connection, joined or not, alive or hung."""
        # A ROUTER tells whether a peer is there only when it is sent to. Workers take no notice of a heartbeat.
        return self._send_message(Heartbeat(epoch, 0))

    # --- receiving --------------------------------------------------------------------------------------------------

    def receive(self) -> list[Arrival]:
        """What has arrived from the joined worker, in order; never blocks. Bad frames are counted and dropped.

        Raises ProtocolMismatch when the only worker there is of another release: it can never join.
        """
        arrivals: list[Arrival] = []
        for _ in range(_MAX_FRAMES_PER_RECEIVE):
            if not _is_readable(self._results):
                break
            self._on_frame(self._results.recv_multipart(zmq.NOBLOCK), arrivals)
        if _is_readable(self._plans):
            self._discard_unexpected()
        if _is_readable(self._monitor):
            self._read_monitor()
        if self._probes and self._clock() >= self._probes[0]:
            self._probe(arrivals)
        return arrivals

    def _on_frame(self, parts: list[bytes], arrivals: list[Arrival]) -> None:
        begin = time.perf_counter()
        try:
            if len(parts) != 1:
                raise DecodeError("a frame in several parts")
            message = decode(parts[0])
        except DecodeError as error:
            self.counters.bad_frames += 1
            count = self.counters.bad_frames
            if isinstance(error, ProtocolMismatch) and self._epoch is None:
                log.error("protocol_mismatch", theirs=error.theirs, ours=PROTOCOL, hint="both must be of one release")
                raise
            if count & (count - 1) == 0:  # 1, 2, 4, 8 ...: who sends noise cannot fill the log
                log.warning("bad_frame", problem=str(error), num_bad_frames=count)
            return
        finally:
            self.counters.decode_seconds += time.perf_counter() - begin
            self.counters.bytes_received += sum(map(len, parts))
        self.counters.messages += 1
        if isinstance(message, Hello):
            self._on_hello(message, arrivals)
        elif message.epoch == self._plan_socket_closed_epoch and isinstance(message, StepResult | StepError | Goodbye):
            arrivals.append(message)  # what it sends comes by another connection than the one that closed first
        elif message.epoch != self._epoch:
            self._on_unknown_epoch(message.epoch)
        else:
            self.last_heard = self._clock()
            if isinstance(message, StepError | Goodbye):  # either is the last word of an epoch
                self._end()
            if isinstance(message, StepResult | StepError | Goodbye | Stopping):
                arrivals.append(message)

    def _on_unknown_epoch(self, epoch: int) -> None:
        if self._pending is not None and self._pending.epoch == epoch:
            return
        self.counters.stale_messages += 1
        if self._send_message(Rejoin(epoch)) and epoch not in self._closed:
            self._closed.append(epoch)

    def _on_hello(self, hello: Hello, arrivals: list[Arrival]) -> None:
        if hello.epoch in self._closed or hello.epoch == self._epoch:
            self.counters.stale_messages += 1
            return
        if hello.instance in self._blocked_instances:
            self.counters.refused_workers += 1
            self._closed.append(hello.epoch)
            self._send_goodbye(hello.epoch)
            return
        # Its plan socket may be a moment behind the one this came through: it joins once a plan can reach it.
        self._pending, self._pending_since = hello, self._clock()
        self._probe(arrivals)
        self._schedule_probes()

    # --- connections ------------------------------------------------------------------------------------------------

    def _discard_unexpected(self) -> None:
        for _ in range(_MAX_FRAMES_PER_RECEIVE):
            if not _is_readable(self._plans):
                return
            self._plans.recv_multipart(zmq.NOBLOCK)
            self.counters.bad_frames += 1

    def _read_monitor(self) -> None:
        while _is_readable(self._monitor):
            recv_monitor_message(self._monitor)
        self._schedule_probes()

    def _schedule_probes(self) -> None:
        now = self._clock()
        self._probes = deque(now + delay for delay in _PROBE_DELAYS_SECONDS)

    def _probe(self, arrivals: list[Arrival]) -> None:
        now = self._clock()
        while self._probes and self._probes[0] <= now:
            self._probes.popleft()
        if self._epoch is not None and not self.is_reachable(self._epoch):
            arrivals.append(Goodbye(self._epoch, CLOSED))
            self._plan_socket_closed_epoch = self._epoch
            self._end()
        if (hello := self._pending) is None:
            return
        if self.is_reachable(hello.epoch):
            self._pending = None
            self._admit(hello, arrivals)
        elif now - self._pending_since > _PENDING_SECONDS:
            self._pending = None
        elif not self._probes:
            self._probes.append(now + _PROBE_DELAYS_SECONDS[-1])

    def _admit(self, hello: Hello, arrivals: list[Arrival]) -> None:
        if self._epoch is not None:
            self.counters.refused_workers += 1
            self._closed.append(hello.epoch)
            self._send_message(Goodbye(hello.epoch, "another worker is joined to this scheduler"))
            self._wait_for_place(hello)
            return
        self._waiting.pop(hello.instance, None)
        self._epoch, self._instance, self._plan_socket_closed_epoch = hello.epoch, hello.instance, None
        self.last_heard = self._clock()
        arrivals.append(hello)

    def _wait_for_place(self, hello: Hello) -> None:
        """Remember a refused worker, to send it Rejoin when the joined one is gone."""
        if hello.instance not in self._waiting:
            log.warning(
                "join_refused",
                epoch=hello.epoch,
                pid=hello.pid,
                hint="another one is joined; it is asked when that one is gone",
            )
            if len(self._waiting) == _MAX_WAITING_WORKERS:
                del self._waiting[next(iter(self._waiting))]
        self._waiting[hello.instance] = hello.epoch


def _own(directory: Path, held: contextlib.ExitStack) -> SocketDir:
    """The checked directory, locked for this process for as long as `held`, without the sockets of a dead one."""
    sockets = private_socket_dir(directory)
    lock_fd = os.open(sockets.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    held.callback(os.close, lock_fd)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SocketError(
            f"another scheduler uses the socket directory {sockets.directory}; give each one its own"
        ) from None
    unlink_stale(sockets.plan)
    unlink_stale(sockets.result)
    return sockets


def _bind(socket: zmq.Socket[bytes], path: Path) -> None:
    try:
        socket.bind(f"ipc://{path}")
    except zmq.ZMQError as error:
        raise SocketError(f"cannot bind {path}: {error.strerror}; is the directory writable?") from error


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # ZeroMQ may have removed it, or somebody the directory
        path.unlink()


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(cast(int, socket.get(zmq.EVENTS)) & zmq.POLLIN)


def _identity(epoch: int) -> bytes:
    return epoch.to_bytes(8, "little")
