"""The line between a supervisor and its standby worker, which has imported everything and waits to be promoted.

One byte each way at a time: the standby reports that it is ready, the supervisor promotes it, the standby acknowledges
and goes on as any worker does. The end of the line means that the process at its other end has ended. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

_VARIABLE = "LINECLEAR_STANDBY"  # the standby's descriptor of the line
_LOW_PRIORITY = 10
READY, PROMOTE, PROMOTED = b"r", b"p", b"a"


class StandbyLine:
    """The supervisor's end. Raises OSError where the system has no descriptors left."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)

    @property
    def fileno(self) -> int:
        """Readable when the standby has reported something, or has ended."""
        return self._ours.fileno()

    @property
    def inherited(self) -> int:
        """The descriptor that the standby must inherit (`pass_fds`)."""
        return self._theirs.fileno()

    def environment(self) -> dict[str, str]:
        """What the standby must find in its environment."""
        return {_VARIABLE: str(self._theirs.fileno())}

    def started(self) -> None:
        """Close the standby's end here: the process has it, or there is none."""
        self._theirs.close()

    def promote(self) -> None:
        """Let the standby go on. One that has ended is noticed by its process, not here."""
        with contextlib.suppress(OSError):
            self._ours.send(PROMOTE)

    def receive(self) -> bytes:
        """Return what the standby has reported, when `fileno` is readable; empty at the end of the line."""
        try:
            return self._ours.recv(16)
        except OSError:
            return b""

    def close(self) -> None:
        """Close the line. A standby that was not promoted exits."""
        self._ours.close()
        self._theirs.close()


class Standby:
    """The standby's end."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    @classmethod
    def claim(cls) -> Standby | None:
        """Return this process's line if it was started as a standby."""
        value = os.environ.pop(_VARIABLE, None)
        if value is None:
            return None
        os.set_inheritable(int(value), False)
        return cls(socket.socket(fileno=int(value)))

    def run_in_background(self, work: Callable[[], object]) -> None:
        """Run `work` at a low priority and wait for it, so that it takes little time from the worker that serves.

        On a thread of its own, because a thread that has lowered its priority may not raise it again.
        """
        failures: list[BaseException] = []

        def run() -> None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
            try:
                work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="standby-imports")
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    def wait_until_promoted(self) -> None:
        """Report that this process is ready and block until it is promoted. Exits if the supervisor is gone."""
        with contextlib.suppress(OSError):
            self._line.send(READY)
            if self._line.recv(1) == PROMOTE:
                with contextlib.suppress(OSError):
                    self._line.send(PROMOTED)
                self._line.close()
                return
        os._exit(0)
