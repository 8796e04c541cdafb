"""The lifeline between a scheduler and the worker it spawned: a worker whose scheduler died does not stay behind.

Two independent means, because either has a hole. The kernel's parent-death signal works even while the worker is stuck
in C code, but is lost when the parent dies before it is armed. A pipe of which only the scheduler holds the writing end
reads as closed however the scheduler ended. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading

from lineclear.exit_codes import ExitCode

_VARIABLE = "LINECLEAR_LIFELINE"  # "<pid of the scheduler>:<reading end of its pipe>"
_PR_SET_PDEATHSIG = 1


class ParentDeathPipe:
    """The scheduler's end. One serves every worker it spawns; closing it ends them all."""

    def __init__(self) -> None:
        # Both ends are close-on-exec: no other child can keep the pipe open behind our back.
        self._reading, self._writing = os.pipe()

    def environment(self) -> dict[str, str]:
        """What the worker must find in its environment."""
        return {_VARIABLE: f"{os.getpid()}:{self._reading}"}

    @property
    def inherited(self) -> tuple[int, ...]:
        """The descriptors the worker must inherit (`pass_fds`)."""
        return (self._reading,)

    def close(self) -> None:
        """Let go. A worker that is still there exits."""
        os.close(self._writing)
        os.close(self._reading)


def die_with_parent() -> bool:
    """Tie this process to the scheduler that spawned it; False when none did.

    To be called first thing, before anything slow: from here on the process is killed when that scheduler dies. Exits
    at once if it is dead already.
    """
    value = os.environ.pop(_VARIABLE, None)
    if value is None:
        return False
    parent, descriptor = (int(part) for part in value.split(":"))
    os.set_inheritable(descriptor, False)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died between our exec and the line above: no signal will come
        os._exit(ExitCode.ORPHANED)
    threading.Thread(target=_watch, args=(descriptor,), name="lifeline", daemon=True).start()
    return True


def _watch(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLHUP)
    poll.poll()
    os._exit(ExitCode.ORPHANED)
