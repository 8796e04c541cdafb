"""Connection between a supervisor and its standby worker, which has imported everything and waits for promotion.

Messages: the standby is ready (one byte), the supervisor promotes it with the further flags of the worker that it
replaces (a line), the standby acknowledges (one byte) and starts as that worker. A closed connection means that the
other process has exited. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence

from lineclear.process.priority import lower_priority

_VARIABLE = "LINECLEAR_STANDBY"  # the standby's descriptor of the connection
_LOW_PRIORITY = 10
READY, PROMOTE, PROMOTED = b"r", b"p", b"a"


class StandbyLine:
    """The supervisor's end. The constructor raises OSError if the system has no descriptors left."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)

    @property
    def fileno(self) -> int:
        """Descriptor that is readable when the standby has sent a message or has exited."""
        return self._ours.fileno()

    @property
    def inherited(self) -> int:
        """Descriptor that the standby inherits (`pass_fds`)."""
        return self._theirs.fileno()

    def environment(self) -> dict[str, str]:
        return {_VARIABLE: str(self._theirs.fileno())}

    def started(self) -> None:
        """Close the standby's end in this process, after the standby was spawned or failed to spawn."""
        self._theirs.close()

    def promote(self, flags: Sequence[str] = ()) -> None:
        """Promote the standby, with flags beyond those it was started with. Does nothing if it has exited."""
        with contextlib.suppress(OSError):
            self._ours.send(PROMOTE + "\0".join(flags).encode() + b"\n")

    def receive(self) -> bytes:
        """Return the messages of the standby once `fileno` is readable; empty if it has exited."""
        try:
            return self._ours.recv(16)
        except OSError:
            return b""

    def close(self) -> None:
        """Close the connection. A standby that was not promoted exits."""
        self._ours.close()
        self._theirs.close()


class Standby:
    def __init__(self, line: socket.socket) -> None:
        self._line = line

    @classmethod
    def claim(cls) -> Standby | None:
        """Return the standby's end if this process was started as a standby."""
        value = os.environ.pop(_VARIABLE, None)
        if value is None:
            return None
        os.set_inheritable(int(value), False)
        return cls(socket.socket(fileno=int(value)))

    def run_in_background(self, work: Callable[[], object]) -> None:
        """Run `work` with low priority and wait for it, so that it takes little CPU time from the serving worker.

        It runs on its own thread, because a thread cannot raise its priority again.
        """
        failures: list[BaseException] = []

        def run() -> None:
            lower_priority(_LOW_PRIORITY)
            try:
                work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="standby-imports")
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    def wait_until_promoted(self) -> list[str]:
        """Report that this process is ready, block until it is promoted, and return the further flags.

        Exits if the supervisor is gone.
        """
        with contextlib.suppress(OSError):
            self._line.send(READY)
            with self._line.makefile("rb") as lines:
                line = lines.readline()
            if line.startswith(PROMOTE) and line.endswith(b"\n"):
                with contextlib.suppress(OSError):
                    self._line.send(PROMOTED)
                self._line.close()
                return [flag.decode() for flag in line[1:-1].split(b"\0") if flag]
        os._exit(0)
