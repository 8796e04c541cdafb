"""A proxy between scheduler and worker: a function may drop, repeat or change each frame. Real sockets both sides."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from support.sockets import bare_context

from lineclear.process.private_dir import private_socket_dir
from lineclear.wire.codec import DecodeError, decode, encode
from lineclear.wire.messages import Heartbeat, Hello

Tamper = Callable[[str, bytes], Sequence[bytes]]
"""Called with "plan" or "result" and a frame, on the proxy's thread; returns the frames to send on, in order."""


class Proxy:
    """Binds the scheduler's sockets in `worker_side` and connects to the scheduler's in `scheduler_side`."""

    def __init__(self, scheduler_side: Path, worker_side: Path, tamper: Tamper) -> None:
        self.seen: deque[tuple[str, bytes]] = deque(maxlen=10_000)
        """Received frames."""
        self._tamper = tamper
        self._injected: deque[bytes] = deque()
        self._context = bare_context()
        ours, theirs = private_socket_dir(worker_side), private_socket_dir(scheduler_side)
        self._to_plans = f"ipc://{theirs.plan}"
        self._plans_out = self._context.socket(zmq.ROUTER)
        self._plans_out.set(zmq.ROUTER_MANDATORY, 1)
        self._plans_out.bind(f"ipc://{ours.plan}")
        self._results_in = self._context.socket(zmq.PULL)
        self._results_in.bind(f"ipc://{ours.result}")
        self._results_out = self._context.socket(zmq.PUSH)
        self._results_out.connect(f"ipc://{theirs.result}")
        self._plans_in: dict[bytes, zmq.Socket[bytes]] = {}
        self._hellos: list[tuple[int, bytes]] = []  # epoch and frame, of workers that no plan can reach yet
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy")

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._context.destroy()

    def inject(self, frame: bytes) -> None:
        """Send a frame to the scheduler from any thread."""
        self._injected.append(frame)

    def _run(self) -> None:
        while not self._stopped.is_set():
            while self._injected:
                self._results_out.send(self._injected.popleft())
            if self._results_in.poll(2):
                self._pass_result(self._results_in.recv())
            self._hellos = [hello for hello in self._hellos if not self._pass_hello(*hello)]
            for epoch, socket in self._plans_in.items():
                while socket.poll(0):
                    frame = socket.recv()
                    self.seen.append(("plan", frame))
                    for changed in self._tamper("plan", frame):
                        self._pass_plan(epoch, changed)

    def _pass_plan(self, epoch: bytes, frame: bytes) -> bool:
        """Send to the worker of `epoch`; return whether it is connected."""
        try:
            self._plans_out.send_multipart((epoch, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _pass_hello(self, epoch: int, frame: bytes) -> bool:
        """Pass a Hello on once a plan can reach its worker; return whether that is so.

        The worker's plan socket may connect later than the socket of its Hello, or never if the worker is dead.
        """
        # The scheduler probes in the same way: workers ignore a heartbeat.
        identity = _identity(epoch)
        if not self._pass_plan(identity, encode(Heartbeat(epoch, 0))):
            return False
        # The scheduler addresses plans by epoch, so the proxy connects under that identity.
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, identity)
        socket.connect(self._to_plans)
        self._plans_in[identity] = socket
        for changed in self._tamper("result", frame):
            self._results_out.send(changed)
        return True

    def _pass_result(self, frame: bytes) -> None:
        self.seen.append(("result", frame))
        message = None
        with contextlib.suppress(DecodeError):
            message = decode(frame)
        if isinstance(message, Hello):
            self._hellos.append((message.epoch, frame))
            return
        for changed in self._tamper("result", frame):
            self._results_out.send(changed)


def _identity(epoch: int) -> bytes:
    return epoch.to_bytes(8, "little")
