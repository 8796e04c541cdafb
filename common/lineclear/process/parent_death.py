"""Exit of a spawned worker when its scheduler exits, by two independent mechanisms. Linux only.

The kernel's parent-death signal (PR_SET_PDEATHSIG) works even if the worker is blocked in C code. It is lost if the
parent exits before the worker requests it. A pipe whose writing end only the scheduler holds reports that case.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading

from lineclear.exit_codes import ExitCode

_VARIABLE = "LINECLEAR_PARENT_PIPE"  # "<pid of the scheduler>:<reading end of its pipe>"
_PR_SET_PDEATHSIG = 1


class ParentDeathPipe:
    """The scheduler's end of the pipe. All spawned workers share it and exit when it is closed."""

    def __init__(self) -> None:
        # Both ends are close-on-exec, so that no other child can keep the pipe open.
        self._reading, self._writing = os.pipe()

    def environment(self) -> dict[str, str]:
        return {_VARIABLE: f"{os.getpid()}:{self._reading}"}

    @property
    def inherited(self) -> tuple[int, ...]:
        """Descriptors that a worker inherits (`pass_fds`)."""
        return (self._reading,)

    def close(self) -> None:
        """Close the pipe. Running workers exit."""
        os.close(self._writing)
        os.close(self._reading)


def die_with_parent() -> bool:
    """Exit when the scheduler that spawned this process exits. Return False if no scheduler spawned it.

    Call it before slow imports. Exits at once if the scheduler has exited already.
    """
    value = os.environ.pop(_VARIABLE, None)
    if value is None:
        return False
    parent, descriptor = (int(part) for part in value.split(":"))
    os.set_inheritable(descriptor, False)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it exited before the line above, so no signal comes
        os._exit(ExitCode.ORPHANED)
    threading.Thread(target=_watch, args=(descriptor,), name="parent-death", daemon=True).start()
    return True


def _watch(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLHUP)
    poll.poll()
    os._exit(ExitCode.ORPHANED)
