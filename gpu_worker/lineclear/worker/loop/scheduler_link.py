"""The worker's sockets to the scheduler (ZeroMQ): one that receives plans, others that send results and heartbeats.

Each socket is owned by one thread. This module sends and receives frames; step_loop.py handles the messages.
"""

from __future__ import annotations

import contextlib
import os

import structlog
import zmq

from lineclear.process.logging_setup import should_log
from lineclear.process.private_dir import SocketDir
from lineclear.wire.codec import DecodeError, ProtocolMismatch, decode, encode
from lineclear.wire.messages import ControlMessage, Heartbeat, Message, StepPlan

log = structlog.get_logger()

_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 500


class Waker:
    """A pipe that wakes the thread waiting for plans; any thread, and `signal.set_wakeup_fd`, may write to it."""

    def __init__(self) -> None:
        self.fileno, self.wake_fileno = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        """Wake the waiting thread, now or at its next wait."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self.wake_fileno, b"\0")

    def clear(self) -> None:
        """Clear all wake-ups so far."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fileno, 4096):
                pass

    def close(self) -> None:
        """Close the pipe. Do not call wake() afterwards."""
        os.close(self.fileno)
        os.close(self.wake_fileno)


class PlanSocket:
    """Receives the scheduler's messages to one epoch. Owned by the launch thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], sockets: SocketDir, epoch: int, waker: Waker, max_plan_bytes: int
    ) -> None:
        self.epoch, self.num_bad_frames, self._waker = epoch, 0, waker
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, epoch.to_bytes(8, "little"))
        self._socket.set(zmq.MAXMSGSIZE, max_plan_bytes)
        self._has_received = False
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        _connect(self._socket, str(sockets.plan))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(waker.fileno, zmq.POLLIN)

    def receive(self, timeout_seconds: float | None = None) -> StepPlan | ControlMessage | None:
        """Wait for the next message of this epoch; None after a wake-up or the timeout. Raises ProtocolMismatch."""
        while True:
            timeout_ms = None if timeout_seconds is None else round(timeout_seconds * 1000)
            ready = [source for source, _ in self._poller.poll(timeout_ms)]
            # Wake-ups come before messages: after one, no further plan may start.
            if self._waker.fileno in ready:
                self._waker.clear()
                return None
            if self._socket not in ready:
                return None
            try:
                first, *others = self._socket.recv_multipart(zmq.NOBLOCK)
                if others:
                    raise DecodeError("a message in several frames")
                message = decode(first)
            except ProtocolMismatch:
                raise
            except DecodeError as error:
                self.num_bad_frames += 1
                if should_log(self.num_bad_frames):
                    log.warning("bad_frame", problem=str(error), num_bad_frames=self.num_bad_frames)
                continue
            self._has_received |= message.epoch == self.epoch
            if isinstance(message, StepPlan | ControlMessage) and message.epoch == self.epoch:
                return message
            if not isinstance(message, Heartbeat):  # the scheduler sends it to probe the connection
                log.warning("stray_message", kind=type(message).__name__)

    def is_connected(self) -> bool:
        """Return whether the scheduler of this epoch has sent a message and its connection is open.

        From the first call on, `receive` also returns when the connection is lost.
        """
        # The scheduler sends a heartbeat before it accepts a worker. Only a drain calls this, so steps do not pay for
        # it.
        self._poller.register(self._monitor, zmq.POLLIN)
        return self._has_received and not self._monitor.poll(0)

    def close(self) -> None:
        """Disconnect. The scheduler can no longer send to this epoch."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


class ResultSocket:
    """Sends messages to the scheduler in order. Owned by one thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], sockets: SocketDir, *, only_while_connected: bool = False
    ) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, 64)
        self._socket.set(zmq.IMMEDIATE, int(only_while_connected))
        _connect(self._socket, str(sockets.result))

    def send(self, message: Message) -> bool:
        """Queue a message without blocking. Returns False if the scheduler is disconnected and the queue is full."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, linger_seconds: float = 0.0) -> None:
        """Close the socket. Queued messages are sent for up to `linger_seconds`, while the context terminates."""
        self._socket.close(linger=int(linger_seconds * 1000))


def _connect(socket: zmq.Socket[bytes], path: str) -> None:
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.connect(f"ipc://{path}")
