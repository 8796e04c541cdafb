"""The worker's end of the plan protocol: two kinds of socket, each owned by one thread.

Decides how frames travel and what happens while nobody is at the other end. What a message means is the loop's
business.
"""

from __future__ import annotations

import contextlib
import os
import select

import structlog
import zmq

from lineclear.process.socket_dir import SocketDir
from lineclear.wire.codec import DecodeError, ProtocolMismatch, decode, encode
from lineclear.wire.messages import Goodbye, Heartbeat, Message, Rejoin, SetLogLevel, StepPlan

log = structlog.get_logger()

SchedulerMessage = StepPlan | Rejoin | Goodbye | SetLogLevel
"""What a scheduler sends that means something."""

_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 500


class Waker:
    """Wakes the thread that waits for plans. ring() is safe from any thread, and `fileno_to_ring` from C.

    A pipe and not an eventfd, so that `signal.set_wakeup_fd` can ring it.
    """

    def __init__(self) -> None:
        self.fileno, self.fileno_to_ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        """Wake the waiting thread, now or when it next waits."""
        with contextlib.suppress(BlockingIOError):  # full of rings already
            os.write(self.fileno_to_ring, b"\0")

    def wait(self, timeout_seconds: float) -> None:
        """Wait until it rings, at most `timeout_seconds`. The ring stays."""
        poll = select.poll()
        poll.register(self.fileno, select.POLLIN)
        poll.poll(timeout_seconds * 1000)

    def clear(self) -> None:
        """Forget the rings so far."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fileno, 4096):
                pass

    def close(self) -> None:
        """Nobody may ring any more."""
        os.close(self.fileno)
        os.close(self.fileno_to_ring)


class PlanSocket:
    """Receives what the scheduler sends to one epoch. Owned by the launch thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], sockets: SocketDir, epoch: int, bell: Waker, max_plan_bytes: int
    ) -> None:
        self.epoch = epoch
        self.num_bad_frames = 0
        self._bell = bell
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, epoch.to_bytes(8, "little"))
        self._socket.set(zmq.MAXMSGSIZE, max_plan_bytes)
        self._has_received = False
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        _connect(self._socket, str(sockets.plan))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(bell.fileno, zmq.POLLIN)

    def receive(self, patience_seconds: float | None = None) -> SchedulerMessage | None:
        """Wait for the next order of this epoch, or for the bell: then None. So too when nothing at all comes for
        `patience_seconds`.

        Frames that are none are counted and dropped. Raises ProtocolMismatch.
        """
        while True:
            timeout_ms = None if patience_seconds is None else round(patience_seconds * 1000)
            ready = [source for source, _ in self._poller.poll(timeout_ms)]
            # The bell goes first: whoever rang it wants no more plans to start.
            if self._bell.fileno in ready:
                self._bell.clear()
                return None
            if self._socket not in ready:
                return None
            try:
                message = self._decode(self._socket.recv_multipart(zmq.NOBLOCK))
            except ProtocolMismatch:
                raise
            except DecodeError as error:
                self.num_bad_frames += 1
                if self.num_bad_frames & (self.num_bad_frames - 1) == 0:  # 1, 2, 4, 8 ...: noise cannot fill the log
                    log.warning("bad_frame", problem=str(error), num_bad_frames=self.num_bad_frames)
                continue
            self._has_received |= message.epoch == self.epoch
            if isinstance(message, SchedulerMessage) and message.epoch == self.epoch:
                return message
            if not isinstance(message, Heartbeat):  # the scheduler's way to see whether we are connected
                log.warning("stray_message", kind=type(message).__name__)

    def _decode(self, parts: list[bytes]) -> Message:
        if len(parts) != 1:
            raise DecodeError("a frame in several parts")
        return decode(parts[0])

    def is_connected(self) -> bool:
        """Return whether the scheduler of this epoch is there: it has sent something, and its connection is open.

        From the first call on, `receive` also returns when the connection is lost.
        """
        # It sends a heartbeat before it lets a worker join. Only a drain asks, so no step pays for the monitor.
        self._poller.register(self._monitor, zmq.POLLIN)
        return self._has_received and not self._monitor.poll(0)

    def close(self) -> None:
        """Leave: the scheduler can reach this epoch no more."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


class ResultSocket:
    """Sends to the scheduler, in order. Owned by one thread; each sending thread has its own."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], sockets: SocketDir, *, only_while_connected: bool = False
    ) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, 64)
        self._socket.set(zmq.IMMEDIATE, int(only_while_connected))
        _connect(self._socket, str(sockets.result))

    def send(self, message: Message) -> bool:
        """Queue a message; False when the scheduler is away and no more can be kept for it. Never blocks."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, linger_seconds: float = 0.0) -> None:
        """Give what is queued `linger_seconds` to leave, in the background: ending the context waits for it."""
        self._socket.close(linger=int(linger_seconds * 1000))


def _connect(socket: zmq.Socket[bytes], path: str) -> None:
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.connect(f"ipc://{path}")
